"""Hubs and spokes over TCP: node secrets, strangers, limits, rotation."""

import asyncio
import random
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import zmq

from gllm.messages.codec import decode_for_head, decode_for_worker, encode
from gllm.messages.lifecycle import Hello, InitializeCache, Shutdown, StageFailed, StageReady
from gllm.runtime.messaging.bus import UNREACHABLE, Hub, Spoke
from gllm.runtime.messaging.bus_socket import (
    CLOSED,
    MAX_QUEUED_FRAMES,
    MAX_STRANGERS,
    UNKNOWN_ADDRESS,
)
from gllm.runtime.messaging.security import (
    Authenticator,
    KeyPair,
    SecretFile,
    add_secret,
    create_secret_file,
    drop_secret,
)
from gllm.runtime.messaging.session import HEADER, MAX_FRAME_BYTES
from tests.support.network.plaintext import runs_of

MAX_GUESTS = 4


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


class Dialer:
    """A spoke with what it has received."""

    def __init__(self, spoke: Spoke) -> None:
        self.spoke = spoke
        self.messages: list[Any] = []
        self.lost: list[str] = []
        spoke.start(self.messages.extend, self.lost.append)


class Fleet:
    """A hub with guests on a port of this machine."""

    def __init__(self, secret: SecretFile | None, **limits: float) -> None:
        self.secret = secret
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.outside: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.authenticator = Authenticator(self.context, secret, 0.01) if secret else None
        self.hub = Hub(self.context, 0, decode_for_head, self.authenticator, MAX_GUESTS, **limits)
        self.address = self.hub.bind("tcp://127.0.0.1:0")
        self.messages: list[tuple[int, Any]] = []
        self.lost: list[tuple[int, str]] = []
        self.hub.start(self.messages.extend, lambda *lost: self.lost.append(lost))
        self.dialers: list[Dialer] = []

    @property
    def keys(self) -> KeyPair | None:
        return self.secret.keys[0] if self.secret else None

    def dial(self, sender: int, keys: KeyPair | None = None, address: str = "") -> Dialer:
        spoke = Spoke(self.outside, 0, sender, address or self.address, decode_for_worker, keys)
        self.dialers.append(Dialer(spoke))
        return self.dialers[-1]

    def member(self, sender: int) -> Dialer:
        return self.dial(sender, self.keys)

    def raw(self) -> socket.socket:
        """A connection of a stranger."""
        port = int(self.address.rpartition(":")[2])
        return socket.create_connection(("127.0.0.1", port))

    def has(self, sender: int) -> bool:
        return (sender, Hello(sender)) in self.messages

    def close(self) -> None:
        for dialer in self.dialers:
            dialer.spoke.close()
        self.hub.close()
        self.context.destroy(linger=0)
        self.outside.destroy(linger=0)


def new_secret(path: Path) -> SecretFile:
    create_secret_file(path)
    return SecretFile(path)


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    """A hub that needs a node secret."""
    fleet = Fleet(new_secret(tmp_path / "secret"))
    yield fleet
    fleet.close()


@pytest.fixture
async def plain() -> AsyncIterator[Fleet]:
    """A hub without a node secret."""
    fleet = Fleet(None)
    yield fleet
    fleet.close()


@asynccontextmanager
async def tapped(address: str) -> AsyncIterator[tuple[str, bytearray]]:
    """A relay to an address that keeps a copy of all bytes."""
    port = int(address.rpartition(":")[2])
    seen = bytearray()

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await reader.read(65536):
                seen.extend(data)
                writer.write(data)
        writer.close()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", port)
        await asyncio.gather(pump(reader, there[1]), pump(there[0], writer))

    server = await asyncio.start_server(relay, "127.0.0.1", 0)
    try:
        yield f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}", seen
    finally:
        server.close()


