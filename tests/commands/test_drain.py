"""`gllm drain`: the command against a scripted server."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from gllm.__main__ import main
from gllm.commands import drain
from tests.support.http.handler_server import QuietHandler, serving_handler

Answer = tuple[int, Any]


@contextmanager
def scripted(posts: list[Answer], gets: list[Answer]) -> Iterator[tuple[str, list[str]]]:
    """Serve answers in order, the last ones again and again; yield the URL and the paths."""
    paths: list[str] = []

    class Handler(QuietHandler):
        def do_POST(self) -> None:
            self._answer(posts)

        def do_GET(self) -> None:
            self._answer(gets)

        def _answer(self, answers: list[Answer]) -> None:
            paths.append(f"{self.command} {self.path} {self.headers['Authorization']}")
            status, body = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

    with serving_handler(Handler) as url:
        yield url, paths


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drain, "POLL_SECONDS", 0.01)
    monkeypatch.delenv("GLLM_API_KEY", raising=False)


def nodes(state: str = "", cause: str = "") -> Answer:
    rows = [{"name": "head", "state": "member", "last_cause": ""}]
    if state:
        rows.append({"name": "b/1", "state": state, "last_cause": cause})
    return 200, {"nodes": rows}


DRAINING: Answer = (200, {"name": "b/1", "state": "draining"})


def refused(status: int, message: str) -> Answer:
    return status, {"error": {"message": message}}


def test_it_waits_until_the_machine_has_left(capsys: pytest.CaptureFixture[str]) -> None:
    posts = [refused(503, "the engine is recovering"), DRAINING]
    with scripted(posts, [nodes("draining"), nodes("draining"), nodes()]) as (url, paths):
        assert main(["drain", "b/1", url + "/v1", "--api-key", "k"]) == 0
    assert paths == ["POST /nodes/b%2F1/drain Bearer k"] * 2 + ["GET /nodes Bearer k"] * 3
    assert "b/1 has left" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("posts", "gets", "reason"),
    [
        (refused(404, "there is no machine"), nodes(), "404: there is no machine"),
        (refused(409, "it is the head"), nodes(), "409: it is the head"),
        (refused(401, "no"), nodes(), "needs an API key"),
        (DRAINING, nodes("member", "no memory"), "is not drained: it is member: no memory"),
    ],
)
def test_reasons(
    posts: Answer, gets: Answer, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with scripted([posts], [gets]) as (url, _):
        assert main(["drain", "b/1", url]) == 1
    error = capsys.readouterr().err
    assert reason in error
    assert error.startswith("gllm drain: ")


def test_it_does_not_wait_for_ever(capsys: pytest.CaptureFixture[str]) -> None:
    with scripted([DRAINING], [nodes("draining")]) as (url, _):
        assert main(["drain", "b/1", url, "--timeout", "0.05"]) == 1
    assert "still drains" in capsys.readouterr().err
    assert main(["drain", "b/1", url, "--api-key", "ä"]) == 2
