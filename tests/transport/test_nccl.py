"""The NCCL edge without NCCL: order on the fake device, meeting and failures by gloo."""

import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, distributed

from gllm.runtime.launch import Edge
from gllm.transport import nccl
from gllm.transport.base import EdgeShape, StepFailed, TransportFault
from gllm.transport.nccl import NcclReceiver, NcclSender, Watch
from tests.runtime.fake_streams import FakeEvent, FakeQueues, FakeStream
from tests.runtime.memory_uses import Race

SHAPE = EdgeShape(slots=2, max_tokens=8, hidden_size=5, itemsize=4)
STEPS = 9


@pytest.fixture
def edge() -> Iterator[Edge]:
    made = Edge("test-edge")
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
        assert rank == nccl.RECEIVER
        self._begin(self._streams[0])
        with self._streams[0].current():
            copy = tensors[0].clone()
        work, done = self._work(self._streams[0])
        self._sent.append((copy, done))
        return work

    def recv(self, tensors: list[Tensor], rank: int, tag: int) -> FakeWork:
        assert rank == nccl.SENDER
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
    edge = Edge("test-edge")
    with closing(edge), FakeQueues(seed, ignored, checks, eagerness=seed % 3 * 0.3) as queues:
        here, there, wire = queues.stream(), queues.stream(), FakeWire(queues)
        ends = edge.descriptors, SHAPE, torch.float32, queues
        sender = NcclSender(*ends, here, lambda store, rank: wire, in_background=False)
        receiver = NcclReceiver(*ends, there, lambda store, rank: wire, in_background=False)
        hidden, done = queues.zeros((8, 5), torch.float32), queues.event()
        results = queues.pinned((STEPS, 5), torch.float32)
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


@pytest.mark.parametrize("seed", range(10))
def test_any_order_brings_what_was_sent(seed: int) -> None:
    assert received(seed)[0] == [2.0 * step for step in range(STEPS)]


def test_no_wait_can_be_spared() -> None:
    """Clocks miss it, and so do numbers."""

    def often(wait: str, checks: bool) -> Iterator[list[float]]:
        return (received(seed, wait, checks)[0] for seed in range(100))

    waits = received(0)[1].waits
    assert len([wait for wait in waits if wait.startswith("nccl.py")]) == 4
    wanted = [2.0 * step for step in range(STEPS)]
    for wait in waits:
        with pytest.raises(Race):
            list(often(wait, True))
        assert any(got != wanted for got in often(wait, False)), wait


class DirectQueues:
    """No queue at all: everything is done at once, on the CPU."""

    device = torch.device("cpu")

    def stream(self) -> "DirectQueues":
        return self

    event = stream

    def current(self) -> Any:
        return nullcontext()

    def wait(self, event: Any) -> None:
        pass

    record = wait

    def synchronize(self) -> None:
        pass

    def zeros(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        return torch.zeros(*shape, dtype=dtype)


def gloo(store: distributed.Store, rank: int) -> nccl.Group:
    return distributed.ProcessGroupGloo(store, rank, 2, timedelta(seconds=60))


@contextmanager
def joined(edge: Edge) -> Iterator[tuple[NcclSender, NcclReceiver]]:
    """Both ends, which met over the edge's file."""
    queues, made = DirectQueues(), []
    ends = edge.descriptors, SHAPE, torch.float32, queues, queues, gloo

    def first() -> None:
        made.append(NcclSender(*ends, in_background=False))  # type: ignore[arg-type]

    thread = threading.Thread(target=first)
    thread.start()
    receiver = NcclReceiver(*ends, in_background=False)  # type: ignore[arg-type]
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
                with pytest.raises(StepFailed, match=f"step {step} is lost"):
                    receiver.receive(step, len(hidden))
                continue
            thread = beside(lambda step=step, hidden=hidden: sender.send(step, hidden))
            assert torch.equal(receiver.receive(step, len(hidden)), hidden)
            thread.join(60)
        sender.fail(7, "of another plan")
        with pytest.raises(TransportFault, match="step, tokens"):
            receiver.receive(6, 1)


class SlowWork:
    def __init__(self, error: BaseException | None = None, ended: bool = False) -> None:
        self.error, self.ended = error, ended

    def is_completed(self) -> bool:
        return self.ended

    def exception(self) -> BaseException | None:
        return self.error


class Aborted:
    def __init__(self) -> None:
        self.times = 0

    def abort(self) -> None:
        self.times += 1


def test_a_transfer_that_does_not_end_is_aborted_and_named() -> None:
    group = Aborted()
    watch = Watch(group, timeout=10.0)  # type: ignore[arg-type]
    slow = SlowWork()
    watch.add(3, SlowWork(ended=True), 100.0)  # type: ignore[arg-type]
    watch.add(4, slow, 101.0)  # type: ignore[arg-type]
    watch.look(110.5)
    watch.check()
    watch.look(111.5)
    assert group.times == 1
    with pytest.raises(TransportFault, match="step 4 did not end in 10 s"):
        watch.check()
    watch.look(200.0)
    assert group.times == 1


def test_a_transfer_that_fails_is_named() -> None:
    group = Aborted()
    watch = Watch(group, timeout=10.0)  # type: ignore[arg-type]
    watch.add(8, SlowWork(OSError("the peer is gone"), ended=True), 0.0)  # type: ignore[arg-type]
    watch.look(0.1)
    assert group.times == 1
    with pytest.raises(TransportFault, match="step 8 failed: the peer is gone"):
        watch.check()


def test_a_broken_edge_takes_nothing_more(edge: Edge) -> None:
    with joined(edge) as (sender, receiver):
        for end in (sender, receiver):
            end._end.watch.broken = "the link is down"
        with pytest.raises(TransportFault, match="the link is down"):
            sender.send(0, torch.ones(1, 5))
        sender._end.ring.signal(0, 1)
        with pytest.raises(TransportFault, match="the link is down"):
            receiver.receive(0, 1)
