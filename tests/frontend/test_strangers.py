"""Garbage and requests without a valid key cost the HTTP port no error, memory, series or gap."""

import asyncio
import gc
import logging
import os
import random
import re
import socket
import struct
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress

import pytest
import uvloop

from benchmarks.loop_watch import LoopWatch
from gllm.frontend.connection import MAX_HEADER_BYTES, MAX_HEADERS, MAX_URL_BYTES
from gllm.frontend.routes.registry import ENDPOINTS
from tests.frontend.conftest import CHAT, CHAT_PATH, TEXT, TEXT_PATH, Server, serving
from tests.frontend.test_engines import ScriptedFleet
from tests.frontend.test_stream import until
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.raw import SECONDS, post
from tests.support.servers.server import owned_bytes

KEY = "sk-the-only-key"
MAX_GROWTH_BYTES = 20e6
"""Largest growth of the process in 10^5 requests."""
MAX_GAP_SECONDS = 0.05
"""Most CPU time that the loop's thread spends between two looks at the other connections."""
SHARE_WITH_OWN_CONNECTION = 0.1
"""Share of requests that get a connection of their own, most of them because they end it."""
NUM_PIPELINED = 50
"""Requests per connection of the others."""
NOT_UTF8 = "schl\udcfcssel"
"""A key in Latin-1."""
RESET = struct.pack("ii", 1, 0)
"""SO_LINGER with which a socket is closed by a reset."""

PUBLIC = ["/health", "/ready", "/metrics", "/"]
LOCKED = [re.sub(r"{\w+}", "x", each.path) for each in ENDPOINTS if not each.is_public]
REFUSED = {400, 401, 403, 404, 405, 408, 413, 414, 417, 431}
COUNTS = [300, pytest.param(100_000, marks=pytest.mark.full)]
"""Requests of a stranger."""


def word(rng: random.Random) -> str:
    """A name that no request has had before."""
    return rng.randbytes(rng.randrange(4, 40)).hex()


def head(
    rng: random.Random, path: str, *headers: str, host: str = "x", method: str = "GET"
) -> bytes:
    """A request without a body; its key, if it has one, is wrong."""
    lines = [
        *headers,
        *rng.choice([[], [f"Authorization: Bearer {word(rng)}"], [f"X-Api-Key: {word(rng)}"]]),
        *rng.choice([[], [], [f"X-Api-Key: {NOT_UTF8}"]]),
        *rng.choice([[], [f"X-Request-Id: {word(rng)}"], [f"X-{word(rng)}: {word(rng)}"]]),
    ]
    text = "\r\n".join([f"{method} {path} HTTP/1.1", f"Host: {host}", *lines, "", ""])
    return text.encode(errors="surrogateescape")


def complete_request(rng: random.Random, *headers: str) -> bytes:
    """A request after which the connection stays open."""
    name = word(rng)
    method = rng.choice(["GET", "GET", "GET", "POST", "HEAD", "DELETE", "OPTIONS", "PATCH"])
    paths = [f"/{name}", f"/v1/{name}/{name}", f"/page/{name}", f"/kv_handoffs/{name}"]
    paths += [f"/v1/models/{name}", f"/engines/{name}/drain", f"/?{name}={name}"]
    [make] = rng.choices(
        [
            lambda: head(rng, rng.choice(paths), *headers, method=method),
            lambda: head(rng, rng.choice(LOCKED), *headers, method=method),
            lambda: head(rng, rng.choice(PUBLIC), *headers),
            lambda: head(rng, "/health", f"Origin: http://{name}", *headers),
            lambda: head(rng, "/health", *headers, host=name),
            lambda: post(CHAT_PATH, {**CHAT, "user": name}, f"X-Api-Key: {name}", *headers),
            lambda: post(TEXT_PATH, {**TEXT, name: name}, *headers),
        ],
        [40, 25, 1, 5, 5, 12, 12],
    )
    return make()


def bad_request(rng: random.Random) -> bytes:
    """Bytes that are no request, or one that is too large, and an answer to which says so."""
    name = word(rng)
    make = rng.choice(
        [
            lambda: rng.randbytes(rng.randrange(1, 500)) + b"\r\n\r\n",
            lambda: b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + rng.randbytes(200),
            lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + rng.randbytes(30),
            lambda: head(rng, "/health", method=name.upper()),
            lambda: head(rng, "/" + "u" * (MAX_URL_BYTES + 1)),
            lambda: head(rng, "/health", f"X-Long: {'h' * (MAX_HEADER_BYTES + 1)}"),
            lambda: head(rng, "/health", *[f"X-{i}: {name}" for i in range(MAX_HEADERS + 1)]),
            lambda: head(rng, "/health", f"X-Bad: \0{name}"),
            lambda: head(rng, CHAT_PATH, f"Content-Length: {rng.choice(['-1', '1e3', name])}"),
            lambda: head(rng, CHAT_PATH, f"Content-Length: {2**40}", method="POST"),
            lambda: head(rng, CHAT_PATH, "Transfer-Encoding: chunked", method="POST") + b"nothex",
            lambda: head(rng, CHAT_PATH, f"Expect: {name}", method="POST"),
        ]
    )
    return make()


