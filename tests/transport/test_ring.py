"""The ring without tensors: its control area, and the part of a data mover."""

import os
import threading
from collections.abc import Iterator

import pytest

from gllm.transport.base import EdgeClosedError, EdgeLayout, StepFailedError, TransportError
from gllm.transport.edge import Edge, create_edge
from gllm.transport.ring import MAX_ERROR_BYTES, Ring, SlotHeader

LAYOUT = EdgeLayout(slots=3, max_tokens=8, hidden_size=5, itemsize=4)


@pytest.fixture
def edge() -> Iterator[Edge]:
    created = create_edge("test-ring")
    yield created
    created.close()


def open_ring(edge: Edge, layout: EdgeLayout = LAYOUT) -> Ring:
    return Ring(edge.descriptors[0], edge.descriptors[1], layout)


def test_layout_is_found_once_a_process_has_laid_the_ring_out(edge: Edge) -> None:
    assert Ring.attach(*edge.descriptors[:2]) is None
    ring = open_ring(edge)
    attached = Ring.attach(*edge.descriptors[:2])
    assert attached is not None
    assert attached.shape == LAYOUT
    assert attached.signalled_steps == [None] * 3
    ring.signal(4, 2)
    assert attached.signalled_steps == [None, 4, None]
    assert attached.header(4) == SlotHeader(4, 2, 5, 4, 0, 40)
    assert [attached.has_signalled(step) for step in (1, 4, 7, 0)] == [True, True, False, False]


def test_no_other_process_inherits_the_descriptors() -> None:
    created = create_edge("test-inherited", is_remote=True)
    assert not any(map(os.get_inheritable, created.descriptors))
    created.close()


def test_ends_with_different_layouts_are_an_error(edge: Edge) -> None:
    open_ring(edge)
    with pytest.raises(TransportError, match="max_tokens=9"):
        open_ring(edge, EdgeLayout(slots=3, max_tokens=9, hidden_size=5, itemsize=4))


def test_many_slots_have_a_control_area_of_several_pages(edge: Edge) -> None:
    ring = open_ring(edge, EdgeLayout(slots=2000, max_tokens=1, hidden_size=1, itemsize=1))
    ring.memory[ring.offset(0)] = 255
    ring.signal(1999, 1)
    assert ring.signalled_steps.count(None) == 1999


@pytest.mark.parametrize(
    ("header", "fault"),
    [
        (SlotHeader(1, 8, 5, 4, 0, 160), ""),
        (SlotHeader(1, 8, 5, 4, 0, 0), ""),
        (SlotHeader(1, 0, 5, 4, MAX_ERROR_BYTES, 0), ""),
        (SlotHeader(1, 9, 5, 4, 0, 180), "9 tokens"),
        (SlotHeader(1, 8, 6, 4, 0, 192), "6 elements"),
        (SlotHeader(1, 8, 5, 2, 0, 80), "of 2 bytes"),
        (SlotHeader(1, 8, 5, 4, MAX_ERROR_BYTES + 1, 160), "error text"),
        (SlotHeader(1, 8, 5, 4, 0, 161), "161 bytes"),
    ],
)
def test_a_header_that_does_not_fit_is_named(header: SlotHeader, fault: str) -> None:
    found = header.find_fault(LAYOUT)
    assert fault in found
    assert bool(fault) == bool(found)


def test_receiver_of_a_data_mover_ignores_events_without_a_step(edge: Edge) -> None:
    mover, worker = open_ring(edge), open_ring(edge)
    mover.begin_relay()
    mover.signal(0, 1)
    mover.begin_relay()  # A data mover that was restarted: one event more than steps.
    worker.wait(0, 1)
    received: list[int] = []

    def wait() -> None:
        worker.wait(1, 2)
        received.append(1)

    thread = threading.Thread(target=wait)
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    mover.signal(1, 2)
    thread.join(60)
    assert received == [1]


def test_a_lost_event_is_made_good_by_the_next_data_mover(edge: Edge) -> None:
    mover, worker = open_ring(edge), open_ring(edge)
    mover.begin_relay()
    mover.signal(0, 1)
    os.eventfd_read(edge.descriptors[1])  # As if the data mover had ended before the event.
    mover.begin_relay()
    worker.wait(0, 1)


def test_cancelled_end_of_a_data_mover_wakes(edge: Edge) -> None:
    open_ring(edge).begin_relay()
    worker = open_ring(edge)
    worker.cancel()
    with pytest.raises(EdgeClosedError):
        worker.wait(0, 1)


def test_error_without_text_is_a_mismatch_and_with_text_a_failed_step(edge: Edge) -> None:
    sender, receiver = open_ring(edge), open_ring(edge)
    sender.signal(0, 0, "out of memory")
    with pytest.raises(StepFailedError, match="out of memory"):
        receiver.wait(0, 3)
    sender.signal(1, 0)
    with pytest.raises(TransportError):
        receiver.wait(1, 3)


@pytest.mark.parametrize("is_remote", [False, True])
def test_lanes_have_rings_of_their_own_and_meet_at_the_same_files(is_remote: bool) -> None:
    created = create_edge("test-lanes", is_remote=is_remote, num_lanes=2)
    first, second = (created.lane_descriptors(lane) for lane in range(2))
    assert len(first) == len(second) == (5 if is_remote else 3)
    assert first[2:] == second[2:]
    assert set(first) | set(second) == set(created.descriptors)
    rings = [Ring(each[0], each[1], LAYOUT) for each in (first, second)]
    rings[1].signal(0, 1)
    assert [ring.has_arrived(0) for ring in rings] == [False, True]
    created.close()
