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

from gllm.kernels.native.library import DTYPES, Int8Arguments, QuantizeArguments, native, pointer

LARGEST = 127
"""Code of a row's largest number, without ZERO."""
ZERO = 128
"""The code of 0."""
SMALLEST = 2.0**-120
"""Rows that have nothing above it count as zeros: 127 divided by it is still a float."""
MOST_INPUTS = (2**31 - 1) // LARGEST**2
"""Whose sums fit into 32 bits."""
GROUP = 4
"""Inputs whose products are summed at once."""
PANEL = 64
"""Outputs whose weights lie together, group by group."""
SLAB = 64 * PANEL
"""Outputs whose weights are quantized, or by the reference turned into a larger type, at once."""


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
    rows, size = x.shape
    codes = x.new_empty(rows, -(-size // GROUP) * GROUP, dtype=torch.uint8)
    made = Rows(codes, x.new_empty(rows, dtype=torch.float32))
    library = native(x, "linear_int8")
    if library is not None:
        pointers = (x.data_ptr(), codes.data_ptr(), made.scales.data_ptr())
        flags = (DTYPES[x.dtype], torch.get_num_threads())
        library(QuantizeArguments(*pointers, rows, size, *flags))
        return made
    numbers = x.to(torch.float32)
    most = numbers.abs().amax(dim=1)
    finite = most.isfinite()
    # By a tensor: torch makes number / tensor the reciprocal times the number.
    largest = torch.full_like(most, LARGEST)
    made.scales.copy_(torch.where(finite, most / largest, torch.nan))
    inverse = torch.where(finite & (most >= SMALLEST), largest / most, 0.0)[:, None]
    whole = torch.where(inverse > 0, numbers * inverse, 0.0).round()
    codes.fill_(ZERO)[:, :size] = (whole + ZERO).to(torch.uint8)
    return made


def prepare_int8(weight: Tensor) -> Int8Matrix:
    """Quantize weight [outputs, inputs] by its rows, and lay it out; the caller should drop it.

    Raises ValueError for more inputs than MOST_INPUTS.
    """
    outputs, inputs = weight.shape
    if inputs > MOST_INPUTS:
        raise ValueError(
            f"a weight has {inputs} inputs, but 8-bit sums fit into 32 bits up to {MOST_INPUTS}: "
            "serve this model without --quantization int8"
        )
    panels, groups = -(-outputs // PANEL), -(-inputs // GROUP)
    codes = weight.new_empty(panels, groups, PANEL, GROUP, dtype=torch.int8)
    scales = weight.new_zeros(panels, PANEL, dtype=torch.float32)
    offsets = weight.new_zeros(panels, PANEL, dtype=torch.int32)
    for first in range(0, outputs, SLAB):
        rows = quantize_rows(weight[first : first + SLAB])
        slab = rows.codes.bitwise_xor_(ZERO).view(torch.int8)
        slab = functional.pad(slab, (0, 0, 0, -len(slab) % PANEL))
        at = slice(first // PANEL, (first + len(slab)) // PANEL)
        words = slab.view(torch.int32).unflatten(0, (-1, PANEL)).transpose(1, 2)
        codes[at].view(torch.int32)[..., 0] = words
        scales[at].view(-1)[: len(rows.scales)] = rows.scales
        offsets[at] = slab.sum(dim=1, dtype=torch.int32).view(-1, PANEL) * -ZERO
    return Int8Matrix(codes, scales.flatten(), offsets.flatten(), outputs)


def linear_int8(
    x: Tensor, matrix: Int8Matrix, bias: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """x W^T + b: x [tokens, inputs], bias [outputs] alike; the result [tokens, outputs].

    out [tokens, outputs]: where it goes instead, of x's type or float32, contiguous.
    """
    x = x.contiguous()
    library, shape = native(x, "linear_int8"), (len(x), matrix.outputs)
    if library is None:
        result = x.new_empty(shape) if out is None else out
        return _product(quantize_rows(x), matrix, bias, result)
    result = library.empty(shape, x.dtype) if out is None else out
    library(
        Int8Arguments(
            *(x.data_ptr(), matrix.codes.data_ptr(), matrix.scales.data_ptr()),
            *(matrix.offsets.data_ptr(), pointer(bias), result.data_ptr()),
            *(*x.shape, matrix.outputs),
            *(DTYPES[x.dtype], result.dtype == torch.float32, torch.get_num_threads()),
        )
    )
    return result


def _product(rows: Rows, matrix: Int8Matrix, bias: Tensor | None, to: Tensor) -> Tensor:
    """to [rows, outputs] becomes what compiled kernels make of codes; float64 holds all sums."""
    numbers = rows.codes.to(torch.float64) - ZERO
    for first in range(0, matrix.outputs, SLAB):
        outputs = slice(first, min(first + SLAB, matrix.outputs))
        slab = matrix.codes[first // PANEL : (first + SLAB) // PANEL].to(torch.float64)
        sums = numbers @ slab.transpose(1, 2).flatten(0, 1).flatten(1).t()
        sums = sums[:, : outputs.stop - first].to(torch.float32)
        result = sums * (rows.scales[:, None] * matrix.scales[outputs])
        to[:, outputs] = result if bias is None else result + bias[outputs]
    return to
