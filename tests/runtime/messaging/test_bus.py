"""Hub and spokes over real sockets: order, loss, strangers, and what is no message."""

import asyncio
import multiprocessing
import os
import random
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import zmq

from gllm.messages.codec import AnyMessage, decode_for_head, decode_for_worker, encode
from gllm.messages.lifecycle import Hello, InitializeCache, Shutdown, StageFailed, StageReady
from gllm.messages.requests import AbortSequences, SubmitRequest
from gllm.messages.sampling import SequenceSamplingParams as Spec
from gllm.runtime.head.worker_channels import HeadSocket
from gllm.runtime.messaging.bus import Hub, Spoke
from gllm.runtime.messaging.bus_socket import CLOSED
from gllm.runtime.messaging.session import HEADER, MAX_FRAME_BYTES, SessionSender

RUN = 2**63 + 5


class Heard:
    """Messages and losses that a hub or a spoke has delivered."""

    def __init__(self) -> None:
        self.messages: list[Any] = []
        """(sender, message) at a hub; messages at a spoke."""
        self.lost: list[Any] = []
        """(sender, cause) at a hub; causes at a spoke."""

    def start(self, end: Any) -> "Heard":
        end.start(self.messages.extend, lambda *lost: self.lost.append(lost))
        return self


async def until(condition: Callable[[], object]) -> None:
    """Wait until a condition holds."""
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.001)


class Wires:
    """A hub, and spokes to it."""

    def __init__(self, folder: Path) -> None:
        self.context: zmq.Context = zmq.Context()
        self.address = f"ipc://{folder}/hub"
        self.hub = Hub(self.context, RUN, decode_for_head)
        self.hub.bind(self.address)
        self.hub.advance(1)
        self.heard = Heard().start(self.hub)
        self.spokes: list[Spoke] = []

    def spoke(self, sender: int, run: int = RUN, epoch: int = 1) -> tuple[Spoke, Heard]:
        spoke = Spoke(self.context, run, sender, self.address, decode_for_worker)
        spoke.advance(epoch)
        self.spokes.append(spoke)
        return spoke, Heard().start(spoke)

    def stranger(self) -> zmq.Socket:
        """A connection that does not keep to the protocol."""
        socket = self.context.socket(zmq.DEALER)
        socket.sndhwm, socket.linger = 0, 0
        socket.connect(self.address)
        return socket

    def stages(self, sender: int) -> list[int]:
        """The numbers of StageReady messages of a sender, which the tests count up."""
        return [m.stage for s, m in self.heard.messages if s == sender and type(m) is StageReady]


@pytest.fixture
async def wires(tmp_path: Path) -> AsyncIterator[Wires]:
    made = Wires(tmp_path)
    yield made
    for spoke in made.spokes:
        spoke.close()
    made.hub.close()
    made.context.destroy(linger=0)


async def test_messages_arrive_in_order_both_ways(wires: Wires) -> None:
    peers = {}
    for sender in (1, 2, 3):
        wires.hub.expect(sender)
        peers[sender] = wires.spoke(sender)
    for number in range(1000):
        for sender, (spoke, _) in peers.items():
            spoke.send(StageReady(number))
            # The first ones before the spokes have connected.
            wires.hub.send(sender, InitializeCache(number))
    await until(lambda: len(wires.heard.messages) == 3003)
    for sender, (_, heard) in peers.items():
        assert wires.stages(sender) == list(range(1000))
        await until(lambda: len(heard.messages) == 1000)  # noqa: B023
        assert [message.num_blocks for message in heard.messages] == list(range(1000))
    assert [m for _, m in wires.heard.messages if type(m) is Hello] == [Hello(s) for s in (1, 2, 3)]
    assert wires.heard.lost == []


