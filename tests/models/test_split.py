"""How layers are cut: the least worst stage, no empty one."""

from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.models.config_reader import ConfigReader
from gllm.models.families.llama import build_spec
from gllm.models.spec import ModelSpec
from gllm.models.split import balance_costs, layer_costs, split_layers


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


@given(
    st.lists(st.integers(1, 30).map(float), min_size=1, max_size=9),
    st.integers(1, 9),
)
def test_no_cut_is_better(costs: list[float], stages: int) -> None:
    stages = min(stages, len(costs))

    def value(ends: tuple[int, ...]) -> tuple[float, float]:
        bounds = (0, *ends, len(costs))
        parts = [sum(costs[a:b]) for a, b in pairwise(bounds)]
        return max(parts), sum(part**2 for part in parts)

    found = balance_costs(costs, stages)
    assert sum(found) == len(costs)
    assert min(found) >= 1
    ends = tuple(sum(found[: i + 1]) for i in range(stages - 1))
    assert value(ends) == min(map(value, combinations(range(1, len(costs)), stages - 1)))


def test_28_layers_on_8_stages_leave_none_empty() -> None:
    counts = [len(layers) for layers in split_layers(model(28, vocab=1), 8)]
    assert sorted(counts) == [3, 3, 3, 3, 4, 4, 4, 4]


def test_lm_head_weighs_on_the_last_stage() -> None:
    """A vocabulary as heavy as six layers."""
    small = model(24)
    vocab = int(6 * layer_costs(small)[1] / small.hidden_size)
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
