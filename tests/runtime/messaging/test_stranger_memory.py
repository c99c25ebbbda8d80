"""Ports that anyone can reach: what peers without a ticket, secret or certificate send costs no
memory, is counted, and is logged once."""

import asyncio
import gc
import logging
import random
import socket
import time
import tracemalloc
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from itertools import count
from pathlib import Path

import pytest
import zmq

from gllm.messages.codec import decode_for_head
from gllm.runtime.messaging.bus import Hub
from gllm.runtime.messaging.bus_socket import UNKNOWN_ADDRESS
from gllm.runtime.messaging.security import (
    Authenticator,
    SecretFile,
    create_certificate,
    create_secret_file,
)
from gllm.transport.kv.frames import KvConnection, KvFrameKind, ReadPart, ReadRequest, ReadTicket
from gllm.transport.link.connection import TlsIdentity
from gllm.transport.link.frames import EdgeHello, EdgeName, FrameClass, encode_payload
from gllm.transport.link.listener import Listener
from gllm.transport.link.settings import Refusals
from tests.support.engines.kv_caches import CachedEngine
from tests.support.engines.kv_layouts import cut_layouts

BYTES_PER_FRAME = 20e6 / 1e5
"""Largest growth per frame of a stranger: 20 MB in 10^5 frames."""
MAX_READ_PARTS = 2**14
NUM_WARM_UP = 60

MakeBytes = Callable[[random.Random], bytes]


def kv_bytes(rng: random.Random) -> bytes:
    """A fetch with a ticket that was never served, for a backend of which no other fetch knows."""
    hello = encode_payload(EdgeHello("x", "", is_sender=False))
    own, other = socket.socketpair()
    with own, other:
        connection = KvConnection(own)
        ticket = ReadTicket(rng.randrange(1, 2**63), rng.randrange(1, 2**63))
        connection.send_struct(KvFrameKind.TICKET, ticket)
        backend = f"mock:{rng.random()}"
        part = ReadPart(0, rng.randrange(4), 0, 2)
        connection.send_struct(
            KvFrameKind.READ, ReadRequest(0, 10, backend, "plain", [part] * rng.randrange(1, 99))
        )
        frames = other.recv(2**20)
    return EdgeName(0, 0, 0).header(FrameClass.KV_HELLO, hello) + frames


def data_bytes(rng: random.Random) -> bytes:
    """A first frame of an edge without TLS, or garbage."""
    name = EdgeName(rng.randrange(2**60), rng.randrange(9), rng.randrange(99))
    hello = encode_payload(EdgeHello(rng.randbytes(9).hex(), "there", True))
    frames = name.header(FrameClass.HELLO, hello)
    return rng.choice([frames, rng.randbytes(60), b"\x16\x03\x01\x02\x00" + rng.randbytes(200)])


def hub_bytes(rng: random.Random) -> bytes:
    """Begin of a handshake of ZeroMQ with a random key, or garbage."""
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01"
    curve, plain = (name.ljust(20, b"\0") + bytes(32) for name in (b"CURVE", b"NULL"))
    return rng.choice(
        [
            greeting + curve + b"\x04\xc8\x05HELLO\x01\0" + rng.randbytes(192),
            greeting + plain + b"\x04\x26\x05READY\x0bSocket-Type\0\0\0\x06DEALER",
            rng.randbytes(90),
        ]
    )


@contextmanager
def kv_port(refusals: Refusals) -> Iterator[int]:
    """The port of a KV mover; its clock runs while it waits for a ticket, so that nobody does."""
    engine = CachedEngine(cut_layouts(1, 1), clock=count(step=2).__next__, on_refused=refusals.add)
    listener = Listener(
        "127.0.0.1:0",
        None,
        None,
        lambda connection, address, header, hello: engine.mover.adopt(connection, address),
        refusals,
    )
    try:
        yield listener.port
    finally:
        engine.mover.close()


@contextmanager
def data_port(refusals: Refusals) -> Iterator[int]:
    """The data port of a machine with one neighbour, which has a certificate."""
    own, peer = create_certificate(), create_certificate()
    context = TlsIdentity(own.descriptor).accepting([peer.certificate])
    listener = Listener(
        "127.0.0.1:0",
        None,
        lambda: context,
        lambda connection, *hello: connection.close(),
        refusals,
    )
    try:
        yield listener.port
    finally:
        own.close()
        peer.close()


