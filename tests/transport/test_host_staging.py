"""Host staging on the fake device: what is sent arrives, whatever the order of streams."""

import queue
import random
import threading
from collections.abc import Iterator

import pytest
import torch

from gllm.transport.base import EdgeClosedError, EdgeLayout, StepFailedError, TransportError
from gllm.transport.edge import Edge, create_edge
from gllm.transport.host_staging import HostStagingReceiver, HostStagingSender
from tests.support.gpu.fake_streams import FakeEvent, FakeQueues

SHAPE = EdgeLayout(slots=3, max_tokens=8, hidden_size=5, itemsize=4)
STEPS = 9


@pytest.fixture
def edge() -> Iterator[Edge]:
    made = create_edge("test-edge")
    yield made
    made.close()


def received(edge: Edge, seed: int, ignored: str = "") -> tuple[list[float], FakeQueues]:
    """Twice each step's number, by two stages of which the first computes in one buffer."""
    with FakeQueues(seed, ignored, eagerness=0.5) as queues:
        here, there = queues.stream(), queues.stream()
        ends = edge.descriptors, SHAPE, torch.float32, queues
        sender = HostStagingSender(*ends, here, in_background=False)
        receiver = HostStagingReceiver(*ends, there)
        hidden, done = queues.zeros((8, 5), torch.float32), queues.event()
        results = queues.allocate_pinned((STEPS, 5), torch.float32)
        order, sent, signalled, got = random.Random(seed), 0, 0, 0
        while got < STEPS:
            able = ["send"] * (sent < min(STEPS, got + SHAPE.slots))
            able += ["signal"] * (signalled < sent) + ["receive"] * (got < signalled)
            turn = order.choice(able)
            with queues.thread(turn):
                if turn == "send":
                    with here.current():
                        hidden.fill_(float(sent))
                    sender.send(sent, hidden[: 1 + sent % 8])
                    sent += 1
                elif turn == "signal":
                    sender.signal_next()
                    signalled += 1
                else:
                    arrived = receiver.receive(got, 1 + got % 8)
                    with there.current():
                        results[got].copy_(arrived.mul_(2)[-1])
                    there.record(done)
                    done.synchronize()
                    got += 1
            following = {"send": "signal", "signal": "receive", "receive": "send"}
            queues.hand_over(turn, following[turn])
        queues.hand_over("receive", "host")
        return results[:, 0].tolist(), queues


@pytest.mark.parametrize("seed", range(10))
def test_any_order_brings_what_was_sent(edge: Edge, seed: int) -> None:
    assert received(edge, seed)[0] == [2.0 * step for step in range(STEPS)]


def test_the_receiver_is_not_woken_too_early(edge: Edge) -> None:
    """The two ends map the ring at two addresses, so that numbers have to tell."""
    (wait,) = (w for w in received(edge, 0)[1].waits if w.startswith("host_staging.py"))
    wanted = [2.0 * step for step in range(STEPS)]
    assert any(received(edge, seed, wait)[0] != wanted for seed in range(10))


def test_a_copy_that_fails_is_reported(edge: Edge) -> None:
    """By the thread that would have woken the receiver."""
    reported: queue.SimpleQueue[BaseException] = queue.SimpleQueue()

    class LostEvent(FakeEvent):
        def synchronize(self) -> None:
            raise RuntimeError("an illegal memory access was encountered")

    class LostQueues(FakeQueues):
        def event(self, timed: bool = False) -> FakeEvent:
            return LostEvent(self)

    with LostQueues() as queues:
        stream = queues.stream()
        ends = edge.descriptors, SHAPE, torch.float32, queues, stream
        sender = HostStagingSender(*ends, on_error=reported.put)
        sender.send(0, queues.zeros((4, 5), torch.float32))
        assert "illegal memory" in str(reported.get(timeout=60))
        assert queues.bound == {"host-staging"}


def test_a_failed_step_and_a_wrong_one(edge: Edge) -> None:
    with FakeQueues() as queues:
        ends = edge.descriptors, SHAPE, torch.float32, queues, queues.stream()
        sender, receiver = HostStagingSender(*ends), HostStagingReceiver(*ends)
        sender.fail(0, "out of luck")
        with pytest.raises(StepFailedError, match="out of luck"):
            receiver.receive(0, 4)
        sender.fail(1, "")
        with pytest.raises(TransportError, match="tokens"):
            receiver.receive(1, 4)


def test_closed_ends_leave_no_thread(edge: Edge) -> None:
    before = threading.active_count()
    with FakeQueues() as queues:
        ends = edge.descriptors, SHAPE, torch.float32, queues, queues.stream()
        sender, receiver = HostStagingSender(*ends), HostStagingReceiver(*ends)
        sender.fail(0, "out of luck")
        receiver.cancel()
        with pytest.raises(EdgeClosedError):
            receiver.receive(0, 4)
        sender.close()
        receiver.close()
    assert threading.active_count() == before
