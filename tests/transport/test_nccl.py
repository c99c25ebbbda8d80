"""The NCCL edge without NCCL: order on the fake device, meeting and failures by gloo."""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from gllm.transport import nccl
from gllm.transport.base import EdgeClosedError, EdgeLayout, StepFailedError, TransportError
from gllm.transport.edge import Edge, create_edge
from gllm.transport.nccl import NcclReceiver, NcclSender
from gllm.transport.shared_memory import SlotRing
from tests.support.gpu.fake_streams import FakeEvent, FakeQueues, FakeStream
from tests.support.gpu.memory_uses import Race

SHAPE = EdgeLayout(slots=2, max_tokens=8, hidden_size=5, itemsize=4)
STEPS = 9


@pytest.fixture
def edge() -> Iterator[Edge]:
    made = create_edge("test-edge")
    yield made
    made.close()


class FakeWork:
    """A transfer in a stream of the group's own."""

    def __init__(self, queues: FakeQueues, done: FakeEvent) -> None:
        self._queues, self._done = queues, done

    def is_completed(self) -> bool:
        return True

    def exception(self) -> None:
        return None

    def wait(self) -> bool:
        stream = self._queues.stream_now
        assert stream is not None
        stream.wait(self._done)
        return True


class FakeWire:
    """Both ranks of a group on one fake device, each with a stream of its own, as NCCL has."""

    def __init__(self, queues: FakeQueues) -> None:
        self._queues = queues
        self._streams = queues.stream(), queues.stream()
        self._sent: deque[tuple[Tensor, FakeEvent]] = deque()

    def _begin(self, stream: FakeStream) -> None:
        assert self._queues.stream_now is not None
        now = self._queues.event()
        self._queues.stream_now.record(now)
        stream.wait(now)

    def _work(self, stream: FakeStream) -> tuple[FakeWork, FakeEvent]:
        done = self._queues.event()
        stream.record(done)
        return FakeWork(self._queues, done), done

    def send(self, tensors: list[Tensor], rank: int, tag: int) -> FakeWork:
        assert rank == nccl.RECEIVER_RANK
        self._begin(self._streams[0])
        with self._streams[0].current():
            copy = tensors[0].clone()
        work, done = self._work(self._streams[0])
        self._sent.append((copy, done))
        return work

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> FakeWork:
        assert rank == nccl.SENDER_RANK
        self._begin(self._streams[1])
        copy, sent = self._sent.popleft()
        self._streams[1].wait(sent)
        with self._streams[1].current():
            tensors[0].copy_(copy)
        return self._work(self._streams[1])[0]

    def abort(self) -> None:
        raise AssertionError("nothing fails here")


def received(seed: int, ignored: str = "", checks: bool = True) -> tuple[list[float], FakeQueues]:
    """Twice each step's number, by two stages of which the first computes in one buffer. A slot is
    used again once the receiver asked for it, as when its step failed behind it."""
    edge = create_edge("test-edge")
    with closing(edge), FakeQueues(seed, ignored, checks, eagerness=seed % 3 * 0.3) as queues:
        here, there, wire = queues.stream(), queues.stream(), FakeWire(queues)
        ends = edge.descriptors, SHAPE, torch.float32, queues
        common: dict[str, Any] = {"create_group": lambda store, rank: wire, "in_background": False}
        sender = NcclSender(*ends, here, **common)
        receiver = NcclReceiver(*ends, there, **common)
        hidden, done = queues.zeros((8, 5), torch.float32), queues.event()
        results = queues.allocate_pinned((STEPS, 5), torch.float32)
        order, sent, got = random.Random(seed), 0, 0
        while got < STEPS:
            able = ["send"] * (sent < min(STEPS, got + SHAPE.slots)) + ["receive"] * (got < sent)
            turn = order.choice(able)
            if turn == "send":
                with here.current():
                    hidden.fill_(float(sent))
                sender.send(sent, hidden[: 1 + sent % 8])
                sent += 1
            else:
                arrived = receiver.receive(got, 1 + got % 8)
                with there.current():
                    results[got].copy_(arrived.mul_(2)[-1])
                got += 1
        there.record(done)
        done.synchronize()
        return results[:, 0].tolist(), queues


@pytest.mark.parametrize(
    "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(4, 10))]
)
def test_any_order_brings_what_was_sent(seed: int) -> None:
    assert received(seed)[0] == [2.0 * step for step in range(STEPS)]


def test_every_wait_is_there() -> None:
    waits = received(0)[1].waits
    assert len([wait for wait in waits if wait.startswith("nccl.py")]) == 4


