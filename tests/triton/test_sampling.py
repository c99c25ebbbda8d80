"""Draws without sorting are those of the reference, to the token."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.kernels.random_numbers import random_uniform
from gllm.kernels.sampling import sample as reference
from gllm.kernels.triton.sampling import sample
from tests.kernels.test_sampling import TINY, plan_of
from tests.support.examples import num_examples

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")
"""Numbers of the interpreter are numpy's; distances may be infinite, integers wrap."""
TILE = 64
"""Small, so that few tokens are several tiles."""


def check(logits: torch.Tensor, rows: list[dict[str, Any]]) -> list[int]:
    """Both draw the same; the tokens."""
    plan = plan_of(rows)
    wanted = reference(logits.clone(), plan).tolist()
    kept = logits.clone()
    assert sample(logits, plan, TILE).tolist() == wanted
    assert torch.equal(logits, kept)
    return wanted


row = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_k": st.sampled_from([0, 0, 1, 4, 50, 1000]),
        "top_p": st.sampled_from([1.0, 1.0, 0.2, 0.9, 0.999]),
        "min_p": st.sampled_from([0.0, 0.0, 0.1, 1.0]),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "choice": st.integers(0, 3),
        "index": st.integers(0, 10_000),
    }
)


@settings(max_examples=num_examples(3, 30), deadline=None, derandomize=True)
@given(
    st.lists(row, min_size=1, max_size=3),
    st.sampled_from([1, 7, 64, 65, 150]),
    st.sampled_from([0.0, 2.0]),
    st.integers(0, 1000),
)
def test_any_rows(rows: list[dict[str, Any]], size: int, step: float, seed: int) -> None:
    """With many equal logits, or next to none; some tokens forbidden."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), size, generator=generator) * 3
    if step:
        logits = (logits / step).round() * step
    logits[:, 1::5] = -math.inf
    check(logits, rows)


@pytest.mark.parametrize(
    "row",
    [
        {"top_k": 5},
        pytest.param({"top_p": 0.37}, marks=pytest.mark.full),
        pytest.param({"top_p": 0.5}, marks=pytest.mark.full),
        {"top_k": 40, "top_p": 0.55, "min_p": 0.5},
    ],
    ids=str,
)
def test_equals_are_kept_by_their_ids(row: dict[str, Any]) -> None:
    """All logits are equal, so the filters cut among equals, and a number picks by its share."""
    size = 100
    rows = [row | {"seed": seed} for seed in range(3)]
    tokens = check(torch.full((3, size), 4.5), rows)
    kept = row.get("top_k", size)
    kept = math.ceil(kept * torch.tensor(row.get("top_p", 1.0)).item())
    numbers = random_uniform(torch.arange(3), torch.zeros(3).long(), torch.zeros(3).long())
    assert tokens == (numbers * kept).long().tolist()


def test_numbers_are_the_reference_s() -> None:
    """To a thousandth, for counters of any sign."""
    seeds = [-(2**63), -1, 0, 1, 2**63 - 1]
    rows = [{"seed": seed, "choice": 5, "index": 2**40} for seed in seeds]
    assert len(set(check(torch.zeros(5, 1000), rows))) == 5


def test_the_likeliest_is_the_first_of_equals() -> None:
    logits = torch.zeros(4, 130)
    logits[0, [100, 129]] = 1
    logits[1] = -5
    logits[2, 129] = 1
    logits[3, [3, 67, 68]] = 1e30
    assert check(logits, [{"temperature": 0.0}] * 4) == [100, 0, 129, 3]
    assert check(logits[2:3], [{"temperature": 1e-30}]) == [129]


def test_far_tails() -> None:
    """A nucleus beyond every cut-off, weights that vanish, distances beyond all floats."""
    logits = torch.zeros(3, 150)
    logits[0] = -torch.arange(150) / 5
    logits[1] = -torch.arange(150) * 2.0
    logits[2, 0], logits[2, 1:] = 3e38, -3e38
    rows = [{"top_p": 1 - 2**-24, "index": index} for index in range(3)]
    check(logits, rows)
    check(logits, [{"top_k": 149, "temperature": 0.1}] * 3)


def test_a_row_of_a_wider_tensor_and_no_row() -> None:
    logits = torch.randn(4, 90, generator=torch.Generator().manual_seed(2))
    rows = [{"seed": 3, "top_k": 20}, {}]
    wanted = reference(logits[::2, :77].clone(), plan_of(rows)).tolist()
    assert sample(logits[::2, :77], plan_of(rows), TILE).tolist() == wanted
    assert sample(logits[:0], plan_of([]), TILE).tolist() == []


@pytest.mark.parametrize("rows", [TINY[::4], pytest.param(TINY, marks=pytest.mark.full)], ids=len)
def test_tiny_settings_keep_the_best_token(rows: list[dict[str, Any]]) -> None:
    logits = torch.randn(len(rows), 150, generator=torch.Generator().manual_seed(8))
    # As a grammar forbids tokens, the first one among them.
    logits[:, ::2] = -math.inf
    assert check(logits, rows) == logits.argmax(dim=-1).tolist()