async def test_workers_connect_to_a_head_whose_socket_has_no_name(
    wires: Wires,
) -> None:
    head = HeadSocket(wires.hub)
    addresses = {head.expect(sender) for sender in (1, 2)}
    (path,) = {Path(address.removeprefix("ipc://")) for address in addresses}
    name = os.readlink(path).removesuffix(" (deleted)")
    assert name.endswith("/hub")
    assert not Path(name).parent.exists()
    (wires.address,) = addresses
    for sender in (1, 2):
        wires.spoke(sender)[0].send(StageReady(sender))
    await until(lambda: wires.stages(1) == [1] and wires.stages(2) == [2])
    assert head.connecting == {1, 2}
    head.close()


async def test_messages_survive_the_way(wires: Wires) -> None:
    sent: list[Any] = [
        SubmitRequest(3, [1, 2, 2**31 - 1], Spec(0.5, seed=-(2**63), banned=(2,)), 5, [2], n=2),
        SubmitRequest(4, [2**30] * 700_000, Spec(), 1, []),
        AbortSequences([1, 2]),
        Shutdown(),
    ]
    wires.hub.expect(1)
    _, heard = wires.spoke(1)
    for message in sent:
        wires.hub.send(1, message)
    await until(lambda: len(heard.messages) == len(sent))
    assert heard.messages == sent


async def test_the_last_words_of_a_process_arrive_before_its_loss(wires: Wires) -> None:
    wires.hub.expect(1)
    spoke, _ = wires.spoke(1)
    for number in range(2000):
        spoke.send(StageReady(number))
    spoke.send(StageFailed(1, "no memory " * 300_000))
    spoke.close()
    spoke.send(StageReady(7))
    await until(lambda: wires.heard.lost)
    assert wires.stages(1) == list(range(2000))
    assert type(wires.heard.messages[-1][1]) is StageFailed
    assert wires.heard.lost == [(1, CLOSED)]


async def test_a_lost_sender_is_reported_once_and_gets_nothing_more(wires: Wires) -> None:
    wires.hub.expect(1)
    spoke, _ = wires.spoke(1)
    await until(lambda: wires.heard.messages)
    spoke.close()
    for number in range(100):
        wires.hub.send(1, InitializeCache(number))
        await asyncio.sleep(0)
    await until(lambda: wires.heard.lost)
    wires.hub.send(1, InitializeCache(1))
    await asyncio.sleep(0.05)
    assert wires.heard.lost == [(1, CLOSED)]
    # No longer expected: the process would have to be expected again.
    wires.spoke(1)
    await until(lambda: wires.hub.num_refused)


async def test_second_sessions_and_strangers_are_refused(wires: Wires) -> None:
    wires.hub.expect(1)
    first, _ = wires.spoke(1)
    await until(lambda: wires.heard.messages)
    wires.hub.expect(1)
    wires.spoke(1)
    wires.spoke(9)
    await until(lambda: wires.hub.num_refused == 2)
    wires.hub.expect(2)
    wires.spoke(2, run=RUN - 1)
    await until(lambda: wires.hub.num_stale == 1)
    first.send(StageReady(1))
    await until(lambda: wires.stages(1))
    assert [sender for sender, _ in wires.heard.messages] == [1, 1]
    assert wires.heard.lost == []


async def test_frames_of_forgotten_senders_are_dropped(wires: Wires) -> None:
    wires.hub.expect(1)
    spoke, heard = wires.spoke(1)
    await until(lambda: wires.heard.messages)
    wires.hub.forget(1)
    spoke.send(StageReady(1))
    await until(lambda: wires.hub.num_stale == 1)
    spoke.close()
    await asyncio.sleep(0.05)
    assert len(wires.heard.messages) == 1
    assert wires.heard.lost == []
    assert heard.messages == []
    assert wires.hub.num_malformed == 0


async def test_epochs_at_both_ends(wires: Wires) -> None:
    wires.hub.expect(1)
    spoke, heard = wires.spoke(1)
    spoke.send(StageReady(1))
    spoke.advance(2)
    spoke.send(StageReady(2))
    spoke.send(StageFailed(0, "of any epoch"))
    await until(lambda: len(wires.heard.messages) == 3)
    assert wires.stages(1) == [1]
    wires.hub.send(1, InitializeCache(1))
    wires.hub.advance(2)
    wires.hub.send(1, InitializeCache(2))
    await until(lambda: heard.messages and wires.stages(1) == [1, 2])
    assert heard.messages == [InitializeCache(2)]
    assert (spoke.num_stale, wires.hub.num_stale) == (1, 0)


