"""Log lines: their shape, and that nothing of a process comes out otherwise."""

import json
import logging
import subprocess
import sys

import pytest

from gllm.logs import REQUEST_ID, JsonLines, TextLines


def record(**more: object) -> logging.LogRecord:
    made = logging.LogRecord("gllm.x", logging.WARNING, "", 0, "%d of %s", (3, "all"), None)
    made.__dict__.update(more)
    return made


def failure() -> tuple:
    try:
        raise LookupError("no such thing")
    except LookupError:
        return sys.exc_info()


def test_a_json_line() -> None:
    line = JsonLines("stage 2").format(record(created=1.5))
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:01.500Z",
        "level": "warning",
        "process": "stage 2",
        "logger": "gllm.x",
        "message": "3 of all",
    }


def test_a_json_line_has_fields_the_request_and_the_exception() -> None:
    token = REQUEST_ID.set("abc")
    try:
        line = JsonLines("frontend").format(record(fields={"status": 200}, exc_info=failure()))
        text = TextLines("%(levelname)s %(message)s").format(record())
    finally:
        REQUEST_ID.reset(token)
    assert "\n" not in line
    told = json.loads(line)
    assert (told["request_id"], told["status"]) == ("abc", 200)
    assert told["exception"].startswith("Traceback")
    assert told["exception"].endswith("LookupError: no such thing")
    assert text == "WARNING 3 of all (request abc)"


PROCESS = """
import logging, sys, threading, warnings
from gllm.logs import LogConfig, configure
configure(LogConfig("info", sys.argv[1]), stage=1)
logging.getLogger("gllm").info("two\\nlines")
logging.getLogger("gllm").debug("not told")
warnings.warn("beware")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise SystemError("the end")
"""


@pytest.mark.parametrize("shape", ["json", "text"])
def test_all_that_a_process_says(shape: str) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROCESS, shape], capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    if shape == "text":
        assert run.stderr.startswith("INFO stage 1: two\nlines\n")
        return
    lines = [json.loads(line) for line in run.stderr.splitlines()]
    assert {line["process"] for line in lines} == {"stage 1"}
    assert [line["level"] for line in lines] == ["info", "warning", "critical", "critical"]
    assert lines[0]["message"] == "two\nlines"
    assert "beware" in lines[1]["message"]
    assert "ZeroDivisionError" in lines[2]["exception"]
    assert "SystemError: the end" in lines[3]["exception"]
