"""Gated products with packed weights against float64, and that no row hears of the others."""

import pytest
import torch
from torch import Tensor

from gllm.kernels.activation import apply_gate
from gllm.kernels.gated_linear import gated_linear, prepare_gated
from gllm.kernels.native.library import DTYPES
from tests.support.models.kernel_builds import covers_builds

SHAPES = [
    (1, 2, 1),
    (16, 8, 0),
    (16, 8, 3),
    (70, 31, 5),
    (70, 64, 24),
    (70, 64, 25),
    (200, 900, 300),
    (33, 1060, 33),
]
"""(outputs, inputs, rows): within a panel and beyond, odd inputs, few rows and many."""


def operands(outputs: int, inputs: int, rows: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(outputs + rows)
    x = torch.randn(rows, inputs, generator=generator)
    weight = torch.randn(2 * outputs, inputs, generator=generator) / inputs**0.5
    return x.to(dtype), weight.to(dtype), torch.randn(2 * outputs, generator=generator).to(dtype)


@covers_builds(
    dtype=[*DTYPES], activation=["silu", "gelu_tanh", "gelu", "swiglu_oai"], biased=[False, True]
)
def test_equals_float64(way: str, dtype: torch.dtype, activation: str, biased: bool) -> None:
    for shape in SHAPES:
        x, weight, bias = operands(*shape, dtype)
        sums = x.double() @ weight.double().t() + (bias.double() if biased else 0)
        gate, up = sums.chunk(2, dim=1)
        result = gated_linear(x, prepare_gated(weight, bias if biased else None, activation))
        assert result.dtype == dtype
        # Gates that are not fused are rounded before they are activated, and once more after.
        tolerance = 1e-5 if dtype == torch.float32 else 2**-6
        wanted = apply_gate(activation, gate, up)
        torch.testing.assert_close(result.double(), wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_do_not_depend_on_others(way: str, dtype: torch.dtype) -> None:
    if way == "torch":
        pytest.skip("torch rounds differently for other numbers of rows")
    x, weight, bias = operands(129, 900, 200, dtype)
    matrix = prepare_gated(weight, bias, "silu")
    whole = gated_linear(x, matrix)
    for rows in (1, 3, 13, 14, 16, 17, 28, 29, 32, 33, 193):
        assert torch.equal(gated_linear(x[:rows], matrix), whole[:rows])


def test_not_a_number_stays_in_its_row(way: str) -> None:
    x, weight, _ = operands(70, 64, 30, torch.bfloat16)
    x[4, 7] = float("nan")
    failed = gated_linear(x, prepare_gated(weight, None, "silu")).isnan()
    assert failed[4].all()
    assert failed.sum() == 70


@pytest.mark.parametrize("rows", [1, 40])
def test_quantized_maps_gate_too(way: str, rows: int) -> None:
    x, weight, bias = operands(70, 64, rows, torch.float32)
    exact = gated_linear(x, prepare_gated(weight, bias, "silu"))
    quantized = gated_linear(x, prepare_gated(weight, bias, "silu", "int8"))
    assert 0 < (quantized - exact).abs().max() < 0.05 * exact.abs().max()
