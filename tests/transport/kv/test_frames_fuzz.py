"""Movers survive invalid bytes from both sides, and write nothing outside of the fetch's tokens."""

import random
import socket
import threading
from contextlib import suppress

import msgspec
import pytest

from gllm.messages.kv_transfer import FetchKv
from gllm.transport.kv.frames import (
    KvConnection,
    KvFrameError,
    KvFrameKind,
    ReadPart,
    ReadRequest,
    ReadTicket,
)
from tests.support.engines.kv_caches import CachedEngine, dial_plain, make_contents
from tests.support.engines.kv_layouts import cut_layouts

BLOCKS = [2, 0, 3]


def _read_frame(backend: str = "tcp", is_per_layer: bool = False) -> bytes:
    own, other = socket.socketpair()
    parts = [ReadPart(0, layer, 0, 2) for layer in range(4)]
    request = ReadRequest(0, 10, backend, "plain", parts, is_per_layer)
    connection = KvConnection(own)
    connection.send_struct(KvFrameKind.TICKET, ReadTicket(7, 5))
    connection.send_struct(KvFrameKind.READ, request)
    data = other.recv(2**16)
    own.close()
    other.close()
    return data


def _mutate(data: bytes, rng: random.Random) -> bytes:
    mutated = bytearray(data)
    for _ in range(rng.randint(1, 6)):
        position = rng.randrange(len(mutated))
        match rng.randrange(4):
            case 0:
                mutated[position] = rng.randrange(256)
            case 1:
                del mutated[position:]
                mutated += b"\0"
            case 2:
                mutated[position:position] = rng.randbytes(rng.randint(1, 8))
            case 3:
                mutated[position:] = rng.randbytes(rng.randint(1, 64))
    return bytes(mutated)


def _fuzz_owner(num_rounds: int, seed: int) -> None:
    rng = random.Random(seed)
    owner = CachedEngine(cut_layouts(1, 1))
    owner.serve(make_contents(10, seed=3), BLOCKS, 7)
    frames = [
        _read_frame(backend, is_per_layer)
        for backend in ("tcp", "shm")
        for is_per_layer in (False, True)
    ]
    for number in range(num_rounds):
        data = _mutate(rng.choice(frames), rng) if number % 4 else rng.randbytes(40)
        own, other = socket.socketpair()
        owner.mover.adopt(other, "10.0.0.9")
        own.settimeout(10)
        # A mover that has closed the connection already resets it.
        with own, suppress(ConnectionError):
            own.sendall(data)
            own.shutdown(socket.SHUT_WR)
            while own.recv(2**16):
                pass
    owner.serve(make_contents(10, seed=3), BLOCKS, 77)
    receiver = CachedEngine(cut_layouts(1, 1))
    fetched = receiver.fetch(FetchKv(1, 77, owner.endpoint(), 0, 10, BLOCKS))
    assert fetched.is_ok, fetched.cause
    assert owner.mover.num_malformed > 0
    for engine in (owner, receiver):
        engine.mover.close()


def _fuzz_receiver(num_rounds: int, seed: int, is_per_layer: bool) -> None:
    """Answer fetches with mutated runs: no other slot is ever written."""
    rng = random.Random(seed)
    owner = CachedEngine(cut_layouts(1, 1))
    owner.fill(make_contents(10, seed=3), BLOCKS)
    listening = socket.create_server(("127.0.0.1", 0))
    answers = [_answer(owner, rng, is_per_layer, not number) for number in range(num_rounds)]

    def answer() -> None:
        for data in answers:
            connection, _ = listening.accept()
            with connection, suppress(OSError):
                frames = KvConnection(connection)
                frames.receive(KvFrameKind.TICKET)
                frames.receive(KvFrameKind.READ)
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
                while connection.recv(2**16):
                    pass

    thread = threading.Thread(target=answer, daemon=True)
    thread.start()
    host, port = listening.getsockname()
    owner.address = f"{host}:{port}"
    endpoint = owner.endpoint(is_remote=True)
    receiver = CachedEngine(cut_layouts(1, 1), dial=dial_plain)
    for number in range(num_rounds):
        fetched = receiver.fetch(FetchKv(number, 7, endpoint, 0, 10, BLOCKS, is_per_layer))
        assert fetched.is_ok == (number == 0)
        assert receiver.count_written_slots() <= 4 * 2 * 10
    thread.join(10)
    listening.close()
    for engine in (owner, receiver):
        engine.mover.close()


def _answer(owner: CachedEngine, rng: random.Random, is_per_layer: bool, is_valid: bool) -> bytes:
    """Return the bytes of a transfer, valid or with a changed header or announcement."""
    own, other = socket.socketpair()
    connection, data = KvConnection(own), b""
    (pages,) = owner.pages
    slots = pages.find_slots(BLOCKS, 0, 10)
    for layer in range(4):
        run = pages.read(layer, range(2), slots)
        header, announced = [layer, 0, 10], [10, layer + 1]
        if not is_valid and layer == 3:
            if is_per_layer and rng.randrange(2):
                announced = rng.choice(
                    [[10, 0], [10, 2], [10, 5], [10, 2**32 - 1], [9, 4], [11, 4]]
                )
            else:
                header[rng.randrange(3)] += rng.choice([1, 7, 2**31])
        if is_per_layer:
            ready = b"".join(value.to_bytes(4, "big") for value in announced)
            connection.send(KvFrameKind.READY, ready)
        packed = b"".join(value.to_bytes(4, "big") for value in header)
        connection.send(KvFrameKind.RUN, packed, run.tobytes())
        data += other.recv(2**16)
    connection.send(KvFrameKind.CONFIRMED, msgspec.msgpack.encode([True]))
    data += other.recv(2**16)
    own.close()
    other.close()
    return data


def test_movers_survive_invalid_frames() -> None:
    _fuzz_owner(40, seed=1)
    _fuzz_receiver(12, seed=2, is_per_layer=False)
    _fuzz_receiver(12, seed=3, is_per_layer=True)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(10, 16))
def test_movers_survive_many_invalid_frames(seed: int) -> None:
    _fuzz_owner(2000, seed)
    _fuzz_receiver(300, seed, is_per_layer=seed % 2 == 0)


@pytest.mark.parametrize(
    ("data", "cause"),
    [
        (b"gA\1\1\0\0\0\0", "no frame of a KV mover"),
        (b"gK\1\1\0\0\0\0", "no frame of a KV mover"),
        (b"gK\2\x63\0\0\0\0", "unknown kind 99"),
        (b"gK\2\5\0\0\1\0", "CONFIRMED has 256 bytes"),
        (b"gK\2\2\0\0\0\1", "GRANT at the wrong time"),
        (b"gK\2\1\0\0\0\1\xff", "is invalid"),
    ],
)
def test_invalid_frames_are_named(data: bytes, cause: str) -> None:
    own, other = socket.socketpair()
    other.sendall(data)
    with pytest.raises(KvFrameError, match=cause):
        KvConnection(own).receive_struct(KvFrameKind.READ, ReadRequest)
    own.close()
    other.close()
