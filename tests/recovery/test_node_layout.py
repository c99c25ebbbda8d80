"""Distribution of stages over nodes, at the start and after losses."""

import math
from itertools import combinations, pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gllm.recovery.node_layout import (
    NodeMemory,
    NodeShape,
    distribute_stages,
    fit_layers,
    repartition_layers,
)
from gllm.recovery.partition import StageCosts, slowest_cost
from tests.support.examples import num_examples


@pytest.mark.parametrize(
    ("degrees", "num_nodes", "expected"),
    [
        ([1], 1, [0]),
        ([1, 1, 1, 1], 2, [0, 0, 1, 1]),
        ([1, 1, 1, 1, 1], 2, [0, 0, 0, 1, 1]),
        ([1] * 7, 3, [0, 0, 0, 1, 1, 2, 2]),
        ([2, 1, 1], 2, [0, 1, 1]),
        ([1, 1, 2], 2, [0, 0, 1]),
        ([4, 1, 1, 1], 3, [0, 1, 1, 2]),
    ],
)
def test_workers_are_distributed_evenly(
    degrees: list[int], num_nodes: int, expected: list[int]
) -> None:
    assert distribute_stages(degrees, num_nodes) == expected


def test_stages_are_where_the_numbers_say() -> None:
    assert distribute_stages([2, 1, 1, 1], 2, [3, 1]) == [0, 0, 0, 1]


@pytest.mark.parametrize("numbers", [[2, 1], [4], [1, 1, 2]])
def test_numbers_of_stages_have_to_fit(numbers: list[int]) -> None:
    with pytest.raises(ValueError, match=r"each of 2 nodes .* sum up to 4 stages"):
        distribute_stages([1] * 4, 2, numbers)


@given(degrees=st.lists(st.integers(1, 4), min_size=1, max_size=7), num_nodes=st.integers(1, 7))
def test_distributions_are_contiguous_and_as_even_as_possible(
    degrees: list[int], num_nodes: int
) -> None:
    if len(degrees) < num_nodes:
        with pytest.raises(ValueError, match=f"set --pp to {num_nodes} or more, or --nnodes to"):
            distribute_stages(degrees, num_nodes)
        return
    nodes = distribute_stages(degrees, num_nodes)
    assert nodes[0] == 0
    assert sorted(set(nodes)) == list(range(num_nodes))
    assert all(after - before in (0, 1) for before, after in pairwise(nodes))

    def most(ends: list[int]) -> int:
        return max(sum(degrees[begin:end]) for begin, end in pairwise(ends))

    ends = [0, *(i for i in range(1, len(nodes)) if nodes[i] != nodes[i - 1]), len(nodes)]
    cuts = combinations(range(1, len(degrees)), num_nodes - 1)
    assert most(ends) == min(most([0, *cut, len(degrees)]) for cut in cuts)


COSTS = StageCosts((1.0,) * 12)
SHAPE = NodeShape([(0, 3), (3, 6), (6, 9), (9, 12)], [1, 2, 1, 1], ["local", "local", "b", "c"])


def repartition(
    survivors: list[str],
    limits: dict[str, float],
    costs: list[StageCosts] | None = None,
    stage_limits: list[float] | None = None,
) -> NodeShape | None:
    memory = NodeMemory(COSTS, limits, stage_limits or [])
    return repartition_layers(SHAPE, survivors, costs or [COSTS] * 4, memory)


def test_the_stages_that_are_left_get_all_layers() -> None:
    shape = repartition(["local", "c"], {})
    assert shape == NodeShape([(0, 4), (4, 8), (8, 12)], [1, 2, 1], ["local", "local", "c"])
    slow = [COSTS, COSTS.scale(2.0), COSTS, COSTS]
    shape = repartition(["local", "c"], {}, slow)
    assert shape is not None
    assert shape.layers == [(0, 5), (5, 7), (7, 12)]