async def test_members_exchange_messages_that_nobody_can_read(fleet: Fleet, plain: Fleet) -> None:
    marker = "readable text " * 10
    large = StageFailed(1, marker * 20_000)
    for end, is_readable in ((fleet, False), (plain, True)):
        async with tapped(end.address) as (address, seen):
            dialer = end.dial(2**61, end.keys, address)
            dialer.spoke.send(large)
            end_of = end.messages
            await until(lambda: len(end_of) == 2)  # noqa: B023
            assert end.messages == [(2**61, Hello(2**61)), (2**61, large)]
            end.hub.send(2**61, InitializeCache(7))
            await until(lambda: dialer.messages == [InitializeCache(7)])  # noqa: B023
            assert (marker.encode() in seen) == is_readable
            assert any(run in seen for run in runs_of(marker.encode())) == is_readable
            assert len(seen) > len(large.cause)
            dialer.spoke.close()
            await until(lambda: end.lost)  # noqa: B023
    assert fleet.lost == plain.lost == [(2**61, CLOSED)]


async def test_wrong_secret_is_named_at_both_ends(fleet: Fleet, tmp_path: Path) -> None:
    other = new_secret(tmp_path / "other")
    while not fleet.hub.refused.by_address["127.0.0.1"]:
        # A hub that was busy may learn of a connection after its end, when its address is gone.
        stranger = fleet.dial(1, other.keys[0])
        await until(lambda: stranger.lost)  # noqa: B023
        assert "another node secret" in stranger.lost[0]
        count = len(fleet.dialers)
        await until(lambda: fleet.hub.refused.num_refused >= count)  # noqa: B023
    assert fleet.messages == []
    fleet.member(2)
    await until(lambda: fleet.has(2))


async def test_ends_with_and_without_secret_do_not_connect(fleet: Fleet, plain: Fleet) -> None:
    for end, keys in ((fleet, None), (plain, fleet.keys)):
        dialer = end.dial(1, keys)
        await until(lambda: dialer.lost)  # noqa: B023
        assert "secret" in dialer.lost[0]
        await until(lambda: end.hub.refused.num_refused)  # noqa: B023
        assert end.messages == []


async def test_key_of_a_stranger_who_knows_the_hub_is_not_accepted(fleet: Fleet) -> None:
    assert fleet.secret is not None
    server = fleet.secret.keys[0].public
    with fleet.outside.socket(zmq.DEALER) as bad:
        bad.curve_serverkey = server
        bad.curve_publickey, bad.curve_secretkey = zmq.curve_keypair()
        bad.linger, bad.reconnect_ivl = 0, -1
        bad.connect(fleet.address)
        bad.send(HEADER.pack(0, 0, 0, 0) + encode(Hello(1)))
        await until(lambda: fleet.hub.refused.num_refused)
    assert fleet.messages == []


async def test_nobody_is_admitted_without_an_authenticator(tmp_path: Path) -> None:
    fleet = Fleet(new_secret(tmp_path / "secret"), handshake_seconds=0.2)
    assert fleet.authenticator is not None
    fleet.authenticator.close()
    dialer = fleet.member(1)
    await until(lambda: dialer.lost and fleet.hub.refused.num_refused)
    assert fleet.messages == []
    fleet.close()


async def test_guests_are_limited_and_each_has_one_session(plain: Fleet) -> None:
    guests = [plain.member(sender) for sender in range(1, 1 + MAX_GUESTS)]
    await until(lambda: len(plain.messages) == MAX_GUESTS)
    for sender in (99, 1):
        late = plain.member(sender)
        await until(lambda: late.lost)  # noqa: B023
    assert plain.hub.num_refused == 2
    assert plain.hub.refused.by_address["127.0.0.1"] == 2
    guests[0].spoke.close()
    await until(lambda: plain.lost)
    plain.member(99)
    await until(lambda: plain.has(99))
    guests[1].spoke.send(StageReady(5))
    await until(lambda: (2, StageReady(5)) in plain.messages)


async def test_a_forgotten_guest_gets_the_last_messages_and_is_disconnected(plain: Fleet) -> None:
    guest = plain.member(1)
    await until(lambda: plain.has(1))
    assert plain.hub.address_of(1) == "127.0.0.1"
    assert plain.hub.address_of(2) == UNKNOWN_ADDRESS
    plain.hub.send(1, InitializeCache(3))
    plain.hub.forget(1)
    guest.spoke.send(StageReady(1))
    await until(lambda: guest.lost)
    assert guest.messages == [InitializeCache(3)]
    assert plain.messages == [(1, Hello(1))]
    assert plain.lost == []
    plain.member(1)
    await until(lambda: len(plain.messages) == 2)


