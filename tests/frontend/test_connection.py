"""Bytes that are no request, too many of them, and too slow ones; answers that nobody reads."""

import asyncio
import gzip
import json
import resource
import subprocess
import sys
from contextlib import AsyncExitStack

import pytest
import uvloop

from gllm.frontend.connection import MAX_HEADER_BYTES, MAX_HEADERS, MAX_HEADERS_BYTES, MAX_URL_BYTES
from gllm.frontend.listening import raise_open_files_limit
from tests.frontend.conftest import CHAT, CHAT_PATH, TEXT_PATH, serving
from tests.frontend.test_stream import BulkyTokenizer, until
from tests.support.http.raw import SECONDS, connected, post

MANY = "".join(f"x-{i}: y\r\n" for i in range(MAX_HEADERS + 1))
NO_REQUESTS = {
    "line": (b"what is this\r\n\r\n", 400),
    "TLS": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03\r\n\r\n", 400),
    "version": (b"GET / HTTP/9.7\r\nHost: x\r\n\r\n", 400),
    "length": (b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: x\r\n\r\n", 400),
    "lengths": (b"POST / HTTP/1.1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n", 400),
    "smuggled": (
        b"POST / HTTP/1.1\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        400,
    ),
    "header": (b"GET / HTTP/1.1\r\nHost: x\r\nx\x00y: z\r\n\r\n", 400),
    "URL": (b"GET /" + b"x" * MAX_URL_BYTES + b" HTTP/1.1\r\nHost: x\r\n\r\n", 414),
    "field": (
        b"GET / HTTP/1.1\r\nHost: x\r\nx: " + b"y" * (MAX_HEADER_BYTES + 9) + b"\r\n\r\n",
        431,
    ),
    "fields": (f"GET / HTTP/1.1\r\nHost: x\r\n{MANY}\r\n".encode(), 431),
}


@pytest.mark.parametrize("name", NO_REQUESTS)
async def test_bytes_that_are_no_request(server, name, caplog):
    data, expected = NO_REQUESTS[name]
    async with connected(server.client) as raw:
        await raw.send(data)
        status, headers, body = await raw.answer()
        assert await raw.rest() == b"", "the connection is closed"
    assert status == expected
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert headers["content-type"].startswith("application/json")
    assert headers["x-request-id"]
    assert headers["server"] == "gllm"
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")]
    assert (await server.chat()).status == 200


async def test_a_head_without_end(server):
    async with connected(server.client) as raw:
        await raw.send(b"GET / HTTP/1.1\r\nHost: x\r\n")
        field = b"y: " + b"z" * 8000 + b"\r\n"
        for _ in range(MAX_HEADERS_BYTES // len(field) + 1):
            await raw.send(field)
        status, headers, body = await raw.answer()
        assert await raw.rest() == b""
    assert (status, body["error"]["code"]) == (431, "headers_too_large")
    assert headers["x-request-id"]


async def test_an_odd_expectation(server):
    async with connected(server.client) as raw:
        await raw.send(b"GET /nowhere HTTP/1.1\r\nHost: x\r\nExpect: the worst\r\n\r\n")
        status, headers, body = await raw.answer()
    assert (status, body["error"]["code"]) == (417, "http_417")
    assert headers["x-request-id"]


async def test_a_body_that_waits_to_be_asked_for(server):
    whole = post(CHAT_PATH, CHAT, "Expect: 100-continue")
    head, body = whole.split(b"\r\n\r\n", 1)
    async with connected(server.client) as raw:
        await raw.send(head + b"\r\n\r\n")
        assert await raw.receive() == b"HTTP/1.1 100 Continue\r\n\r\n"
        await raw.send(body)
        assert (await raw.answer())[0] == 200


async def test_a_body_that_says_it_is_too_large_is_not_waited_for(server):
    async with connected(server.client) as raw:
        head = f"POST {CHAT_PATH} HTTP/1.1\r\nHost: x\r\nContent-Length: {2**40}\r\n\r\n"
        await raw.send(head.encode())
        status, _, body = await raw.answer()
    assert (status, body["error"]["type"]) == (413, "request_too_large")


async def test_a_small_body_that_holds_a_large_one(server):
    body = gzip.compress(b" " * 10**7 + b"{}")
    answer = await server.post(CHAT_PATH, body, headers={"Content-Encoding": "gzip"})
    assert (answer.status, answer.error["type"]) == (413, "request_too_large")


@pytest.mark.parametrize(
    "run",
    [pytest.param(asyncio.run, marks=pytest.mark.full), uvloop.run],
    ids=["asyncio", "uvloop"],
)
@pytest.mark.parametrize("cut", [30, -3], ids=["head", "body"])
def test_a_request_that_does_not_come(engine, cut, run):
    # Servers run on uvloop, where the first bytes come earlier than elsewhere.
    async def ask():
        async with (
            serving(engine, read_timeout=0.2, header_timeout=0.2) as server,
            connected(server.client) as raw,
        ):
            await raw.send(post(CHAT_PATH, CHAT)[:cut])
            return await raw.answer()

    status, headers, body = run(ask())
    assert (status, body["error"]["code"]) == (408, "read_timeout")
    assert headers["x-request-id"]
    assert engine.calls == []


async def test_only_what_comes_slowly_is_too_slow(engine):
    engine.delay = 0.02
    async with (
        serving(engine, read_timeout=0.2, header_timeout=0.2) as server,
        connected(server.client) as raw,
    ):
        for _ in range(2):  # an answer that takes longer, and a silence between two requests
            await raw.send(post(CHAT_PATH, CHAT))
            assert (await raw.answer())[0] == 200
            await asyncio.sleep(0.3)


@pytest.mark.full
async def test_two_thousand_silent_sockets_and_one_user(engine):
    """The user is served while all of them are there."""
    raise_open_files_limit()
    if resource.getrlimit(resource.RLIMIT_NOFILE)[0] < 4200:
        pytest.skip("server and clients are one process here, which may not have 4200 files open")
    async with serving(engine, max_num_queued_requests=8) as server:
        async with AsyncExitStack() as stack:
            for _ in range(2000):
                await stack.enter_async_context(connected(server.client))
            await until(lambda: len(server.connections) == 2000, SECONDS)
            assert (await server.chat()).status == 200
            assert len(server.connections) == 2001
        await until(lambda: len(server.connections) == 1, SECONDS)


async def test_silent_sockets_are_closed_without_a_word(engine, caplog):
    async with serving(engine, header_timeout=0.2) as server, AsyncExitStack() as stack:
        silent = [await stack.enter_async_context(connected(server.client)) for _ in range(20)]
        assert [await raw.rest() for raw in silent] == [b""] * 20
        assert (await server.chat()).status == 200
    assert not [record for record in caplog.records if record.levelname in ("ERROR", "WARNING")]


@pytest.mark.parametrize("count", [0, 1])
async def test_a_slow_request_is_answered_although_idle_connections_end_sooner(engine, count):
    async with (
        serving(engine, keep_alive_timeout=0.05, header_timeout=0.15) as server,
        connected(server.client) as raw,
    ):
        for _ in range(count):
            await raw.send(post(CHAT_PATH, CHAT))
            assert (await raw.answer())[0] == 200
        await raw.send(post(CHAT_PATH, CHAT)[:30])
        status, _, body = await raw.answer()
        assert (status, body["error"]["code"]) == (408, "read_timeout")


async def test_idle_connections_are_closed(engine):
    async with serving(engine, keep_alive_timeout=0.2) as server, connected(server.client) as raw:
        await raw.send(post(CHAT_PATH, CHAT))
        assert (await raw.answer())[0] == 200
        assert await raw.rest() == b""


def test_the_limit_on_open_files_is_raised():
    """In a process of its own, as a shell that allows few starts it."""
    lines = (
        "import resource",
        "from gllm.frontend.listening import raise_open_files_limit",
        "_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)",
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))",
        "raise_open_files_limit()",
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (hard, hard)",
    )
    subprocess.run([sys.executable, "-c", "\n".join(lines)], check=True)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_never_reads(engine, caplog, stream):
    engine.max_model_len = 10**6
    tokens = 4000
    engine.tokenizer = BulkyTokenizer(engine.tokenizer, tokens, 5000)
    engine.delay = 0.001 if stream else 0.0
    body = {"prompt": [5], "stream": stream, "max_tokens": tokens}
    async with serving(engine, write_timeout=0.3) as server:
        async with connected(server.client, window=4096) as raw:
            await raw.send(post(TEXT_PATH, body, "X-Request-Id: stuck"))
            await until(lambda: engine.calls and engine.calls[0].closed, 60)
            await until(lambda: not server.connections, 60)
        assert engine.calls[0].finished is not stream
        assert "request stuck ended" in caplog.text


