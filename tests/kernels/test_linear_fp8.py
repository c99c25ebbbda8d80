"""Weights in 8-bit floats: what codes and scales stand for, alone and stacked."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.fp8_weights import Fp8Matrix
from gllm.kernels.linear import linear, prepare
from gllm.kernels.linear_fp8 import dequantize, prepare_fp8, stack_fp8


def quantized(
    outputs: int, inputs: int, block: tuple[int, int] | None, seed: int = 0, scales: int = 1
) -> Fp8Matrix:
    """A random weight; without blocks with so many scales."""
    generator = torch.Generator().manual_seed(seed)
    codes = (torch.randn(outputs, inputs, generator=generator) * 100).to(torch.float8_e4m3fn)
    shape: tuple[int, ...] = (scales,)
    if block is not None:
        shape = (-(-outputs // block[0]), -(-inputs // block[1]))
    factors = torch.rand(shape, generator=generator) / 100 + 0.001
    return prepare_fp8(codes, factors, block, torch.float32)


def by_definition(matrix: Fp8Matrix) -> Tensor:
    """Code times scale, number by number."""
    outputs, inputs = matrix.codes.shape
    made = torch.empty(outputs, inputs)
    for o in range(outputs):
        for i in range(inputs):
            scale = matrix.scales[o // matrix.rows, i // matrix.columns]
            made[o, i] = matrix.codes[o, i].to(torch.float32) * scale
    return made


@pytest.mark.parametrize("outputs", [1, 8, 19])
@pytest.mark.parametrize("block", [(8, 4), (3, 128), (128, 5), None], ids=str)
def test_a_weight_is_code_times_scale(outputs: int, block: tuple[int, int] | None) -> None:
    matrix = quantized(outputs, 10, block)
    assert torch.equal(dequantize(matrix), by_definition(matrix))


def test_a_scale_for_each_output() -> None:
    matrix = quantized(7, 10, None, scales=7)
    assert torch.equal(dequantize(matrix), by_definition(matrix))
    assert (matrix.rows, matrix.columns) == (1, 10)


def test_more_outputs_than_are_turned_into_floats_at_once() -> None:
    for block in ((128, 4), (700, 4), (3000, 4)):
        matrix = quantized(2500, 3, block)
        rows = torch.arange(2500) // block[0]
        wanted = matrix.codes.to(torch.float32) * matrix.scales[rows]
        assert torch.equal(dequantize(matrix), wanted)


@pytest.mark.parametrize(
    ("sizes", "block", "rows"),
    [
        ([16, 8, 8], (8, 4), 8),
        ([20, 10, 10], (8, 4), 2),
        ([20, 12, 9], (8, 4), 4),
        ([9, 9, 3], None, 9),
        ([5, 7], (8, 4), 5),
        ([6], (4, 4), 4),
    ],
)
def test_stacked_parts_keep_their_scales(
    sizes: list[int], block: tuple[int, int] | None, rows: int
) -> None:
    parts = [quantized(size, 10, block, seed) for seed, size in enumerate(sizes)]
    stacked = stack_fp8(parts)
    assert torch.equal(dequantize(stacked), torch.cat([dequantize(part) for part in parts]))
    assert stacked.rows == rows
    assert torch.equal(by_definition(stacked), dequantize(stacked))


def test_blocks_of_different_widths_are_not_stacked() -> None:
    with pytest.raises(ValueError, match="different numbers of inputs"):
        stack_fp8([quantized(4, 10, (4, 4)), quantized(4, 10, (4, 8))])


@pytest.mark.parametrize(
    ("scales", "named"),
    [
        (torch.ones(2, 2), "blocks of 8 x 4 need"),
        (torch.ones(()), "blocks of 8 x 4 need"),
        (torch.full((2, 3), -1.0), "negative"),
        (torch.full((2, 3), torch.inf), "not finite"),
        (torch.full((2, 3), torch.nan), "not finite"),
        (torch.ones(2, 3, dtype=torch.int32), "no floats"),
    ],
)
def test_bad_scales(scales: Tensor, named: str) -> None:
    codes = torch.zeros(16, 10).to(torch.float8_e4m3fn)
    with pytest.raises(ValueError, match=named):
        prepare_fp8(codes, scales, (8, 4), torch.float32)


def test_neither_one_scale_nor_one_for_each_output() -> None:
    with pytest.raises(ValueError, match="has 3 scales, but 1 or 16"):
        prepare_fp8(torch.zeros(16, 4).to(torch.float8_e4m3fn), torch.ones(3), None, torch.float32)


@pytest.mark.parametrize("quantization", ["none", "int8"])
def test_products(quantization: str) -> None:
    parts = [quantized(20, 10, (8, 4), 1), quantized(12, 10, (8, 4), 2)]
    x = torch.randn(5, 10, generator=torch.Generator().manual_seed(3))
    bias = torch.arange(32.0)
    weight = torch.cat([dequantize(part) for part in parts])
    matrix = prepare(parts, quantization)
    assert isinstance(matrix, Fp8Matrix) == (quantization == "none")
    wanted = functional.linear(x, weight, bias)
    actual = linear(x, matrix, bias)
    assert (actual - wanted).norm() / wanted.norm() < (1e-6 if quantization == "none" else 0.02)
    out = torch.full((5, 32), torch.nan)
    assert linear(x, matrix, bias, out) is out
    assert torch.equal(out, actual)
