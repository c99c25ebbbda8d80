"""What an operator sees of a server: `gllm top`, JSON logs, refusals."""

import json
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.support.servers.server import DEADLINE, Server, serving, wait_until

GLLM = [sys.executable, "-c", "import sys; from gllm.__main__ import main; sys.exit(main())"]
TEXT: dict[str, Any] = {"prompt": "quite a secret", "max_tokens": 8, "ignore_eos": True}


def metrics(server: Server) -> bytes:
    with urllib.request.urlopen(f"{server.url}/metrics", timeout=DEADLINE) as answer:
        return answer.read()


@pytest.mark.full
def test_top_and_json_logs(tiny_model: Path) -> None:
    flags = ["--pp", "2", "--tp", "2,1", "--log-format", "json", "--log-level", "debug"]
    with serving(tiny_model, *flags, "--served-model-name", "tiny") as server:
        assert server.post("/v1/completions", TEXT)[0] == 200
        wait_until(lambda: metrics(server).count(b"gllm:rank_busy_seconds_total{") == 2)
        top = subprocess.run(
            [*GLLM, "top", "--once", "--interval", "0.2", "--url", server.url],
            capture_output=True, text=True, timeout=DEADLINE, check=True,
        )  # fmt: skip
        server.process.send_signal(signal.SIGTERM)
        code, errors = server.end()
    assert top.stdout.startswith("gllm top: tiny")
    labels = {line[:15].strip() for line in top.stdout.splitlines()}
    assert labels >= {"TTFT", "KV cache", "stage 0", "rank 0.0", "rank 0.1", "stage 1"}
    assert code == 0
    lines = [json.loads(line) for line in errors.splitlines()]
    names = {"frontend", "stage 0 rank 0", "stage 0 rank 1", "stage 1"}
    assert {line["process"] for line in lines} == names
    assert any(line["message"].startswith("tiny is ready") for line in lines)
    (ended,) = [line for line in lines if line.get("path") == "/v1/completions"]
    assert (ended["status"], ended["output_tokens"]) == (200, 8)
    assert ended["request_id"]
    assert TEXT["prompt"] not in errors


@pytest.mark.full
def test_a_refusal_is_a_json_line_too(tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    endpoint = "collector:4318"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", endpoint)
    code, errors = Server(str(tiny_model), "--log-format", "json").end()
    assert code == 2
    (line,) = [json.loads(line) for line in errors.splitlines()]
    assert line["level"] == "critical"
    assert line["message"].startswith(f"otlp_traces_endpoint is '{endpoint}'")
