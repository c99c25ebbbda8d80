"""Cuts of layers: the slowest stage is as fast as possible, none is empty, all fit the memory."""

import math
from collections.abc import Sequence
from itertools import combinations, pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.models.config_reader import ConfigReader
from gllm.models.families.llama import build_spec
from gllm.models.spec.model import ModelSpec
from gllm.models.split import layer_costs, split_layers
from gllm.recovery.partition import StageCosts, StageMemory, partition_layers, slowest_cost
from tests.support.examples import num_examples


def model(layers: int, vocab: int = 1000, hidden: int = 64) -> ModelSpec:
    config = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": 4 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
    }
    return build_spec(ConfigReader(config))


WHOLE = st.integers(0, 30).map(float)
"""Whole numbers, whose sums do not depend on the order."""


@st.composite
def stage_costs(draw: st.DrawFn, num_layers: int) -> StageCosts:
    layers = draw(st.lists(WHOLE, min_size=num_layers, max_size=num_layers))
    costs = StageCosts(tuple(layers), draw(WHOLE), draw(WHOLE), draw(WHOLE))
    return costs.scale(draw(st.sampled_from([1.0, 1.0, 2.0, 5.0])))


def all_cuts(num_layers: int, stages: int) -> list[list[range]]:
    """All cuts into contiguous non-empty parts."""
    ends = combinations(range(1, num_layers), stages - 1)
    return [[range(a, b) for a, b in pairwise((0, *end, num_layers))] for end in ends]


def brute_force(
    costs: Sequence[StageCosts], memory: Sequence[StageMemory] | None
) -> tuple[float, float]:
    """Largest cost and sum of squares of the best cut."""

    def value(cut: list[range]) -> tuple[float, float]:
        parts = [cost.cost_of(p.start, p.stop) for cost, p in zip(costs, cut, strict=True)]
        for each, part in zip(memory or (), cut, strict=False):
            if each.needs.cost_of(part.start, part.stop) > each.limit_bytes:
                return math.inf, math.inf
        return max(parts), sum(part**2 for part in parts)

    cuts = all_cuts(len(costs[0].layers), len(costs))
    return min(map(value, cuts), default=(math.inf, math.inf))


@settings(max_examples=num_examples(50, 500))
@given(st.data(), st.integers(1, 8), st.integers(1, 6), st.booleans())
def test_no_cut_is_better(
    data: st.DataObject, num_layers: int, stages: int, has_limits: bool
) -> None:
    costs = [data.draw(stage_costs(num_layers)) for _ in range(stages)]
    memory = None
    if has_limits:
        limit = st.sampled_from([30.0, 60.0, 100.0, 200.0, math.inf])
        memory = [StageMemory(data.draw(stage_costs(num_layers)), data.draw(limit)) for _ in costs]
    best = brute_force(costs, memory)
    if math.isinf(best[0]):
        with pytest.raises(ValueError, match="there is no cut"):
            partition_layers(costs, memory)
        return
    cut = partition_layers(costs, memory)
    assert [part.start for part in cut] == [0, *(part.stop for part in cut[:-1])]
    assert cut[-1].stop == num_layers
    assert all(cut)
    parts = [cost.cost_of(part.start, part.stop) for cost, part in zip(costs, cut, strict=True)]
    assert (max(parts), sum(part**2 for part in parts)) == best
    assert slowest_cost(costs, cut) == best[0]
    for each, part in zip(memory or (), cut, strict=False):
        assert each.needs.cost_of(part.start, part.stop) <= each.limit_bytes


@pytest.mark.parametrize(
    "seed", [*range(5), *(pytest.param(seed, marks=pytest.mark.full) for seed in range(5, 20))]
)
def test_no_cut_of_large_models_over_four_nodes_is_better(seed: int) -> None:
    """200 cases of up to 32 layers, compared with all cuts."""
    rng = Random(seed)
    for _ in range(10):
        stages = rng.randint(1, 4)
        num_layers = rng.randint(stages, 32)
        layers = tuple(float(rng.randint(1, 30)) for _ in range(num_layers))
        ends = float(rng.randint(0, 40)), float(rng.randint(0, 40))
        whole = StageCosts(layers, *ends)
        costs = [whole.scale(rng.choice([1.0, 2.0, 3.0, 5.0])) for _ in range(stages)]
        limits = [rng.choice([math.inf, 0.5, 0.7]) * whole.cost_of(0, num_layers) for _ in costs]
        memory = [StageMemory(whole, limit) for limit in limits]
        best = brute_force(costs, memory)
        if math.isinf(best[0]):
            with pytest.raises(ValueError, match="there is no cut"):
                partition_layers(costs, memory)
        else:
            assert slowest_cost(costs, partition_layers(costs, memory)) == best[0]


def test_a_stage_of_half_the_speed_gets_half_as_many_layers() -> None:
    costs = StageCosts((1.0,) * 24)
    assert partition_layers([costs, costs.scale(2.0)]) == [range(16), range(16, 24)]
    assert partition_layers([costs.scale(2.0), costs]) == [range(8), range(8, 24)]


def test_memory_outranks_speed() -> None:
    costs, needs = StageCosts((1.0,) * 12), StageCosts((10.0,) * 12, embedding=5.0, head=5.0)
    memory = [StageMemory(needs, 35.0), StageMemory(needs), StageMemory(needs, 45.0)]
    assert partition_layers([costs] * 3, memory) == [range(3), range(3, 8), range(8, 12)]
    with pytest.raises(ValueError, match="fits the stages' memory"):
        partition_layers([costs] * 2, memory[::2])


def test_28_layers_on_8_stages_leave_none_empty() -> None:
    counts = [len(layers) for layers in split_layers(model(28, vocab=1), 8)]
    assert sorted(counts) == [3, 3, 3, 3, 4, 4, 4, 4]


def test_lm_head_weighs_on_the_last_stage() -> None:
    """A vocabulary as heavy as six layers."""
    small = model(24)
    vocab = int(6 * layer_costs(small).layers[1] / small.hidden_size)
    counts = [len(layers) for layers in split_layers(model(24, vocab), 4)]
    # 30 layers' worth over 4 stages: 8 at most, and evenest as 7, 7, 8 and 2 beside the head.
    assert counts[-1] == 2
    assert sorted(counts[:-1]) == [7, 7, 8]


def test_stages_are_contiguous() -> None:
    assert split_layers(model(10), 3, (2, 3, 5)) == [range(2), range(2, 5), range(5, 10)]


@pytest.mark.parametrize("layers", [(5, 4), (10,), (4, 4, 2), (10, 0), (11, -1)])
def test_layers_that_do_not_fit_are_refused(layers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="layers"):
        split_layers(model(10), 2, layers)


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(ValueError, match="pipeline_parallel_size"):
        split_layers(model(3), 4)
