"""Log lines: their shape, and that nothing of a process comes out otherwise."""

import io
import json
import logging
import subprocess
import sys

import pytest

from gllm.observability.logs import (
    LOG_REQUEST_ID,
    MAX_TRACKED_WARNINGS,
    DeduplicatingHandler,
    JsonFormatter,
    TextFormatter,
)


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
    line = JsonFormatter("stage 2").format(record(created=1.5))
    assert json.loads(line) == {
        "time": "1970-01-01T00:00:01.500Z",
        "level": "warning",
        "process": "stage 2",
        "logger": "gllm.x",
        "message": "3 of all",
    }


def test_a_json_line_has_fields_the_request_and_the_exception() -> None:
    token = LOG_REQUEST_ID.set("abc")
    try:
        line = JsonFormatter("frontend").format(record(fields={"status": 200}, exc_info=failure()))
        text = TextFormatter("%(levelname)s %(message)s").format(record())
    finally:
        LOG_REQUEST_ID.reset(token)
    assert "\n" not in line
    told = json.loads(line)
    assert (told["request_id"], told["status"]) == ("abc", 200)
    assert told["exception"].startswith("Traceback")
    assert told["exception"].endswith("LookupError: no such thing")
    assert text == "WARNING 3 of all (request abc)"


PROCESS = """
import logging, sys, threading, warnings
from gllm.observability.logs import LogConfig, configure_logging
configure_logging(LogConfig("info", sys.argv[1]), "stage 1")
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


class Repeated:
    """A log with a clock that a test moves."""

    def __init__(self) -> None:
        self.now, self.stream = 0.0, io.StringIO()
        self._handler = DeduplicatingHandler(self.stream, lambda: self.now)
        self._handler.setFormatter(TextFormatter("%(message)s"))

    def tell(self, message: str, *args: object, level: int = logging.WARNING, **more: object):
        made = logging.LogRecord("gllm.x", level, "", 0, message, args, None)
        made.__dict__.update(more)
        self._handler.handle(made)

    @property
    def lines(self) -> list[str]:
        """What was written since the last look."""
        text = self.stream.getvalue()
        self.stream.seek(0)
        self.stream.truncate()
        return text.splitlines()


def test_a_warning_that_repeats_is_written_once_a_minute_with_a_count() -> None:
    log = Repeated()
    for number in range(100):
        log.tell("request %d is odd", number)
        log.now += 0.5
    assert log.lines == ["request 0 is odd"]
    log.now = 60.0
    for number in range(100, 130):
        log.tell("request %d is odd", number)
    assert log.lines == ["request 100 is odd (99 more in 60 s)"]
    # The rest is counted with whatever comes after the minute.
    log.now = 200.0
    log.tell("another line", level=logging.INFO)
    assert log.lines == ["request 129 is odd (29 more in 140 s)", "another line"]
    log.now = 300.0
    log.tell("request %d is odd", 7)
    assert log.lines == ["request 7 is odd"]


def test_what_is_not_alike_is_not_counted_together() -> None:
    log = Repeated()
    for _ in range(2):
        log.tell("fields %s", "a", about=["a"])
        log.tell("fields %s", "b", about=["b"])
        log.tell("something else")
        log.tell("a failure", level=logging.ERROR)
        log.tell("a note", level=logging.INFO)
        log.tell("of a library", name="aiohttp")
    lines = log.lines
    assert [lines.count(f"fields {name}") for name in "ab"] == [1, 1]
    assert lines.count("something else") == 1
    assert [lines.count(line) for line in ("a failure", "a note", "of a library")] == [2, 2, 2]


def test_names_that_a_client_makes_up_do_not_flood_the_log() -> None:
    log = Repeated()
    for number in range(10 * MAX_TRACKED_WARNINGS):
        log.tell("fields %s", number, about=number)
    assert len(log.lines) <= MAX_TRACKED_WARNINGS + 1
    log.now = 61.0
    log.tell("fields %s", "x", about="x")
    assert sum(int(line.split("(")[1].split()[0]) for line in log.lines if "more in" in line) == (
        9 * MAX_TRACKED_WARNINGS - 1
    )