@pytest.mark.parametrize(
    ("limits", "sizes"),
    [
        ({"local": 12.0, "c": 12.0}, [4, 4, 4]),
        ({"local": 7.0}, [3, 4, 5]),
        ({"local": 2.0}, [1, 1, 10]),
        ({"c": 1.0}, [5, 6, 1]),
        ({"local": 5.0, "c": 6.0}, None),
        ({"local": 1.0}, None),
    ],
)
def test_memory_of_the_nodes_limits_the_layers(
    limits: dict[str, float], sizes: list[int] | None
) -> None:
    shape = repartition(["local", "c"], limits)
    if sizes is None:
        assert shape is None
        return
    assert shape is not None
    own = [end - begin for begin, end in shape.layers]
    assert own[2] == sizes[2]
    assert sum(own) == 12


def test_own_memory_of_the_stages_limits_the_layers() -> None:
    limits = [2.0, math.inf, 99.0, 3.0]
    shape = repartition(["local", "c"], {}, stage_limits=limits)
    assert shape is not None
    assert shape.layers == [(0, 2), (2, 9), (9, 12)]
    assert repartition(["local", "c"], {}, stage_limits=[2.0, 2.0, 99.0, 3.0]) is None


@pytest.mark.parametrize(
    ("counts", "limits", "stage_limits", "fits"),
    [
        ([3, 9], {}, [], True),
        ([3, 9], {"b": 9.0}, [3.0, 9.0], True),
        ([3, 9], {"b": 8.0}, [], False),
        ([3, 9], {}, [2.0, math.inf], False),
        ([3, 4, 5], {}, [], False),
    ],
)
def test_given_numbers_of_layers_fit_or_not(
    counts: list[int], limits: dict[str, float], stage_limits: list[float], fits: bool
) -> None:
    shape = NodeShape([(0, 6), (6, 12)], [1, 2], ["local", "b"])
    memory = NodeMemory(StageCosts((1.0,) * 12), limits, stage_limits)
    expected = NodeShape([(0, 3), (3, 12)], [1, 2], ["local", "b"])
    assert fit_layers(shape, counts, memory) == (expected if fits else None)


def test_without_the_first_stage_nothing_is_left() -> None:
    assert repartition(["b", "c"], {}) is None
    assert repartition([], {}) is None


@settings(max_examples=num_examples(200, 3000), deadline=None)
@given(
    owners=st.lists(st.integers(0, 3), min_size=1, max_size=5),
    lost=st.integers(1, 3),
    layers=st.lists(st.integers(1, 5), min_size=5, max_size=9),
    limits=st.lists(st.integers(1, 30), min_size=4, max_size=4),
)
@example(owners=[0, 1, 1, 3], lost=2, layers=[1, 1, 1, 3, 1], limits=[3, 3, 1, 4])
def test_recuts_fit_whenever_a_cut_exists(
    owners: list[int], lost: int, layers: list[int], limits: list[int]
) -> None:
    """Compare with all cuts of the layers over the stages that are left."""
    nodes = [f"node-{owner}" for owner in sorted(owners)]
    survivors = [node for node in dict.fromkeys(nodes) if node != f"node-{lost}"]
    kept = [node for node in nodes if node in survivors]
    num_layers = len(layers)
    bounds = [(0, num_layers)] * len(nodes)
    costs = StageCosts(tuple(map(float, layers)))
    node_limits = {f"node-{i}": float(limit) for i, limit in enumerate(limits)}
    degrees = [1] * len(nodes)
    before, memory = NodeShape(bounds, degrees, nodes), NodeMemory(costs, node_limits)
    shape = repartition_layers(before, survivors, [costs] * len(nodes), memory)

    def fits(ends: list[int]) -> bool:
        used = dict.fromkeys(kept, 0)
        for node, (begin, end) in zip(kept, pairwise(ends), strict=True):
            used[node] += sum(layers[begin:end])
        return all(used[node] <= node_limits[node] for node in used)

    cuts = combinations(range(1, num_layers), len(kept) - 1) if kept else iter(())
    possible = [ends for cut in cuts if fits(ends := [0, *cut, num_layers])]
    if not kept or kept[0] != nodes[0] or not possible:
        assert shape is None
        return
    assert shape is not None, "a cut exists"
    assert shape.nodes == kept
    ends = [0, *(end for _, end in shape.layers)]
    assert fits(ends)
    best = min(
        slowest_cost([costs] * len(kept), [range(b, e) for b, e in pairwise(ends)])
        for ends in possible
    )
    own = slowest_cost([costs] * len(kept), [range(b, e) for b, e in shape.layers])
    assert own <= 2.5 * best
