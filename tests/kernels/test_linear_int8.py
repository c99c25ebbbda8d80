"""8-bit linear maps in every way, bit for bit against the definition written plainly with numpy."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gllm.kernels.linear_int8 import (
    MAX_INPUTS,
    Int8Matrix,
    linear_int8,
    prepare_int8,
    quantize_rows,
    row_magnitudes,
)
from gllm.kernels.native.library import DTYPES
from gllm.kernels.threads import set_num_threads
from tests.support.examples import num_examples
from tests.support.models.kernel_builds import covers_builds

TYPES = st.sampled_from([*DTYPES])
SIZES = st.one_of(st.integers(1, 20), st.integers(60, 70), st.integers(120, 300))


def random(seed: int, dtype: torch.dtype, *shape: int, spread: float = 1.0) -> Tensor:
    """Numbers whose rows differ in size by powers of two."""
    generator = torch.Generator().manual_seed(seed)
    sizes = 2.0 ** torch.randint(-6, 6, (shape[0],), generator=generator)
    numbers = torch.randn(*shape, generator=generator)
    return (numbers * spread * sizes.view(-1, *[1] * (len(shape) - 1))).to(dtype)


def quantized(x: Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Integers [rows, size] and scales [rows] float32 of x [rows, size]."""
    numbers = x.to(torch.float32).numpy()
    most = np.abs(numbers).max(axis=1)
    inverse = (np.float32(127) / np.maximum(most, np.float32(2.0**-120)))[:, None]
    whole = np.where(most[:, None] < 2.0**-120, 0, np.rint(numbers * inverse))
    return whole.astype(np.int64), most / np.float32(127)


def wanted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Result of the definition for finite numbers."""
    rows, row_scales = quantized(x)
    columns, column_scales = quantized(weight)
    result = (rows @ columns.T).astype(np.float32) * (row_scales[:, None] * column_scales)
    if bias is not None:
        result = result + bias.to(torch.float32).numpy()
    return torch.from_numpy(result).to(x.dtype)


def same_bits(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == expected.dtype
    assert torch.equal(actual, expected)


@settings(max_examples=num_examples(25, 1000), deadline=None)
@given(TYPES, st.integers(1, 9), SIZES, st.integers(0, 99))
def test_rows_become_codes(way: str, dtype: torch.dtype, rows: int, size: int, seed: int) -> None:
    x = random(seed, dtype, rows, size)
    made = quantize_rows(x)
    whole, scales = quantized(x)
    assert made.codes.shape == (rows, -(-size // 4) * 4)
    assert np.array_equal(made.codes[:, :size].numpy().astype(np.int64) - 128, whole)
    assert (made.codes[:, size:] == 128).all()
    assert np.array_equal(made.scales.numpy(), scales)


@settings(max_examples=num_examples(30, 1000), deadline=None)
@given(TYPES, st.integers(1, 14), SIZES, SIZES, st.booleans(), st.integers(0, 99))
def test_products_are_exact(
    way: str, dtype: torch.dtype, rows: int, inputs: int, outputs: int, biased: bool, seed: int
) -> None:
    x, weight = random(seed, dtype, rows, inputs), random(seed + 1, dtype, outputs, inputs)
    bias = random(seed + 2, dtype, outputs) if biased else None
    same_bits(linear_int8(x, prepare_int8(weight), bias), wanted(x, weight, bias))


@pytest.mark.parametrize("inputs", [4864, MAX_INPUTS])
def test_the_largest_sums_are_exact(way: str, inputs: int) -> None:
    """All codes at their ends: nothing saturates, nothing overflows."""
    signs = torch.randint(0, 2, (3, inputs), generator=torch.Generator().manual_seed(1)) * 2.0 - 1
    x, weight = torch.cat((signs, torch.ones(1, inputs))), torch.cat((torch.ones(2, inputs), signs))
    same_bits(linear_int8(x, prepare_int8(weight), None), wanted(x, weight, None))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_batch(way: str, dtype: torch.dtype) -> None:
    x, matrix = random(0, dtype, 64, 72), prepare_int8(random(1, dtype, 200, 72))
    whole = linear_int8(x, matrix, None)
    for rows in range(1, 65):
        same_bits(linear_int8(x[-rows:], matrix, None), whole[-rows:])


def test_many_rows_and_threads(way: str) -> None:
    """More rows than a task has, over two threads."""
    x, weight = random(0, torch.bfloat16, 401, 20), random(1, torch.bfloat16, 130, 20)
    set_num_threads(2)
    try:
        actual = linear_int8(x, prepare_int8(weight), None)
    finally:
        set_num_threads(1)
    same_bits(actual, wanted(x, weight, None))


@covers_builds(dtype=[*DTYPES], bad=[torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_in_its_row(way: str, dtype: torch.dtype, bad: float) -> None:
    x, weight = random(0, dtype, 8, 70), random(1, dtype, 70, 70)
    matrix = prepare_int8(weight)
    good = linear_int8(x, matrix, None)
    for column in (0, 69):
        broken = x.clone()
        broken[3, column] = bad
        result = linear_int8(broken, matrix, None)
        assert result[3].isnan().all()
        others = [0, 1, 2, 4, 5, 6, 7]
        same_bits(result[others], good[others])


def test_a_weight_that_is_not_finite_shows(way: str) -> None:
    weight = random(1, torch.float32, 70, 9)
    weight[66, 2] = torch.nan
    result = linear_int8(random(0, torch.float32, 3, 9), prepare_int8(weight), None)
    assert result[:, 66].isnan().all()
    assert result[:, :66].isfinite().all()


def test_rows_of_zeros_and_of_extreme_numbers(way: str) -> None:
    weight, bias = random(1, torch.float32, 5, 18, spread=1e-4), torch.ones(5)
    for size in (0.0, 1e-45, 1e-38, 7.5e-37, 7.6e-37, 1e-20, 3.4e38):
        x = size * torch.tensor([[1.0, -0.5, 0.25] * 6, [0.0, 1.0, 0.0] * 6])
        result = linear_int8(x, prepare_int8(weight), bias)
        same_bits(result, wanted(x, weight, bias))
        if size < 1e-19:
            assert (result == 1).all()


def test_no_rows(way: str) -> None:
    matrix = prepare_int8(random(0, torch.float32, 7, 9))
    assert linear_int8(torch.empty(0, 9), matrix, None).shape == (0, 7)


def test_rows_that_are_not_contiguous(way: str) -> None:
    x, weight = random(0, torch.float32, 6, 40), random(1, torch.float32, 12, 20)
    matrix = prepare_int8(weight)
    same_bits(linear_int8(x[:, ::2], matrix, None), wanted(x[:, ::2], weight, None))


def test_close_to_the_unquantized_product(way: str) -> None:
    """Each factor is off by at most half a code: 1 / 254 of its row's largest."""
    x, weight = random(0, torch.float32, 5, 300), random(1, torch.float32, 80, 300)
    exact = x.to(torch.float64) @ weight.to(torch.float64).t()
    x_step = x.abs().amax(dim=1, keepdim=True).to(torch.float64) / 254
    weight_step = weight.abs().amax(dim=1).to(torch.float64) / 254
    sizes = x_step * weight.abs().sum(dim=1) + x.abs().sum(dim=1, keepdim=True) * weight_step
    limit = 1.001 * (sizes + 300 * x_step * weight_step)
    actual = linear_int8(x, prepare_int8(weight), None)
    assert ((actual - exact).abs() <= limit).all()


