"""Placements that fit, and those that do not."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.recovery.placement import (
    EdgeSpec,
    Placement,
    RankName,
    RankWorker,
    WorkerPlacement,
    make_placement,
    rank_names,
)

STAGES = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 5)), min_size=1, max_size=8)
"""Layers and ranks of each stage."""


@given(STAGES, st.integers(1, 2**32 - 1))
def test_a_placement_is_what_it_was_after_the_wire(
    stages: list[tuple[int, int]], epoch: int
) -> None:
    counts, degrees = ([stage[field] for stage in stages] for field in (0, 1))
    starts = [sum(counts[:stage]) for stage in range(len(counts) + 1)]
    layers = list(pairwise(starts))
    slots = [RankWorker(7 + place) for place in range(sum(degrees))]
    placement = make_placement(epoch, layers, slots, degrees)
    assert placement.num_stages == len(counts)
    assert placement.degrees == degrees
    assert placement.senders == [slot.sender for slot in slots]
    for name, slot in zip(rank_names(degrees), slots, strict=True):
        assert placement.workers_of(name.stage)[name.rank].sender == slot.sender
        assert placement.name_of(slot.sender) == name
    assert placement.place_of(1) is None
    assert placement.name_of(1) is None
    decoded = msgspec.json.decode(msgspec.json.encode(placement), type=Placement)
    assert decoded == placement


@given(STAGES)
def test_each_rank_but_those_of_the_first_stage_receives_once(
    stages: list[tuple[int, int]],
) -> None:
    degrees = [ranks for _, ranks in stages]
    layers = [(stage, stage + 1) for stage in range(len(degrees))]
    slots = [RankWorker(1 + place) for place in range(sum(degrees))]
    placement = make_placement(1, layers, slots, degrees)
    targets = [(edge.target, edge.target_rank) for edge in placement.edges]
    assert targets == [(name.stage, name.rank) for name in rank_names(degrees) if name.stage]
    assert [edge.number for edge in placement.edges] == list(range(len(targets)))
    for stage in range(1, len(degrees)):
        sources = [edge.source_rank for edge in placement.edges if edge.target == stage]
        loads = [sources.count(rank) for rank in range(degrees[stage - 1])]
        assert max(loads) - min(loads) <= 1, "the ranks that send share the work"


@pytest.mark.parametrize(
    ("place", "text", "label"),
    [
        (RankName(1), "stage 1", "1"),
        (RankName(1, 0, 2), "stage 1 rank 0", "1.0"),
        (RankName(0, 3, 4), "stage 0 rank 3", "0.3"),
    ],
)
def test_names_of_places(place: RankName, text: str, label: str) -> None:
    assert (str(place), place.label) == (text, label)


WORKERS = [WorkerPlacement(1, "local", 0), WorkerPlacement(2, "local", 1)]
RANKS = [*WORKERS, WorkerPlacement(3, "local", 1, 1)]
LAYERS = [(0, 2), (2, 4)]
EDGES = [EdgeSpec(0, 0, 1)]
FAN_OUT = [EdgeSpec(0, 0, 1), EdgeSpec(1, 0, 1, 0, 1)]


@pytest.mark.parametrize(
    ("epoch", "layers", "workers", "edges", "reason"),
    [
        (0, LAYERS, WORKERS, EDGES, "positive"),
        (1, LAYERS, WORKERS[:1], EDGES, "one each"),
        (1, LAYERS, WORKERS[::-1], EDGES, "one each"),
        (1, LAYERS, [*WORKERS, WorkerPlacement(3, "local", 1, 2)], FAN_OUT, "one each"),
        (1, LAYERS, [WORKERS[0], *RANKS[:0:-1]], FAN_OUT, "one each"),
        (1, LAYERS, [*RANKS, WorkerPlacement(4, "local", 2)], FAN_OUT, "one each"),
        (1, LAYERS, [WORKERS[0], WorkerPlacement(1, "local", 1)], EDGES, "two places"),
        (1, LAYERS, [*WORKERS, WorkerPlacement(3, "other", 1, 1)], FAN_OUT, "several nodes"),
        (1, [(0, 2), (2, 2)], WORKERS, EDGES, "no layer"),
        (1, [(0, 2), (3, 4)], WORKERS, EDGES, "gaps"),
        (1, LAYERS, WORKERS, [], "edges"),
        (1, LAYERS, RANKS, EDGES, "edges"),
        (1, LAYERS, RANKS, FAN_OUT[::-1], "edges"),
    ],
)
def test_parts_that_do_not_fit(
    epoch: int,
    layers: list[tuple[int, int]],
    workers: list[WorkerPlacement],
    edges: list[EdgeSpec],
    reason: str,
) -> None:
    with pytest.raises(ValueError, match=reason):
        Placement(epoch, layers, workers, edges)


@pytest.mark.parametrize(
    ("num_slots", "degrees"), [(1, None), (3, None), (2, [2, 1]), (3, [3]), (3, [1, 1, 1])]
)
def test_numbers_that_do_not_fit(num_slots: int, degrees: list[int] | None) -> None:
    slots = [RankWorker(1 + place) for place in range(num_slots)]
    with pytest.raises(ValueError, match="cannot hold"):
        make_placement(1, LAYERS, slots, degrees)