@pytest.mark.full
def test_no_wait_can_be_spared() -> None:
    """Clocks miss it, and so do numbers."""

    def often(wait: str, checks: bool) -> Iterator[list[float]]:
        return (received(seed, wait, checks)[0] for seed in range(100))

    waits = received(0)[1].waits
    wanted = [2.0 * step for step in range(STEPS)]
    for wait in waits:
        with pytest.raises(Race):
            list(often(wait, True))
        assert any(got != wanted for got in often(wait, False)), wait


class DirectQueues:
    """No queue at all: everything is done at once, on the CPU."""

    device = torch.device("cpu")

    def __init__(self) -> None:
        self.bound: set[str] = set()

    def stream(self) -> "DirectQueues":
        return self

    event = stream

    def current(self) -> Any:
        return nullcontext()

    def query(self) -> bool:
        return True

    def bind_thread(self) -> None:
        self.bound.add(threading.current_thread().name)

    def wait(self, event: Any) -> None:
        pass

    record = wait

    def synchronize(self) -> None:
        pass

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)


def gloo(store: Any, rank: int) -> Any:
    return distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))


@contextmanager
def joined(edge: Edge) -> Iterator[tuple[NcclSender, NcclReceiver]]:
    """Both ends, which met over the edge's file."""
    queues, made = DirectQueues(), []
    ends = edge.descriptors, SHAPE, torch.float32, queues, queues
    common: dict[str, Any] = {"create_group": gloo, "in_background": False}

    def first() -> None:
        made.append(NcclSender(*ends, **common))  # type: ignore[arg-type]

    thread = threading.Thread(target=first)
    thread.start()
    receiver = NcclReceiver(*ends, **common)  # type: ignore[arg-type]
    thread.join(60)
    yield made[0], receiver


def beside(work: Callable[[], None]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_two_ends_meet_and_failed_steps_need_no_transfer(edge: Edge) -> None:
    with joined(edge) as (sender, receiver):
        for step in range(6):
            hidden = torch.randn(1 + step, 5)
            if step % 3 == 2:
                sender.fail(step, f"step {step} is lost")
                with pytest.raises(StepFailedError, match=f"step {step} is lost"):
                    receiver.receive(step, len(hidden))
                continue
            thread = beside(partial(sender.send, step, hidden))
            assert torch.equal(receiver.receive(step, len(hidden)), hidden)
            thread.join(60)
        sender.fail(7, "of another plan")
        with pytest.raises(TransportError, match="step, tokens"):
            receiver.receive(6, 1)


def test_a_host_that_waits_sleeps_longer_from_look_to_look() -> None:
    pauses: list[float] = []
    assert nccl.wait_until(lambda: len(pauses) == 20, sleep=pauses.append)
    assert pauses[0] == nccl.MIN_PAUSE_SECONDS
    assert pauses[1] == 2 * pauses[0]
    assert pauses[-1] == nccl.MAX_PAUSE_SECONDS
    assert not nccl.wait_until(lambda: False, timeout=0.0)


def test_ends_wait_for_each_other_before_nccl_does(edge: Edge) -> None:
    there: list[int] = []

    def come(rank: int) -> Any:
        def make(store: Any, rank: int) -> Any:
            nccl.wait_for_peer(store, rank)
            there.append(rank)

        return lambda: nccl.join_group(edge.descriptors, rank, make)

    first = beside(come(nccl.RECEIVER_RANK))
    first.join(0.05)
    assert there == []
    beside(come(nccl.SENDER_RANK)).join(60)
    first.join(60)
    assert sorted(there) == [nccl.SENDER_RANK, nccl.RECEIVER_RANK]


def test_a_broken_edge_takes_nothing_more(edge: Edge) -> None:
    with joined(edge) as (sender, receiver):
        for end in (sender, receiver):
            end.monitor.abort("the link is down")
        with pytest.raises(TransportError, match="the link is down"):
            sender.send(0, torch.ones(1, 5))
        SlotRing(edge.descriptors, SHAPE, torch.float32).signal(0, 1)
        with pytest.raises(TransportError, match="the link is down"):
            receiver.receive(0, 1)


def test_closed_ends_have_no_ring_and_no_transfers() -> None:
    edge = create_edge("test-closed")
    with closing(edge), joined(edge) as (sender, receiver):
        receiver.cancel()
        with pytest.raises(EdgeClosedError):
            receiver.receive(0, 1)
        assert num_mapped() == 2
        for end in (sender, receiver):
            end.close()
        assert num_mapped() == 0


def num_mapped() -> int:
    """How often the memory of the edge is mapped."""
    return Path("/proc/self/maps").read_text().count("memfd:test-closed (")
