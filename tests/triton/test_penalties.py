"""Penalties by histories for GPUs against the reference, under Triton's interpreter."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

from gllm.kernels import penalties as reference
from gllm.kernels.triton import penalties
from tests.support.examples import num_examples
from tests.support.models.histories import laid_out

LARGEST = torch.finfo(torch.float32).max
VOCABULARY = 7
tokens = st.lists(st.integers(0, VOCABULARY - 1), max_size=9)
row = st.tuples(
    tokens,
    tokens,
    st.sampled_from([1.0, 0.4, 1.3]),
    st.sampled_from([0.0, -0.7, 1.9]),
    st.sampled_from([0.0, 1.1]),
)


TILE = 4
"""Small, so that few tokens are several tiles."""


@settings(max_examples=num_examples(5, 100), deadline=None, derandomize=True)
@given(st.lists(row, min_size=1, max_size=3), st.integers(1, 5), st.integers(0, 99))
def test_any_histories(rows: list[tuple], block_size: int, seed: int) -> None:
    """To the bit, on rows of a wider tensor; rows without a history stay as they are."""
    prompts, outputs, *columns = (list(column) for column in zip(*rows, strict=True))
    order = torch.randperm(len(rows) + 1, generator=torch.Generator().manual_seed(seed))
    made = [[1, *prompt] for prompt in prompts]
    table, histories = laid_out(order[:-1].tolist(), made, outputs, block_size, seed)
    wide = torch.randn(len(rows) + 1, VOCABULARY + 3, generator=torch.Generator().manual_seed(seed))
    wide[0, ::3] = -math.inf
    expected = wide.clone()
    given_settings = torch.tensor(columns, dtype=torch.float64)
    logits = expected[:, :VOCABULARY]
    reference.apply_history_penalties(logits, table, histories, given_settings)
    penalties.apply_history_penalties(wide[:, :VOCABULARY], table, histories, given_settings, TILE)
    assert torch.equal(wide, expected)


@pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
@pytest.mark.parametrize("repetition", [5e-324, 1e40])
def test_extreme_penalties_keep_finite_logits_finite(repetition: float) -> None:
    logits = torch.tensor([[0.0, -0.0, 3.0, -3.0, LARGEST, -LARGEST, -math.inf]])
    table, histories = laid_out([0], [list(range(7))], [[]], 4, 0)
    settings = torch.tensor([[repetition], [0.0], [0.0]], dtype=torch.float64)
    penalties.apply_history_penalties(logits, table, histories, settings, TILE)
    assert logits[0, :6].isfinite().all()
    assert logits[0, 6] == -math.inf


def test_what_is_no_token_of_the_vocabulary_is_left_out() -> None:
    """A prompt of a model whose embedding is larger than its head, say."""
    logits = torch.zeros(2, 3)
    table, histories = laid_out([0], [[9]], [[1, 9, 1]], 2, 0)
    settings = torch.tensor([[1.5], [0.5], [0.25]], dtype=torch.float64)
    penalties.apply_history_penalties(logits, table, histories, settings, TILE)
    assert logits.tolist() == [[0, -1.25, 0], [0, 0, 0]]
