"""RMSNorm of the room for GPUs against its formula, interpreted.

The interpreter cuts bfloat16 off where GPUs round: results are a step away, not half of one.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gllm.kernels.triton.rms_norm import LONGEST, add_rms_norm, rms_norm
from tests.support.examples import num_examples

TYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
STEP = {torch.float32: 1e-6, torch.float16: 2**-10, torch.bfloat16: 2**-7}
"""Between neighbouring numbers, relatively."""


def random(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def wanted(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """In float64."""
    exact = x.to(torch.float64)
    return exact * (exact.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.to(torch.float64)


def close(actual: Tensor, exact: Tensor) -> None:
    step = STEP[actual.dtype]
    torch.testing.assert_close(actual.to(torch.float64), exact, rtol=step, atol=step / 8)


@settings(max_examples=num_examples(25, 300), deadline=None)
@given(TYPES, st.booleans(), st.integers(0, 40), st.integers(1, 600), st.integers(0, 99))
def test_norms(dtype: torch.dtype, wide: bool, rows: int, size: int, seed: int) -> None:
    x, weight = random(seed, dtype, rows, size), random(seed + 1, dtype, size)
    if wide:
        weight = random(seed + 1, torch.float32, size)
    before = x.clone()
    actual = rms_norm(x, weight, 1e-5)
    assert actual.dtype == dtype
    assert actual.shape == x.shape
    close(actual, wanted(x, weight, 1e-5))
    assert torch.equal(x, before)


@settings(max_examples=num_examples(25, 300), deadline=None)
@given(TYPES, st.booleans(), st.integers(0, 6), st.integers(1, 3000), st.integers(0, 99))
def test_norms_behind_a_sum(
    dtype: torch.dtype, wide: bool, rows: int, size: int, seed: int
) -> None:
    """The sum replaces the first operand, within a buffer that has room around it."""
    buffer = torch.full((rows + 2, size + 3), torch.nan, dtype=dtype)
    hidden = buffer[1 : rows + 1, :size]
    hidden.copy_(random(seed, dtype, rows, size))
    delta = random(seed + 1, dtype, rows, size)
    weight = random(seed + 2, torch.float32 if wide else dtype, size)
    summed = hidden.to(torch.float64) + delta.to(torch.float64)
    actual = add_rms_norm(hidden, delta, weight, 1e-6)
    close(hidden, summed)
    close(actual, wanted(hidden, weight, 1e-6))
    assert buffer[[0, -1]].isnan().all()
    assert buffer[:, size:].isnan().all()


@pytest.mark.parametrize("shape", [(), (1,), (2, 3)])
def test_leading_dimensions_are_kept(shape: tuple[int, ...]) -> None:
    x, weight = random(0, torch.float32, *shape, 8), random(1, torch.float32, 8)
    assert rms_norm(x, weight, 1e-6).shape == x.shape
    close(rms_norm(x, weight, 1e-6), wanted(x, weight, 1e-6))


def test_rows_and_elements_may_be_apart() -> None:
    wide, weight = random(0, torch.bfloat16, 12, 10), random(1, torch.bfloat16, 6)
    for x in (wide[:, :6], wide[::2, 3:9], wide.t()[:6].t()[:, :6], wide[:6].t()[:, :6]):
        close(rms_norm(x, weight, 1e-6), wanted(x, weight, 1e-6))
    hidden, delta = random(2, torch.float32, 6, 10), random(3, torch.float32, 10, 6)
    summed = hidden + delta.t()
    scale = random(4, torch.float32, 10)
    close(add_rms_norm(hidden, delta.t(), scale, 1e-6), wanted(summed, scale, 1e-6))
    assert torch.equal(hidden, summed)
    with pytest.raises(ValueError, match="gaps"):
        add_rms_norm(delta.t(), hidden, scale, 1e-6)


def test_the_longest_rows() -> None:
    x, weight = random(0, torch.bfloat16, 2, LONGEST), random(1, torch.bfloat16, LONGEST)
    close(rms_norm(x, weight, 1e-6), wanted(x, weight, 1e-6))
    with pytest.raises(ValueError, match=f"rows of {LONGEST + 1} are longer than {LONGEST}"):
        rms_norm(random(0, torch.float32, 1, LONGEST + 1), weight, 1e-6)


def test_a_row_hears_nothing_of_others() -> None:
    x, weight = random(0, torch.bfloat16, 5, 96), random(1, torch.bfloat16, 96)
    alone = rms_norm(x[3:4], weight, 1e-6)
    x[2] = torch.nan
    together = rms_norm(x, weight, 1e-6)
    assert torch.equal(together[3:4], alone)
    assert together[2].isnan().all()
