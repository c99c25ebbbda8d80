"""Placements that fit, and those that do not."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.cluster.placement import EdgeSpec, Placement, Slot, WorkerPlacement, make_placement


@given(st.lists(st.integers(1, 9), min_size=1, max_size=8), st.integers(1, 2**32 - 1))
def test_a_placement_is_what_it_was_after_the_wire(counts: list[int], generation: int) -> None:
    starts = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    layers = list(pairwise(starts))
    slots = [Slot(7 + stage, threads=stage or None) for stage in range(len(counts))]
    placement = make_placement(generation, layers, slots)
    assert placement.num_stages == len(counts)
    assert placement.senders == [slot.sender for slot in slots]
    for stage, slot in enumerate(slots):
        assert placement.worker_of(stage).sender == slot.sender
        assert placement.stage_of(slot.sender) == stage
    assert placement.stage_of(1) is None
    assert len(placement.edges) == len(counts) - 1
    decoded = msgspec.json.decode(msgspec.json.encode(placement), type=Placement)
    assert decoded == placement


WORKERS = [WorkerPlacement(1, "local", 0), WorkerPlacement(2, "local", 1)]
LAYERS = [(0, 2), (2, 4)]
EDGES = [EdgeSpec(0, 0, 1)]


@pytest.mark.parametrize(
    ("generation", "layers", "workers", "edges", "reason"),
    [
        (0, LAYERS, WORKERS, EDGES, "positive"),
        (1, LAYERS, WORKERS[:1], EDGES, "one each"),
        (1, LAYERS, WORKERS[::-1], EDGES, "one each"),
        (1, LAYERS, [WORKERS[0], WorkerPlacement(1, "local", 1)], EDGES, "two places"),
        (1, [(0, 2), (2, 2)], WORKERS, EDGES, "no layer"),
        (1, [(0, 2), (3, 4)], WORKERS, EDGES, "gaps"),
        (1, LAYERS, WORKERS, [], "edges"),
    ],
)
def test_parts_that_do_not_fit(
    generation: int,
    layers: list[tuple[int, int]],
    workers: list[WorkerPlacement],
    edges: list[EdgeSpec],
    reason: str,
) -> None:
    with pytest.raises(ValueError, match=reason):
        Placement(generation, layers, workers, edges)
