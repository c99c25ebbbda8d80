"""Experts of the room for GPUs against the reference, interpreted.

The interpreter cuts bfloat16 off where GPUs round, always towards zero.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gllm.kernels.experts import StackedExperts, run_stacked
from gllm.kernels.triton import experts as gpu
from gllm.kernels.triton.activation import KINDS

# What is beyond float32 is infinite, as meant; NumPy would have it said.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")


def made(seed: int, tokens: int, sizes: tuple[int, int, int, int]) -> tuple[Tensor, ...]:
    """x, experts, weights, up and down of (experts, picked, hidden, inner)."""
    count, picked, hidden, inner = sizes
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(tokens, hidden, generator=generator)
    weights, experts = torch.rand(tokens, count, generator=generator).topk(picked, dim=-1)
    up = torch.randn(count, 2 * inner, hidden, generator=generator)
    return x, experts, weights, up, torch.randn(count, hidden, inner, generator=generator)


def close(actual: Tensor, wanted: Tensor, step: float) -> None:
    assert actual.dtype == wanted.dtype
    assert actual.shape == wanted.shape
    limit = step * max(wanted.abs().max().item(), 1.0) if len(wanted) else 0.0
    assert (actual.double() - wanted.double()).abs().le(limit).all()


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, 99),
    st.integers(0, 9),
    st.sampled_from([(5, 2, 6, 4), (3, 3, 70, 9), (1, 1, 16, 66), (9, 4, 130, 32)]),
    st.sampled_from(KINDS),
    st.sampled_from([(torch.float32, 1e-5), (torch.float16, 2**-9), (torch.bfloat16, 2**-4)]),
)
def test_matches_the_reference(
    seed: int,
    tokens: int,
    sizes: tuple[int, int, int, int],
    activation: str,
    kind: tuple[torch.dtype, float],
) -> None:
    dtype, step = kind
    x, experts, weights, up, down = made(seed, tokens, sizes)
    x, up, down = (tensor.to(dtype) for tensor in (x, up / 4, down / 4))
    wanted = run_stacked(x, experts, weights, StackedExperts(up, down, activation))
    close(gpu.run_experts(x, experts, weights, up, down, activation), wanted, step)


@pytest.mark.parametrize("loads", [(130, 0, 1), (0, 0, 64), (65, 64, 63)])
def test_any_number_of_tokens_goes_to_an_expert(loads: tuple[int, int, int]) -> None:
    """None, one, a block, and blocks and one."""
    tokens = sum(loads)
    x, _, weights, up, down = made(0, tokens, (3, 1, 4, 3))
    experts = torch.repeat_interleave(torch.arange(3), torch.tensor(loads))[:, None]
    experts = experts[torch.randperm(tokens, generator=torch.Generator().manual_seed(1))]
    wanted = run_stacked(x, experts, weights, StackedExperts(up, down, "silu"))
    close(gpu.run_experts(x, experts, weights, up, down, "silu"), wanted, 1e-5)


def test_a_token_does_not_depend_on_its_batch() -> None:
    """Nor on the order in which its experts were picked; and not by a bit."""
    x, experts, weights, up, down = made(3, 70, (4, 3, 6, 4))
    whole = gpu.run_experts(x, experts, weights, up, down, "silu")
    rows = torch.tensor([41, 3, 69])
    others = x.clone()
    others[torch.tensor([0, 40, 42])] = math.nan
    spoiled = gpu.run_experts(others, experts, weights, up, down, "silu")
    assert torch.equal(spoiled[rows], whole[rows])
    assert spoiled[[0, 40, 42]].isnan().all()
    turned = experts[rows].flip(1), weights[rows].flip(1)
    assert torch.equal(gpu.run_experts(x[rows], *turned, up, down, "silu"), whole[rows])


def test_rows_may_be_apart() -> None:
    x, experts, weights, up, down = made(4, 5, (3, 2, 6, 4))
    wanted = gpu.run_experts(x, experts, weights, up, down, "relu")
    wide = torch.full((5, 9), math.nan)
    wide[:, 2:8] = x
    assert torch.equal(gpu.run_experts(wide[:, 2:8], experts, weights, up, down, "relu"), wanted)
    across = x.t().contiguous().t(), experts.t().contiguous().t(), weights.t().contiguous().t()
    assert torch.equal(gpu.run_experts(*across, up, down, "relu"), wanted)


def test_an_activation_without_a_kernel_is_refused() -> None:
    with pytest.raises(ValueError, match="no kernel for the activation 'swish'"):
        gpu.run_experts(*made(0, 1, (1, 1, 2, 2)), "swish")