async def test_connections_end_while_draining(server):
    async with connected(server.client) as raw:
        await raw.send(post(CHAT_PATH, CHAT))
        status, headers, _ = await raw.answer()
        assert (status, "connection" in headers) == (200, False)
        assert headers["server"] == "gllm"
        server.engine.delay = 0.02
        await raw.send(post(CHAT_PATH, CHAT))
        await until(lambda: len(server.engine.calls) == 2, 60)
        server.engine.state = "draining"
        assert (await raw.answer())[0:2][0] == 200, "what runs goes on"
        assert await raw.rest() == b""
    async with connected(server.client) as raw:
        await raw.send(post(CHAT_PATH, CHAT))
        status, headers, body = await raw.answer()
        assert (status, body["error"]["code"]) == (503, "engine_draining")
        assert int(headers["retry-after"]) > 0
        assert headers["connection"] == "close"
        assert await raw.rest() == b""


@pytest.mark.parametrize("given", ["mine-7", "  mine\t", "ünd", ""])
async def test_request_ids(server, given):
    async with connected(server.client) as raw:
        await raw.send(post(CHAT_PATH, CHAT, f"X-Request-Id: {given}"))
        _, headers, body = await raw.answer()
    told = headers["x-request-id"]
    assert body["id"] == f"chatcmpl-{told}"
    assert told.isascii()
    if "mine" in given:
        assert told == given.strip()
    else:
        assert len(told) in (2, 32)


async def test_log_lines_name_the_request(server, caplog):
    headers = {"X-Request-Id": "mine"}
    body = json.dumps({**CHAT, "odd": 1}).encode()
    assert (await server.post(CHAT_PATH, body, headers=headers)).status == 200
    assert "request mine: unknown fields were ignored" in caplog.text
    server.engine.raises = RuntimeError("a secret")
    await server.post(CHAT_PATH, CHAT, headers=headers)
    assert "request mine failed" in caplog.text
