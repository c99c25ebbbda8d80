"""Gated activations of the room for GPUs against torch's, interpreted.

The interpreter cuts bfloat16 off where GPUs round: results are a step away, not half of one.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.kernels.activation import ACTIVATIONS, SWIGLU_OAI, apply_gate
from gllm.kernels.triton.activation import KINDS, act_and_mul
from gllm.kernels.triton.tiles import choose_tiles
from tests.support.examples import num_examples

# What is beyond float32 is infinite, as meant; NumPy would have it said.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

BLOCK = choose_tiles("activation")["elements"]
STEP = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}


def test_every_activation_has_a_kernel() -> None:
    assert {*KINDS} == {*ACTIVATIONS, SWIGLU_OAI}
    with pytest.raises(ValueError, match="no kernel for the activation 'swish'"):
        act_and_mul("swish", torch.ones(1, 2))


@settings(max_examples=num_examples(20, 600), deadline=None)
@given(
    st.sampled_from([*STEP]),
    st.sampled_from(KINDS),
    st.integers(0, 5),
    st.one_of(st.integers(1, 70), st.integers(BLOCK - 1, BLOCK + 1)),
    st.integers(0, 99),
)
def test_gates(dtype: torch.dtype, kind: str, tokens: int, size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    both = (4 * torch.randn(tokens, 2 * size, generator=generator)).to(dtype)
    first, second = both.to(torch.float64).chunk(2, dim=-1)
    actual = act_and_mul(kind, both)
    assert actual.dtype == dtype
    wanted = apply_gate(kind, first, second)
    step = STEP[dtype]
    torch.testing.assert_close(actual.to(torch.float64), wanted, rtol=step, atol=4e-6)


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_far_numbers_saturate(kind: str) -> None:
    gates = torch.tensor([[-1e4, -50.0, 0.0, 50.0, 1e4, torch.nan]])
    actual = act_and_mul(kind, torch.cat((gates, torch.ones(1, 6)), dim=1))
    wanted = torch.tensor([[0.0, 0.0, 0.0, 50.0, 1e4, torch.nan]]) ** (2 if kind == "relu2" else 1)
    torch.testing.assert_close(actual, wanted, equal_nan=True, rtol=1e-6, atol=1e-6)


def test_rows_may_be_apart() -> None:
    wide = torch.randn(6, 40, generator=torch.Generator().manual_seed(0))
    for both in (wide[::2, :20], wide[:, 5:25], wide.t()[:20]):
        assert torch.equal(act_and_mul("silu", both), act_and_mul("silu", both.contiguous()))