@asynccontextmanager
async def hub_port(folder: Path) -> AsyncIterator[tuple[int, Hub]]:
    """The hub of a head, a router or a master: they are of one class."""
    create_secret_file(folder / "secret")
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    authenticator = Authenticator(context, SecretFile(folder / "secret"))
    hub = Hub(context, 0, decode_for_head, authenticator, 4)
    port = int(hub.bind("tcp://127.0.0.1:0").rpartition(":")[2])
    hub.start(lambda messages: None, lambda sender, cause: None)
    try:
        yield port, hub
    finally:
        hub.close()
        context.destroy(linger=0)


def flood(port: int, make: MakeBytes, num_frames: int, seed: int) -> None:
    """Connect `num_frames` times as a stranger, each time until the other end has closed."""
    rng = random.Random(seed)
    for _ in range(num_frames):
        with socket.create_connection(("127.0.0.1", port), 20) as end, suppress(OSError):
            end.sendall(make(rng))
            end.shutdown(socket.SHUT_WR)
            while end.recv(2**16):
                pass


def measure_growth(port: int, make: MakeBytes, num_frames: int) -> float:
    """Return the growth in bytes per connection of a stranger, of Python and of the process."""
    flood(port, make, NUM_WARM_UP, 1)
    tracemalloc.start()
    try:
        flood(port, make, NUM_WARM_UP, 2)
        gc.collect()
        traced, resident = tracemalloc.get_traced_memory()[0], resident_bytes()
        flood(port, make, num_frames, 3)
        gc.collect()
        traced = tracemalloc.get_traced_memory()[0] - traced
    finally:
        tracemalloc.stop()
    # The heap of a process grows in steps that are larger than a short flood's leak.
    grown = max(traced, resident_bytes() - resident - 8 * 2**20)
    return grown / num_frames


def resident_bytes() -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmRSS"))


COUNTS = [300, pytest.param(100_000, marks=pytest.mark.full)]
"""Connections of a stranger, each with one or two frames."""


@pytest.mark.parametrize("num_frames", COUNTS)
@pytest.mark.parametrize(("port", "make"), [(kv_port, kv_bytes), (data_port, data_bytes)])
def test_strangers_at_data_ports_cost_no_memory(
    port: Callable[[Refusals], Iterator[int]],
    make: MakeBytes,
    num_frames: int,
    caplog: pytest.LogCaptureFixture,
) -> None:
    refusals = Refusals()
    caplog.set_level(logging.CRITICAL)
    with port(refusals) as number:  # type: ignore[attr-defined]
        assert measure_growth(number, make, num_frames) < BYTES_PER_FRAME
        # The other end sees that it was refused a moment before that is counted.
        end = time.monotonic() + 20
        while refusals.by_address.total() < 2 * NUM_WARM_UP + num_frames:
            assert time.monotonic() < end
            time.sleep(0.001)
    assert refusals.by_address == {"127.0.0.1": 2 * NUM_WARM_UP + num_frames}


@pytest.mark.parametrize("num_frames", COUNTS)
async def test_strangers_at_a_hub_cost_no_memory(
    tmp_path: Path, num_frames: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    async with hub_port(tmp_path) as (port, hub):
        growth = await asyncio.to_thread(measure_growth, port, hub_bytes, num_frames)
        assert growth < BYTES_PER_FRAME
        async with asyncio.timeout(20):
            while hub.refused.num_refused < 2 * NUM_WARM_UP + num_frames:
                await asyncio.sleep(0.001)
        assert hub.refused.by_address.keys() <= {"127.0.0.1", UNKNOWN_ADDRESS}
        assert hub.num_connections == 0


def test_a_read_without_a_ticket_stores_nothing_of_its_payload(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A payload that is announced, and one that is sent, before the ticket is found."""
    engine = CachedEngine(
        cut_layouts(1, 1), clock=count(step=2).__next__, on_refused=Refusals().add
    )
    own, other = socket.socketpair()
    own.settimeout(20)
    with own:
        frames = KvConnection(own)
        parts = [ReadPart(0, 0, 0, 2)] * MAX_READ_PARTS
        tracemalloc.start()
        engine.mover.adopt(other, "10.0.0.9")
        frames.send_struct(KvFrameKind.TICKET, ReadTicket(7, 5))
        frames.send_struct(KvFrameKind.READ, ReadRequest(0, 10, "tcp", "plain", parts))
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        kind, cause = frames.receive(KvFrameKind.REFUSE)
        grown = tracemalloc.get_traced_memory()[1] - before
        tracemalloc.stop()
        assert own.recv(1) == b""
    assert (kind, bytes(cause)) == (KvFrameKind.REFUSE, b"the ticket is not held here")
    assert grown < 300_000
    # The handler of gllm's logs writes a warning once per minute and `about`.
    [record] = caplog.records
    assert record.about == "10.0.0.9"  # type: ignore[attr-defined]
    assert "the ticket is not held here" in record.getMessage()
    engine.mover.close()
