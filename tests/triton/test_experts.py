"""Experts of the room for GPUs against the reference, interpreted.

The interpreter cuts bfloat16 off where GPUs round, always towards zero.
"""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gllm.kernels.experts import StackedExperts, run_stacked, stack_experts
from gllm.kernels.fp8_weights import Fp8Matrix, Fp8Stack
from gllm.kernels.triton import experts as gpu
from gllm.kernels.triton.activation import KINDS
from tests.kernels.test_linear_fp8 import quantized
from tests.support.examples import num_examples

# What is beyond float32 is infinite, as meant, and NaN is kept; NumPy would have it said.
pytestmark = [
    pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]


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


@settings(max_examples=num_examples(5, 60), deadline=None)
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
    biases = torch.randn(len(up), up.shape[1]).to(dtype), torch.randn(down.shape[:2]).to(dtype)
    for bias in ((None, None), biases):
        wanted = run_stacked(x, experts, weights, StackedExperts(up, down, activation, *bias))
        actual = gpu.run_experts(x, experts, weights, up, down, activation, biases=bias)
        close(actual, wanted, step)


@pytest.mark.parametrize(
    "loads",
    [
        (65, 0, 64),
        *(pytest.param(each, marks=pytest.mark.full) for each in ((130, 0, 1), (0, 0, 64))),
    ],
)
def test_any_number_of_tokens_goes_to_an_expert(loads: tuple[int, int, int]) -> None:
    """None, one, a block, and blocks and one."""
    tokens = sum(loads)
    x, _, weights, up, down = made(0, tokens, (3, 1, 4, 3))
    experts = torch.repeat_interleave(torch.arange(3), torch.tensor(loads))[:, None]
    experts = experts[torch.randperm(tokens, generator=torch.Generator().manual_seed(1))]
    wanted = run_stacked(x, experts, weights, StackedExperts(up, down, "silu"))
    close(gpu.run_experts(x, experts, weights, up, down, "silu"), wanted, 1e-5)


@pytest.mark.usefixtures("ordered_products")
def test_a_token_does_not_depend_on_its_batch() -> None:
    """Nor on the order in which its experts were picked; and not by a bit."""
    x, experts, weights, up, down = made(3, 26, (4, 3, 6, 4))
    whole = gpu.run_experts(x, experts, weights, up, down, "silu")
    rows = torch.tensor([21, 3, 25])
    others = x.clone()
    others[torch.tensor([0, 20, 22])] = math.nan
    spoiled = gpu.run_experts(others, experts, weights, up, down, "silu")
    assert torch.equal(spoiled[rows], whole[rows])
    assert spoiled[[0, 20, 22]].isnan().all()
    turned = experts[rows].flip(1), weights[rows].flip(1)
    assert torch.equal(gpu.run_experts(x[rows], *turned, up, down, "silu"), whole[rows])


@pytest.mark.usefixtures("ordered_products")
def test_rows_may_be_apart() -> None:
    x, experts, weights, up, down = made(4, 5, (3, 2, 6, 4))
    wanted = gpu.run_experts(x, experts, weights, up, down, "relu")
    wide = torch.full((5, 9), math.nan)
    wide[:, 2:8] = x
    assert torch.equal(gpu.run_experts(wide[:, 2:8], experts, weights, up, down, "relu"), wanted)
    across = x.t().contiguous().t(), experts.t().contiguous().t(), weights.t().contiguous().t()
    assert torch.equal(gpu.run_experts(*across, up, down, "relu"), wanted)


def test_an_activation_without_a_kernel_is_refused() -> None:
    x, experts, weights, up, down = made(0, 1, (1, 1, 2, 2))
    with pytest.raises(ValueError, match="no kernel for the activation 'swish'"):
        gpu.run_experts(x, experts, weights, up, down, "swish")


def eights(
    sizes: tuple[int, int, int], block: tuple[int, int] | None, scales: int
) -> tuple[Fp8Stack, Fp8Stack]:
    """up and down of (experts, hidden, inner), with scales of blocks, or without blocks one or one
    for each output."""
    count, hidden, inner = sizes

    def part(outputs: int, inputs: int, seed: int) -> Fp8Matrix:
        return quantized(outputs, inputs, block, seed, scales if scales == 1 else outputs)

    up = stack_experts(
        count, ([part(inner, hidden, 2 * n), part(inner, hidden, n)] for n in range(count))
    )
    down = stack_experts(count, ([part(hidden, inner, 50 + n)] for n in range(count)))
    assert isinstance(up, Fp8Stack)
    assert isinstance(down, Fp8Stack)
    return up, down


@settings(max_examples=num_examples(3, 20), deadline=None, derandomize=True)
@given(
    st.integers(1, 9),
    st.sampled_from([(5, 2, 40, 24), (3, 3, 150, 70), (4, 2, 64, 140)]),
    st.sampled_from([((16, 32), 1), ((128, 128), 1), ((8, 64), 1), (None, 1), (None, 2)]),
    st.sampled_from([(torch.float32, 1e-4), (torch.float16, 2**-8), (torch.bfloat16, 2**-4)]),
    st.booleans(),
)
def test_weights_in_8_bit_floats(
    tokens: int,
    sizes: tuple[int, int, int, int],
    scales: tuple[tuple[int, int] | None, int],
    kind: tuple[torch.dtype, float],
    fp8: bool,
) -> None:
    """Against the reference, which makes floats of them; activations in 8 bits are off by a
    sixteenth each, sums of them by less."""
    up, down = eights((sizes[0], *sizes[2:]), *scales)
    dtype, step = kind
    x, experts, weights, *_ = made(tokens, tokens, sizes)
    x = (x / 4).to(dtype)
    biases = (
        torch.randn(sizes[0], 2 * sizes[3]).to(dtype),
        torch.randn(sizes[0], sizes[2]).to(dtype),
    )
    stacked = StackedExperts(up, down, "silu", *biases)
    wanted = run_stacked(x, experts, weights, stacked).double()
    actual = gpu.run_experts(x, experts, weights, up, down, "silu", fp8, biases)
    assert actual.dtype == dtype
    assert actual.isfinite().all()
    error = (actual.double() - wanted).norm() / wanted.norm()
    assert error < (0.08 if fp8 else step)


@pytest.mark.full
@pytest.mark.usefixtures("ordered_products")
@pytest.mark.parametrize("fp8", [False, True])
def test_a_token_in_8_bit_floats_does_not_depend_on_its_batch(fp8: bool) -> None:
    up, down = eights((4, 40, 24), (8, 32), 1)
    x, experts, weights, *_ = made(3, 8, (4, 3, 40, 24))
    whole = gpu.run_experts(x, experts, weights, up, down, "silu", fp8)
    rows = torch.tensor([4, 3, 7])
    others = x.clone()
    others[torch.tensor([0, 2, 5])] = math.nan
    spoiled = gpu.run_experts(others, experts, weights, up, down, "silu", fp8)
    assert torch.equal(spoiled[rows], whole[rows])
    assert spoiled[[0, 2, 5]].isnan().all()
    alone = gpu.run_experts(x[rows], experts[rows], weights[rows], up, down, "silu", fp8)
    assert torch.equal(alone, whole[rows])