async def test_the_end_of_a_hub_and_a_hub_that_is_none(wires: Wires, tmp_path: Path) -> None:
    wires.hub.expect(1)
    spoke, heard = wires.spoke(1)
    await until(lambda: wires.heard.messages)
    wires.hub.close()
    await until(lambda: heard.lost)
    assert heard.lost == [(CLOSED,)]
    spoke.send(StageReady(1))
    nowhere = Spoke(wires.context, RUN, 1, f"ipc://{tmp_path}/nowhere", decode_for_worker)
    alone = Heard().start(nowhere)
    await until(lambda: alone.lost)
    nowhere.close()


def frame(number: int, payload: bytes, epoch: int = 1, left: int = 0) -> list[bytes]:
    return [HEADER.pack(RUN, epoch, number, left) + payload]


READY = encode(StageReady(1))
BAD: dict[str, Callable[[int], list[bytes]]] = {
    "gap": lambda n: frame(n + 1, READY),
    "repeated": lambda n: frame(n - 1, READY),
    "role": lambda n: frame(n, encode(Shutdown())),
    "type": lambda n: frame(n, b"\x92\xaaStageReady\xa1x"),
    "unknown": lambda n: frame(n, b"\x91\xa7Unknown"),
    "pickle": lambda n: frame(n, b"\x80\x04\x95K\x01."),
    "nested": lambda n: frame(n, b"\x91" * 100_000),
    "no text": lambda n: frame(n, b"\x93\xabStageFailed\x01\xa2\xff\xfe"),
    "empty": lambda n: [b""],
    "short": lambda n: [b"\x00" * (HEADER.size - 1)],
    "no payload": lambda n: frame(n, b""),
    "parts": lambda n: [*frame(n, READY), b"more"],
    "too large": lambda n: frame(n, READY, left=2**32 - 1),
    "second hello": lambda n: frame(n, encode(Hello(1)), epoch=0),
}


@pytest.mark.parametrize("kind", BAD)
async def test_what_is_no_message_ends_its_session_alone(wires: Wires, kind: str) -> None:
    for sender in (1, 2):
        wires.hub.expect(sender)
    other, _ = wires.spoke(2)
    with wires.stranger() as bad:
        bad.send(SessionSender(RUN).frames(encode(Hello(1)), 0)[0])
        bad.send_multipart(frame(1, READY))
        bad.send_multipart(BAD[kind](2))
        bad.send_multipart(frame(3, READY))
        await until(lambda: wires.heard.lost and wires.hub.num_stale)
    assert [sender for sender, _ in wires.heard.lost] == [1]
    assert wires.heard.lost[0][1] != CLOSED
    assert wires.stages(1) == [1]
    assert wires.hub.num_malformed == 1
    other.send(StageReady(5))
    await until(lambda: wires.stages(2) == [5])


async def test_a_frame_above_the_limit_ends_its_session(wires: Wires) -> None:
    wires.hub.expect(1)
    with wires.stranger() as bad:
        bad.reconnect_ivl = -1
        bad.send(SessionSender(RUN).frames(encode(Hello(1)), 0)[0])
        bad.send(b"\x00" * (MAX_FRAME_BYTES + 1))
        await until(lambda: wires.heard.lost)
    assert wires.heard.lost == [(1, CLOSED)]


