"""Client of a server: answers, refusals and events; the loop that follows a router."""

import asyncio
import json
import logging
import ssl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import count, pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.deploy.server_client import (
    EventReader,
    ReadinessProbe,
    ServerClient,
    ServerError,
    error_message,
    follow_router,
    read_events,
)
from gllm.plan.emit import compose
from tests.support.http.handler_server import QuietHandler, serving_handler
from tests.support.network.certificates import make_certificate

Answers = list[tuple[int, bytes]]


@contextmanager
def serving(
    answers: Answers,
    certificate: tuple[str, str] | None = None,
    authorities: str | None = None,
) -> Iterator[tuple[str, list[Any]]]:
    """Serve answers in order, the last one again and again; yield the URL and the requests."""
    requests: list[Any] = []

    class Handler(QuietHandler):
        def do_GET(self) -> None:
            self._answer()

        def do_POST(self) -> None:
            self._answer()

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"] or 0))
            key = self.headers["Authorization"]
            requests.append((self.command, self.path, key, body))
            status, data = answers.pop(0) if len(answers) > 1 else answers[0]
            self.send_response(status)
            self.end_headers()
            self.wfile.write(data)

    context = None
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        if authorities is not None:
            context.load_verify_locations(cafile=authorities)
            context.verify_mode = ssl.CERT_REQUIRED
    with serving_handler(Handler, context) as url:
        yield url, requests


def test_requests_have_the_key_and_their_body() -> None:
    with serving([(200, b'{"a": 1}')]) as (url, requests):
        client = ServerClient(f"{url}/v1/", "k", is_own=True)
        assert client.get("/x") == client.post("/y", {"b": 2}) == {"a": 1}
        assert client.get_text("/z") == '{"a": 1}'
        assert client.readiness_error() is None
    paths = [(method, path) for method, path, *_ in requests]
    assert paths == [("GET", "/x"), ("POST", "/y"), ("GET", "/z"), ("GET", "/ready")]
    assert {key for _, _, key, _ in requests} == {"Bearer k"}
    assert [json.loads(body) for *_, body in requests if body] == [{"b": 2}]


def test_refusals_have_the_code_and_the_reason_of_the_server() -> None:
    error = {"error": {"message": "it recovers", "code": "engine_recovering"}}
    with serving([(503, json.dumps(error).encode()), (404, b"no")]) as (url, _):
        client = ServerClient(url)
        with pytest.raises(ServerError, match="/x returned 503: it recovers") as caught:
            client.get("/x")
        refusal = caught.value
        assert (refusal.status, refusal.code, refusal.reason) == (
            503, "engine_recovering", "it recovers",
        )  # fmt: skip
        with pytest.raises(ServerError, match=r"returned 404$") as caught:
            client.post("/x")
        assert (caught.value.code, caught.value.reason) == ("", "")
        assert client.readiness_error() is not None


def test_a_server_that_is_not_there_or_of_another_kind_is_an_error() -> None:
    with serving([(200, b"text")]) as (url, _), pytest.raises(ServerError, match="cannot read"):
        ServerClient(url).get("/x")
    client = ServerClient(url)
    with pytest.raises(ServerError, match="cannot read") as caught:
        client.get("/x")
    assert caught.value.status == 0
    assert client.readiness_error() is not None


