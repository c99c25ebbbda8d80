"""Products with packed weights against float64, and that no row hears of the others."""

import pytest
import torch
from torch import Tensor

from gllm.kernels.linear import linear, lookup_rows, prepare
from gllm.kernels.linear_unquantized import UnquantizedMatrix
from gllm.kernels.native.library import DTYPES
from tests.support.models.kernel_builds import covers_builds

SHAPES = [
    (1, 2, 1),
    (16, 8, 0),
    (16, 8, 3),
    (70, 31, 5),
    (70, 64, 14),
    (70, 64, 28),
    (70, 64, 29),
    (129, 900, 200),
    (33, 34, 17),
    (65, 1060, 33),
    (40, 1090, 260),
]
"""(outputs, inputs, rows): within a panel and beyond, odd inputs, few rows and many; for AMX inputs
that are no multiple of 32 and rows that are no multiple of 16."""


def operands(outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(outputs + rows)
    made = [(rows, inputs), (outputs, inputs), (outputs,)]
    return tuple(torch.randn(shape, generator=generator).to(dtype) for shape in made)


@covers_builds(dtype=[*DTYPES], biased=[False, True])
def test_equals_float64(way: str, dtype: torch.dtype, biased: bool) -> None:
    for shape in SHAPES:
        x, weight, bias = operands(*shape, dtype)
        wanted = x.double() @ weight.double().t() + (bias.double() if biased else 0)
        result = linear(x, prepare(weight), bias if biased else None)
        assert result.dtype == dtype
        # Sums are taken in float32; what is left is the rounding of the result.
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-8, torch.float16: 2**-10}[dtype]
        torch.testing.assert_close(result.double(), wanted, rtol=tolerance, atol=tolerance * 10)


@pytest.mark.parametrize("dtype", DTYPES)
def test_writes_where_it_is_told(way: str, dtype: torch.dtype) -> None:
    x, weight, _ = operands(70, 64, 5, dtype)
    out = torch.full((7, 70), 5.0)
    linear(x, prepare(weight), None, out[1:6])
    assert (out[[0, 6]] == 5.0).all()
    wanted = x.double() @ weight.double().t()
    torch.testing.assert_close(out[1:6].double(), wanted, rtol=2**-8, atol=0.05)


def test_rows_may_be_apart(way: str) -> None:
    x, weight, _ = operands(48, 64, 10, torch.float32)
    matrix = prepare(weight)
    torch.testing.assert_close(linear(x[::2], matrix, None), linear(x, matrix, None)[::2])
    apart, whole = linear(x.t().contiguous().t(), matrix, None), linear(x, matrix, None)
    if way == "torch":  # A BLAS may sum in another order for each layout.
        torch.testing.assert_close(apart, whole)
    else:
        assert torch.equal(apart, whole)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_others(way: str, dtype: torch.dtype) -> None:
    if way == "torch":
        pytest.skip("torch rounds differently for other numbers of rows")
    x, weight, _ = operands(129, 1100, 290, dtype)
    matrix = prepare(weight)
    whole = linear(x, matrix, None)
    for rows in (1, 3, 13, 14, 16, 17, 28, 29, 32, 33, 193):
        assert torch.equal(linear(x[:rows], matrix, None), whole[:rows])


def test_not_a_number_stays_in_its_row(way: str) -> None:
    x, weight, _ = operands(70, 64, 30, torch.bfloat16)
    x[4, 7] = float("nan")
    failed = linear(x, prepare(weight), None).isnan()
    assert failed[4].all()
    assert failed.sum() == 70


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_come_back(way: str, dtype: torch.dtype) -> None:
    _, weight, _ = operands(70, 62, 1, dtype)
    matrix = prepare(weight)
    assert isinstance(matrix, UnquantizedMatrix)
    for chosen in ([], [0], [69, 3, 3, 16, 15], [*range(70)]):
        ids = torch.tensor(chosen, dtype=torch.int64)
        assert torch.equal(lookup_rows(matrix, ids), weight[ids])


def test_rows_that_are_not_there_are_refused(way: str) -> None:
    _, weight, _ = operands(70, 62, 1, torch.float32)
    matrix = prepare(weight)
    assert isinstance(matrix, UnquantizedMatrix)
    for chosen in ([-1], [3, 70]):
        with pytest.raises(IndexError):
            lookup_rows(matrix, torch.tensor(chosen))