async def test_ten_thousand_bad_frames_are_counted_and_harm_nobody(wires: Wires) -> None:
    """Strangers and broken sessions beside living ones, which lose nothing."""
    seed = 17
    rng = random.Random(seed)
    num_broken, num_frames = 50, 10_000
    living = {}
    for sender in range(1, 4):
        wires.hub.expect(sender)
        living[sender] = wires.spoke(sender)
    strangers = [wires.stranger() for _ in range(num_broken)]
    for index, bad in enumerate(strangers[: num_broken // 2]):
        wires.hub.expect(100 + index)
        bad.send(SessionSender(RUN).frames(encode(Hello(100 + index)), 0)[0])
    kinds = list(BAD.values())
    num_sent = 0
    while num_sent < num_frames:
        if rng.random() < 0.5:
            parts = rng.choice(kinds)(rng.choice([1, 50]))
        else:
            parts = [rng.randbytes(rng.randrange(200)) for _ in range(rng.randrange(1, 4))]
        if sum(map(len, parts)) < 1000 or rng.random() < 0.01:
            rng.choice(strangers).send_multipart(parts)
            num_sent += 1
        if num_sent % 10 == 0:
            for spoke, _ in living.values():
                spoke.send(StageReady(num_sent))
            for sender in living:
                wires.hub.send(sender, InitializeCache(num_sent))
        if num_sent % 100 == 0:
            await asyncio.sleep(0)
    hub = wires.hub
    await until(lambda: hub.num_malformed + hub.num_stale + hub.num_refused >= num_frames)
    await asyncio.sleep(0.05)
    assert hub.num_malformed + hub.num_stale + hub.num_refused == num_frames, f"seed {seed}"
    assert sorted(sender for sender, _ in wires.heard.lost) == list(range(100, 125))
    for sender, (_, heard) in living.items():
        sent = wires.stages(sender)
        await until(lambda: len(heard.messages) >= len(sent))  # noqa: B023
        assert sent == sorted(sent)
        assert len(sent) >= num_frames // 10
        assert [m.num_blocks for m in heard.messages] == sent
    for bad in strangers:
        bad.close()


def talk(address: str, sender: int, limit: int) -> None:
    """A process that counts up to its limit, after the head's first message, and waits."""

    async def run() -> None:
        context: zmq.Context = zmq.Context()
        spoke = Spoke(context, RUN, sender, address, decode_for_worker)
        spoke.advance(1)
        begin, end = asyncio.Event(), asyncio.Event()
        lost: list[str] = []

        def on_messages(messages: list[AnyMessage]) -> None:
            begin.set()
            if any(type(message) is Shutdown for message in messages):
                end.set()

        def on_lost(cause: str) -> None:
            lost.append(cause)
            end.set()

        spoke.start(on_messages, on_lost)
        await begin.wait()
        for number in range(limit):
            spoke.send(StageReady(number))
        await end.wait()
        spoke.close()
        context.term()
        assert not lost

    asyncio.run(run())


@pytest.mark.full
async def test_processes_killed_frozen_and_told_to_end(wires: Wires) -> None:
    spawn = multiprocessing.get_context("spawn")
    processes = {}
    for sender in (1, 2, 3):
        wires.hub.expect(sender)
        wires.hub.send(sender, InitializeCache(1))
        processes[sender] = spawn.Process(target=talk, args=(wires.address, sender, 5000))
        processes[sender].start()
    await until(lambda: all(wires.stages(sender) for sender in processes))
    pid = processes[1].pid
    assert pid is not None
    os.kill(pid, signal.SIGSTOP)
    await until(lambda: all(len(wires.stages(sender)) == 5000 for sender in (2, 3)))
    # A frozen process is not lost, and what is sent to it waits for nobody.
    wires.hub.send(1, Shutdown())
    await asyncio.sleep(0.05)
    assert wires.heard.lost == []
    processes[2].kill()
    await until(lambda: wires.heard.lost)
    assert wires.heard.lost == [(2, CLOSED)]
    os.kill(pid, signal.SIGCONT)
    wires.hub.send(3, Shutdown())
    await until(lambda: len(wires.heard.lost) == 3)
    for sender, code in ((1, 0), (2, -signal.SIGKILL), (3, 0)):
        await asyncio.to_thread(processes[sender].join)
        assert processes[sender].exitcode == code
    assert wires.stages(1) == list(range(len(wires.stages(1))))
    assert (wires.hub.num_malformed, wires.hub.num_stale, wires.hub.num_refused) == (0, 0, 0)