def test_the_certificate_and_the_proxy_of_an_own_server_do_not_matter(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving([(200, b"{}")], make_certificate(tmp_path, "server")) as (url, _):
        assert ServerClient(url).readiness_error() is not None
        monkeypatch.setenv("https_proxy", "http://127.0.0.1:9")
        assert ServerClient(url, is_own=True).readiness_error() is None


def test_a_server_that_requires_a_certificate_gets_that_of_the_deployment(tmp_path: Path) -> None:
    files = make_certificate(tmp_path, "server")
    with serving([(200, b"{}")], files, authorities=files[0]) as (url, _):
        assert ServerClient(url, is_own=True, certificate=files).readiness_error() is None
        refused = ServerClient(url, is_own=True).readiness_error()
        assert "cannot read https" in str(refused)
        missing = ServerClient(url, is_own=True, certificate=("nowhere", "nowhere"))
        assert "No such file" in str(missing.readiness_error())


def test_a_process_that_is_not_reached_is_a_warning_that_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    times = iter([0.0, 29.0, 30.0, 31.0])
    with serving([(503, b"")]) as (url, _):
        pass
    probe = ReadinessProbe(ServerClient(url), "engine e0", lambda: next(times))
    for num_warnings in (0, 0, 1, 1):
        assert not probe.is_ready()
        assert len(caplog.messages) == num_warnings
    assert caplog.messages[0].startswith("engine e0 was not reached: cannot read http")
    assert "refused" in caplog.messages[0]


def test_a_process_that_loads_is_reached(caplog: pytest.LogCaptureFixture) -> None:
    times = iter([0.0, 600.0, 601.0])
    with serving([(503, b""), (503, b""), (200, b"{}")]) as (url, _):
        probe = ReadinessProbe(ServerClient(url), "engine e0", lambda: next(times))
        assert [probe.is_ready() for _ in range(3)] == [False, False, True]
    assert not caplog.messages


async def test_a_router_that_is_not_reached_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    now = count(0, 20)
    with serving([(503, b"")]) as (url, _):
        pass
    with caplog.at_level(logging.WARNING):
        following = asyncio.create_task(
            follow_router(ServerClient(url), receive_nothing, 0.001, lambda: float(next(now)))
        )
        async with asyncio.timeout(60):
            while not caplog.messages:
                await asyncio.sleep(0.001)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert "the decisions of the router cannot be followed: cannot read" in caplog.text
    assert next(now) >= 40


async def receive_nothing(engines: Any) -> None:
    raise AssertionError("the router is not there")


async def test_a_router_is_followed_through_errors(caplog: pytest.LogCaptureFixture) -> None:
    answers: Answers = [(503, b""), (200, b"1"), (200, b"2"), (200, b"3")]
    received: list[int] = []

    async def receive(number: int) -> None:
        received.append(number)
        if number == 2:
            raise KeyError("engines")

    with serving(answers) as (url, requests):
        following = asyncio.create_task(follow_router(ServerClient(url), receive, 0.01))
        async with asyncio.timeout(60):
            while received[-1:] != [3]:
                await asyncio.sleep(0.01)
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)
    assert received[:3] == [1, 2, 3]
    assert {path for _, path, *_ in requests} == {"/engines"}
    assert "returned 503" in caplog.text
    assert "could not be followed" in caplog.text


STREAM = b': comment\r\ndata: {"a": 1}\r\n\r\nevent: x\ndata:{"b":2}\n\ndata: [DONE]\n\n'


@given(st.lists(st.integers(0, len(STREAM)), max_size=12))
def test_events_come_whole_however_the_bytes_are_cut(cuts: list[int]) -> None:
    places = [0, *sorted(cuts), len(STREAM)]
    reader = EventReader()
    events = [event for begin, end in pairwise(places) for event in reader.feed(STREAM[begin:end])]
    assert events == [b'{"a": 1}', b'{"b":2}', b"[DONE]"]


@pytest.mark.parametrize(
    "error", ["no", {"message": "no"}, {"error": {"message": "no"}}, {"error": "no"}]
)
def test_errors_in_any_form(error: Any) -> None:
    assert error_message(error) == "no"


def test_a_stream_ends_at_its_last_event() -> None:
    assert list(read_events([STREAM[:9], STREAM[9:], b"data: late\n"])) == [
        b'{"a": 1}', b'{"b":2}',
    ]  # fmt: skip


def test_a_server_on_loopback_is_never_reached_by_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The proxy refuses everything."""
    with serving([(502, b"{}")]) as (proxy, asked), serving([(200, b'{"a": 1}')]) as (url, _):
        for name in ("http_proxy", "https_proxy", "all_proxy"):
            monkeypatch.setenv(name, proxy)
        for name in ("no_proxy", "NO_PROXY"):
            monkeypatch.delenv(name, raising=False)
        for host in ("127.0.0.1", "localhost", "127.1.2.3"):
            client = ServerClient(url.replace("127.0.0.1", host))
            with suppress(ServerError):  # the server listens on one of them
                assert client.get("/x") == {"a": 1}
        assert ServerClient(url).get("/x") == {"a": 1}
        with pytest.raises(SystemExit) as end:
            exec(compose.PROBE.format(url=url))
        assert not end.value.code
        assert asked == []
        with pytest.raises(ServerError, match="502"):
            ServerClient("http://engine.invalid:8000").get("/x")
        assert len(asked) == 1
