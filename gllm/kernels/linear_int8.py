"""Linear maps by 8-bit weights and activations.

Owns the arithmetic: a scale for each output's weights and one for each token's activations, their
products summed exactly in integers. So a row's result depends on nothing else in its batch, and is
the same in every way it is computed. Does not know where weights come from.

Source: Dettmers et al., "LLM.int8()" (2022), sections 2 (absmax quantization) and 3.1 (vector-wise
quantization: scales of rows and columns); nothing is kept in a larger type for outliers.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.native.library import Int8Arguments, QuantizeArguments, native, pointer

LARGEST = 127
"""Code of a row's largest number, without ZERO."""
ZERO = 128
"""The code of 0."""
SMALLEST = 2.0**-120
"""Rows that have nothing above it count as zeros: 127 divided by it is still a float."""
GROUP = 4
"""Inputs whose products are summed at once."""
PANEL = 64
"""Outputs whose weights lie together, group by group."""
PANELS_AT_ONCE = 64
"""That the reference turns into a larger type."""


@dataclass(frozen=True, slots=True)
class Rows:
    """Numbers as codes and scales."""

    codes: Tensor
    """[rows, padded] uint8: number / scale, rounded, plus ZERO; ZERO behind the numbers up to a
    multiple of GROUP."""
    scales: Tensor
    """[rows] float32: a row's largest magnitude / LARGEST; NaN where one is not finite."""


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """A weight [outputs, inputs] as codes and a scale for each output."""

    codes: Tensor
    """[panels, padded / GROUP, PANEL, GROUP] int8, 0 where there is no output or no input."""
    scales: Tensor
    """[panels * PANEL] float32."""
    offsets: Tensor
    """[panels * PANEL] int32: what takes away the ZERO in every activation's code."""
    outputs: int

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scales.nbytes + self.offsets.nbytes


def quantize_rows(x: Tensor) -> Rows:
    """x [rows, size], each row with the scale of its largest magnitude."""
    x = x.contiguous()
    made = _room(x)
    library = native(x)
    if library is not None:
        library(_quantization(x, made))
        return made
    numbers = x.to(torch.float32)
    most = numbers.abs().amax(dim=1)
    finite = most.isfinite()
    largest = torch.full_like(most, LARGEST)  # A number / tensor is its reciprocal times the number.
    made.scales.copy_(torch.where(finite, most / largest, torch.nan))
    inverse = torch.where(finite & (most >= SMALLEST), largest / most, 0.0)[:, None]
    whole = torch.where(inverse > 0, numbers * inverse, 0.0).round()
    made.codes.fill_(ZERO)
    made.codes[:, : x.shape[1]] = (whole + ZERO).to(torch.uint8)
    return made


def prepare_int8(weight: Tensor) -> Int8Matrix:
    """Quantize weight [outputs, inputs] by its rows, and lay it out; the caller should drop it."""
    rows = quantize_rows(weight)
    padding = -len(weight) % PANEL
    codes = rows.codes.bitwise_xor_(ZERO).view(torch.int8)
    codes = functional.pad(codes, (0, 0, 0, padding))
    offsets = codes.sum(dim=1, dtype=torch.int32) * -ZERO
    groups = codes.view(torch.int32).unflatten(0, (-1, PANEL)).transpose(1, 2).contiguous()
    packed = groups.view(torch.int8).unflatten(2, (PANEL, GROUP))
    return Int8Matrix(packed, functional.pad(rows.scales, (0, padding)), offsets, len(weight))


def linear_int8(x: Tensor, matrix: Int8Matrix, bias: Tensor | None) -> Tensor:
    """x W^T + b: x [tokens, inputs], bias [outputs] alike; the result [tokens, outputs]."""
    if x.dtype == torch.float16:
        wide = None if bias is None else bias.to(torch.float32)
        return linear_int8(x.to(torch.float32), matrix, wide).to(x.dtype)
    x = x.contiguous()
    result = x.new_empty(len(x), matrix.outputs)
    library = native(x)
    if library is None:
        return _product(quantize_rows(x), matrix, bias, result)
    scratch = _room(x)
    library(
        Int8Arguments(
            _quantization(x, scratch),
            *(pointer(tensor) for tensor in (matrix.codes, matrix.scales, matrix.offsets)),
            *(pointer(bias), pointer(result), matrix.outputs),
        )
    )
    return result


def _room(x: Tensor) -> Rows:
    """Where the codes and scales of x [rows, size] go."""
    rows, size = x.shape
    codes = x.new_empty(rows, -(-size // GROUP) * GROUP, dtype=torch.uint8)
    return Rows(codes, x.new_empty(rows, dtype=torch.float32))


def _quantization(x: Tensor, to: Rows) -> QuantizeArguments:
    return QuantizeArguments(
        *(pointer(x), pointer(to.codes), pointer(to.scales)),
        *(*x.shape, to.codes.shape[1], x.dtype == torch.bfloat16, torch.get_num_threads()),
    )


def _product(rows: Rows, matrix: Int8Matrix, bias: Tensor | None, to: Tensor) -> Tensor:
    """to [rows, outputs] becomes what the compiled kernels make of codes; float64 holds all sums."""
    numbers = rows.codes.to(torch.float64) - ZERO
    for panel in range(0, len(matrix.codes), PANELS_AT_ONCE):
        codes = matrix.codes[panel : panel + PANELS_AT_ONCE].to(torch.float64)
        sums = numbers @ codes.transpose(1, 2).flatten(0, 1).flatten(1).t()
        outputs = slice(panel * PANEL, min(panel * PANEL + sums.shape[1], matrix.outputs))
        sums = sums[:, : outputs.stop - outputs.start].to(torch.float32)
        result = sums * (rows.scales[:, None] * matrix.scales[outputs])
        to[:, outputs] = result if bias is None else result + bias[outputs]
    return to