def half_request(rng: random.Random) -> bytes:
    """The begin of a request; nothing at all, at times."""
    whole = rng.choice([complete_request(rng), bad_request(rng), post(CHAT_PATH, CHAT)])
    return whole[: rng.choice([rng.randrange(len(whole)), len(whole) - 1])]


class Stranger:
    """Sends requests and garbage to a port of this machine."""

    def __init__(self, port: int, seed: int) -> None:
        self._port = port
        self._rng = random.Random(seed)
        self.statuses: Counter[int] = Counter()
        """Number of answers by status."""

    def send(self, num_requests: int) -> None:
        """Send requests, of which some get a connection of their own, because they end it."""
        num_alone = int(num_requests * SHARE_WITH_OWN_CONNECTION)
        num_shared = (num_requests - num_alone) // NUM_PIPELINED
        orders = [self._send_pipelined] * num_shared
        orders += [self._send_bad] * (num_alone // 2) + [self._send_half] * (num_alone // 2)
        self._rng.shuffle(orders)
        for order in orders:
            order()

    def _send_pipelined(self) -> None:
        requests = [complete_request(self._rng) for _ in range(NUM_PIPELINED - 1)]
        requests.append(complete_request(self._rng, "Connection: close"))
        received = b""
        with socket.create_connection(("127.0.0.1", self._port), SECONDS) as end:
            end.sendall(b"".join(requests))
            while piece := end.recv(2**20):
                received += piece
        statuses = re.findall(rb"HTTP/1\.1 (\d{3}) ", received)
        assert len(statuses) == NUM_PIPELINED, received[-1000:]
        self.statuses.update(map(int, statuses))

    def _send_bad(self) -> None:
        received = b""
        address = "127.0.0.1", self._port
        # The server may answer and close before it has read all.
        with socket.create_connection(address, SECONDS) as end, suppress(ConnectionError):
            end.sendall(bad_request(self._rng))
            while b"\r\n" not in received and (piece := end.recv(2**16)):
                received += piece
        self.statuses.update(map(int, re.findall(rb"^HTTP/1\.[01] (\d{3}) ", received)))

    def _send_half(self) -> None:
        with socket.create_connection(("127.0.0.1", self._port), SECONDS) as end:
            end.sendall(half_request(self._rng))
            if self._rng.random() < 0.5:
                end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)


async def series(server: Server) -> set[str]:
    """Names and labels of the metrics."""
    async with server.client.get("/metrics") as response:
        lines = (await response.text()).splitlines()
    return {line.rpartition(" ")[0] for line in lines if not line.startswith("#")}


@pytest.fixture
def frozen_heap() -> Iterator[None]:
    """As in a server, where the collector need not look at what start-up made."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


async def be_strange(server: Server, num_requests: int) -> None:
    """Let a stranger send requests, and check what that has cost."""
    port = server.client.port
    assert port is not None
    stranger = Stranger(port, 1)
    await asyncio.to_thread(stranger.send, num_requests // 10)
    gc.collect()
    before, num_bytes = await series(server), owned_bytes([os.getpid()])
    with LoopWatch() as gaps:
        await asyncio.to_thread(stranger.send, num_requests)
    gc.collect()
    grown = owned_bytes([os.getpid()]) - num_bytes
    print(f"\n{dict(stranger.statuses)}, {grown / 1e6:.1f} MB, {gaps}")
    assert await series(server) == before
    assert stranger.statuses.keys() <= {200, *REFUSED}
    assert stranger.statuses.keys() >= {200, 400, 401, 403, 404}
    assert grown < MAX_GROWTH_BYTES
    assert gaps.cpu_seconds < MAX_GAP_SECONDS
    await until(lambda: len(server.connections) == 1, SECONDS)


@pytest.mark.usefixtures("frozen_heap")
@pytest.mark.parametrize("num_requests", COUNTS)
@pytest.mark.parametrize("fleet", [None, ScriptedFleet()], ids=["server", "router"])
def test_strangers_cost_nothing(
    engine: FakeEngine,
    fleet: ScriptedFleet | None,
    num_requests: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    engine.fleet = fleet

    async def serve() -> None:
        async with serving(engine, checks_schemas=False, api_key=(KEY,)) as server:
            await be_strange(server, num_requests)
            assert engine.calls == []
            key = {"X-Api-Key": KEY}
            assert (await server.post(CHAT_PATH, CHAT, headers=key)).status == 200

    # Servers run on uvloop.
    uvloop.run(serve())