def test_more_inputs_than_sums_have_room_for_are_refused() -> None:
    prepare_int8(torch.zeros(1, MAX_INPUTS))
    with pytest.raises(ValueError, match=f"{MAX_INPUTS + 1} inputs.*quantization"):
        prepare_int8(torch.zeros(1, MAX_INPUTS + 1))


def test_a_matrix_takes_a_byte_for_a_weight() -> None:
    matrix = prepare_int8(random(0, torch.bfloat16, 640, 320))
    assert isinstance(matrix, Int8Matrix)
    assert 640 * 320 <= matrix.nbytes <= 640 * 320 * 1.05


@settings(max_examples=num_examples(25, 1000), deadline=None)
@given(TYPES, st.integers(1, 9), SIZES, st.data())
def test_parts_of_rows_have_the_codes_of_whole_rows(
    way: str, dtype: torch.dtype, rows: int, size: int, data: st.DataObject
) -> None:
    x = random(data.draw(st.integers(0, 99)), dtype, rows, size)
    cut = data.draw(st.integers(0, size - 1))
    whole, magnitudes = quantize_rows(x), row_magnitudes(x)
    parts = [part for part in (x[:, :cut], x[:, cut:]) if part.shape[1]]
    same_bits(torch.stack([row_magnitudes(part) for part in parts]).amax(dim=0), magnitudes)
    made = [quantize_rows(part, magnitudes) for part in parts]
    codes = [part.codes[:, : own.shape[1]] for part, own in zip(made, parts, strict=True)]
    assert torch.equal(torch.cat(codes, dim=1), whole.codes[:, :size])
    assert all(torch.equal(part.scales, whole.scales) for part in made)


@settings(max_examples=num_examples(25, 1000), deadline=None)
@given(TYPES, st.integers(1, 14), st.integers(2, 150), st.integers(1, 70), st.integers(0, 99))
def test_products_of_parts_add_up(
    way: str, dtype: torch.dtype, rows: int, inputs: int, outputs: int, seed: int
) -> None:
    """Sums of integers are exact: only their scaled values are rounded, once per part."""
    x, weight = random(seed, dtype, rows, inputs), random(seed + 1, dtype, outputs, inputs)
    magnitudes, row_scales = row_magnitudes(x), row_magnitudes(weight)
    total = torch.zeros(rows, outputs)
    for part in (slice(0, inputs // 3 + 1), slice(inputs // 3 + 1, inputs)):
        if part.start < part.stop:
            matrix = prepare_int8(weight[:, part], row_scales)
            out = torch.empty(rows, outputs)
            total += linear_int8(x[:, part], matrix, None, out, magnitudes)
    expected = linear_int8(x, prepare_int8(weight), None, torch.empty(rows, outputs))
    (a, a_scales), (b, b_scales) = quantized(x), quantized(weight)
    # Sums of magnitudes bound what is rounded.
    bound = (np.abs(a) @ np.abs(b).T) * (a_scales[:, None] * b_scales) * 2.0**-22
    assert ((total - expected).abs().numpy() <= bound).all()


def test_magnitudes_of_rows_that_are_not_finite(way: str) -> None:
    """Infinite on the rank that sees it, so that the maximum of the ranks makes all rows NaN."""
    for bad in (torch.nan, torch.inf, -torch.inf):
        x = random(0, torch.float32, 4, 40)
        x[2, 7] = bad
        magnitudes = row_magnitudes(x)
        assert magnitudes[2] == torch.inf
        assert magnitudes[[0, 1, 3]].isfinite().all()
        elsewhere = quantize_rows(x[:, 20:], magnitudes)
        assert elsewhere.scales.isnan().tolist() == [False, False, True, False]