async def test_silent_strangers_are_limited_and_keep_no_member_out(fleet: Fleet) -> None:
    member = fleet.member(1)
    await until(lambda: fleet.has(1))
    strangers = [fleet.raw() for _ in range(3 * MAX_STRANGERS)]
    await until(lambda: fleet.hub.refused.num_refused >= 2 * MAX_STRANGERS)
    fleet.member(2)
    await until(lambda: fleet.has(2))
    open_ones = 0
    for stranger in strangers:
        stranger.setblocking(False)
        with stranger:
            # What is closed has sent its greeting and an end.
            with suppress(BlockingIOError, ConnectionResetError):
                while stranger.recv(100):
                    pass
                continue
            open_ones += 1
    assert open_ones <= MAX_STRANGERS
    member.spoke.send(StageReady(4))
    await until(lambda: (1, StageReady(4)) in fleet.messages)
    assert fleet.lost == []


async def test_ten_thousand_malformed_writes_of_strangers_harm_nobody(fleet: Fleet) -> None:
    seed = 11
    rng = random.Random(seed)
    member = fleet.member(1)
    await until(lambda: fleet.has(1))
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x01CURVE" + bytes(15) + b"\x00" + bytes(31)
    num_sent = 0
    while num_sent < 10_000:
        with fleet.raw() as stranger, suppress(ConnectionError):
            kind = rng.randrange(3)
            if kind:
                stranger.sendall(greeting)
            if kind == 2:
                # A command HELLO of the right size whose signature is none.
                stranger.sendall(b"\x04\xc8\x05HELLO\x01\x00" + rng.randbytes(192))
            for _ in range(100):
                num_sent += 1
                stranger.sendall(rng.randbytes(rng.randrange(1, 200)))
        member.spoke.send(StageReady(num_sent))
        fleet.hub.send(1, InitializeCache(num_sent))
        await asyncio.sleep(0)
    last = num_sent
    await until(lambda: (1, StageReady(last)) in fleet.messages)
    await until(lambda: InitializeCache(last) in member.messages)
    await until(lambda: fleet.hub.refused.num_refused >= 100)
    assert {sender for sender, _ in fleet.messages} == {1}, f"seed {seed}"
    assert fleet.lost == []


@pytest.mark.parametrize(
    "payload",
    [
        HEADER.pack(0, 0, 1, 0) + encode(Shutdown()),
        HEADER.pack(0, 0, 5, 0) + encode(StageReady(1)),
        HEADER.pack(0, 0, 1, 0) + b"\x91\xa7Unknown",
        b"short",
        bytes(MAX_FRAME_BYTES + 1),
    ],
    ids=["role", "gap", "type", "short", "large"],
)
async def test_a_member_that_breaks_the_protocol_is_disconnected(
    fleet: Fleet, payload: bytes
) -> None:
    assert fleet.secret is not None
    keys = fleet.secret.keys[0]
    member = fleet.member(2)
    await until(lambda: fleet.has(2))
    with fleet.outside.socket(zmq.DEALER) as bad:
        bad.curve_serverkey = bad.curve_publickey = keys.public
        bad.curve_secretkey = keys.secret
        bad.linger, bad.reconnect_ivl = 0, -1
        ended = bad.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        bad.connect(fleet.address)
        bad.send(HEADER.pack(0, 0, 0, 0) + encode(Hello(1)))
        bad.send(payload)
        await until(lambda: ended.poll(0))
        bad.disable_monitor()
        ended.close()
    await until(lambda: fleet.lost)
    assert [sender for sender, _ in fleet.lost] == [1]
    member.spoke.send(StageReady(4))
    await until(lambda: (2, StageReady(4)) in fleet.messages)


