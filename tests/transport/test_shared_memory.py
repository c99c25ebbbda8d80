"""The shared-memory edge: what is sent arrives, in place, and a mismatch is noticed."""

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from gllm.transport.base import EdgeClosedError, EdgeLayout, StepFailedError, TransportError
from gllm.transport.edge import create_edge
from gllm.transport.shared_memory import SharedMemoryReceiver, SharedMemorySender

SHAPE = EdgeLayout(slots=3, max_tokens=8, hidden_size=5, itemsize=4)
Ends = tuple[SharedMemorySender, SharedMemoryReceiver]


@pytest.fixture
def ends() -> Iterator[Ends]:
    edge = create_edge("test-edge")
    yield (
        SharedMemorySender(edge.descriptors, SHAPE, torch.float32),
        SharedMemoryReceiver(edge.descriptors, SHAPE, torch.float32),
    )
    edge.close()


def test_steps_arrive_in_order_and_slots_are_used_again(ends: Ends) -> None:
    sender, receiver = ends
    for step in range(10):
        sent = torch.randn(1 + step % 8, 5)
        sender.send(step, sent)
        assert torch.equal(receiver.receive(step, len(sent)), sent)


def test_several_steps_in_flight_do_not_touch_each_other(ends: Ends) -> None:
    sender, receiver = ends
    sent = [torch.full((8, 5), float(step)) for step in range(3)]
    for step, hidden in enumerate(sent):
        sender.send(step, hidden)
        hidden.fill_(-1.0)
    received = [receiver.receive(step, 8) for step in range(3)]
    assert [tensor.unique().tolist() for tensor in received] == [[0.0], [1.0], [2.0]]


def test_receive_waits(ends: Ends) -> None:
    sender, receiver = ends
    got: list[torch.Tensor] = []
    thread = threading.Thread(target=lambda: got.append(receiver.receive(0, 2)))
    thread.start()
    assert not got
    sender.send(0, torch.ones(2, 5))
    thread.join(60)
    assert torch.equal(got[0], torch.ones(2, 5))


def test_a_failed_step_travels_as_its_error(ends: Ends) -> None:
    sender, receiver = ends
    sender.send(0, torch.ones(1, 5))
    sender.fail(1, "x" * 10_000)
    receiver.receive(0, 1)
    with pytest.raises(StepFailedError, match=r"^x{4000}"):
        receiver.receive(1, 4)


@pytest.mark.parametrize(("step", "tokens"), [(1, 2), (0, 3)])
def test_activations_of_another_plan_are_a_fault(ends: Ends, step: int, tokens: int) -> None:
    sender, receiver = ends
    sender.send(0, torch.ones(2, 5))
    if step:
        os.eventfd_write(receiver.event, 1)
        receiver.receive(0, 2)
    with pytest.raises(TransportError):
        receiver.receive(step, tokens)


def test_untouched_slots_take_no_memory() -> None:
    edge = create_edge("test-lazy")
    shape = EdgeLayout(slots=4, max_tokens=2560, hidden_size=8192, itemsize=4)
    sender = SharedMemorySender(edge.descriptors, shape, torch.float32)
    sender.send(0, torch.ones(1, 8192))
    assert os.fstat(edge.descriptors[0]).st_blocks * 512 < 2**20
    edge.close()


def test_a_cancelled_edge_wakes_its_receiver(ends: Ends) -> None:
    _, receiver = ends
    errors: list[BaseException] = []

    def receive() -> None:
        try:
            receiver.receive(0, 2)
        except EdgeClosedError as error:
            errors.append(error)

    thread = threading.Thread(target=receive)
    thread.start()
    receiver.cancel()
    thread.join(60)
    assert len(errors) == 1
    with pytest.raises(EdgeClosedError):
        receiver.receive(0, 2)


def test_what_has_arrived_is_not_received_any_more(ends: Ends) -> None:
    sender, receiver = ends
    sender.send(0, torch.ones(2, 5))
    receiver.cancel()
    for step in (0, 1):
        with pytest.raises(EdgeClosedError):
            receiver.receive(step, 2)


def mapped(name: str) -> int:
    """How often a file is mapped."""
    return Path("/proc/self/maps").read_text().count(name)


def test_closed_ends_map_nothing() -> None:
    edge = create_edge("test-mapped")
    sender = SharedMemorySender(edge.descriptors, SHAPE, torch.float32)
    receiver = SharedMemoryReceiver(edge.descriptors, SHAPE, torch.float32)
    sender.send(0, torch.ones(2, 5))
    received = receiver.receive(0, 2)
    assert mapped("test-mapped") == 2
    sender.close()
    receiver.close()
    assert mapped("test-mapped") == 1
    assert torch.equal(received, torch.ones(2, 5))
    del received, receiver
    assert mapped("test-mapped") == 0
    edge.close()