async def test_first_message_that_is_no_hello_ends_the_connection(plain: Fleet) -> None:
    for number, first in enumerate((encode(StageReady(1)), b"", encode(Hello(1))[:-1])):
        with plain.outside.socket(zmq.DEALER) as bad:
            bad.linger, bad.reconnect_ivl = 0, -1
            ended = bad.get_monitor_socket(zmq.EVENT_DISCONNECTED)
            bad.connect(plain.address)
            bad.send(HEADER.pack(0, 0, 0, 0) + first)
            await until(lambda: ended.poll(0))  # noqa: B023
            bad.disable_monitor()
            ended.close()
        assert plain.hub.num_malformed == number + 1
    assert plain.messages == []


async def test_a_refused_connection_is_counted_once(plain: Fleet) -> None:
    """Each frame that was read before its end counts as malformed."""
    with plain.outside.socket(zmq.DEALER) as bad:
        bad.linger, bad.reconnect_ivl = 0, -1
        ended = bad.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        bad.connect(plain.address)
        for _ in range(100):
            bad.send(b"")
        await until(lambda: ended.poll(0))
        bad.disable_monitor()
        ended.close()
    plain.member(1)
    await until(lambda: plain.has(1))
    assert 1 < plain.hub.num_malformed <= 100
    assert plain.hub.refused.by_address == {"127.0.0.1": 1}


async def test_rotation_without_restart(fleet: Fleet) -> None:
    """Peers that have the file with both secrets connect before and after the last step."""
    secret = fleet.secret
    assert secret is not None
    path = secret.path
    dialing = SecretFile(path)
    old = dialing.keys[0]
    first = fleet.dial(1, dialing.dial_keys(0))
    await until(lambda: fleet.has(1))
    add_secret(path)
    both = SecretFile(path)
    await until(lambda: len(secret.keys) == 2)
    # The hub still has the first key: its sessions go on, and who dials with the second one fails.
    early = fleet.dial(2, both.keys[1])
    await until(lambda: early.lost)
    fleet.dial(2, both.keys[0])
    await until(lambda: fleet.has(2))
    first.spoke.send(StageReady(1))
    await until(lambda: (1, StageReady(1)) in fleet.messages)
    assert fleet.lost == []
    drop_secret(path)
    await until(lambda: len(fleet.lost) == 2 and first.lost)
    for failures in range(100):
        again = fleet.dial(3, both.keys[failures % 2])
        await until(lambda: again.lost or fleet.has(3))  # noqa: B023
        if fleet.has(3):
            break
    assert fleet.has(3)
    revoked = fleet.dial(4, old)
    await until(lambda: revoked.lost)
    assert not fleet.has(4)


async def test_unreadable_file_changes_nothing(
    fleet: Fleet, caplog: pytest.LogCaptureFixture
) -> None:
    assert fleet.secret is not None
    fleet.member(1)
    await until(lambda: fleet.has(1))
    fleet.secret.path.write_bytes(b"")
    await until(lambda: "0 node secrets" in caplog.text)
    fleet.member(2)
    await until(lambda: fleet.has(2))
    assert fleet.lost == []


async def test_hub_that_is_not_there(plain: Fleet) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        port = nobody.getsockname()[1]
    dialer = plain.dial(1, None, f"tcp://127.0.0.1:{port}")
    await until(lambda: dialer.lost)
    assert dialer.lost == [UNREACHABLE]


async def test_a_peer_that_receives_nothing_is_lost(plain: Fleet) -> None:
    message = StageFailed(0, "x" * 4000)
    with plain.outside.socket(zmq.DEALER) as lazy:
        lazy.linger, lazy.reconnect_ivl, lazy.rcvhwm = 0, -1, 1
        lazy.connect(plain.address)
        lazy.send(HEADER.pack(0, 0, 0, 0) + encode(Hello(1)))
        await until(lambda: plain.has(1))
        num_sent = 0
        while not plain.lost:
            for _ in range(500):
                plain.hub.send(1, message)
            num_sent += 500
            await asyncio.sleep(0)
    assert plain.lost == [(1, CLOSED)]
    assert num_sent >= MAX_QUEUED_FRAMES
