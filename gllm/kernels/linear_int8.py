"""Linear layers with 8-bit integer weights and activations.

Each output's weights and each token's activations have one scale; their products are summed exactly
in integers. A row's result therefore depends on no other row of its batch, and every implementation
returns the same bits. Tensor-parallel ranks that hold some inputs each first agree on the largest
magnitude of the whole row: their codes are those of the whole product.

Source: Dettmers et al., "LLM.int8()" (2022), sections 2 (absmax quantization) and 3.1 (vector-wise
quantization: scales of rows and columns); no outliers are kept in a larger type.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.native.library import Int8Arguments, QuantizeArguments, library_for
from gllm.kernels.native.program import make_contiguous
from gllm.kernels.weight_format import WeightFormat

MAX_CODE = 127
"""Code of a row's largest magnitude, before ZERO_POINT is added."""
ZERO_POINT = 128
"""The code of 0."""
MIN_MAGNITUDE = 2.0**-120
"""Rows whose magnitudes are all below it are zeros: 127 divided by it is still a float."""
MAX_INPUTS = (2**31 - 1) // MAX_CODE**2
"""Largest number of inputs for which sums of products fit into 32 bits."""
GROUP_INPUTS = 4
"""Inputs per group: one instruction adds their products."""
PANEL_OUTPUTS = 64
"""Outputs per panel: their weights are contiguous, one input group after the other."""
SLAB_OUTPUTS = 64 * PANEL_OUTPUTS
"""Outputs that are quantized at once, or that the reference converts to float64 at once."""


@dataclass(frozen=True, slots=True)
class QuantizedRows:
    """Activations quantized to 8-bit integers with one scale per row."""

    codes: Tensor
    """[rows, padded] uint8: number / scale, rounded, plus ZERO_POINT; columns are padded with
    ZERO_POINT to a multiple of GROUP_INPUTS."""
    scales: Tensor
    """[rows] float32: a row's largest magnitude / MAX_CODE; NaN if a number is not finite."""


@dataclass(frozen=True, slots=True)
class Int8Matrix:
    """Weight [outputs, inputs] quantized to 8-bit integers with one scale per output.

    Codes are stored in panels: groups of PANEL_OUTPUTS outputs whose weights are contiguous in
    memory.
    """

    format: ClassVar[str] = "int8"
    codes: Tensor
    """[panels, groups, PANEL_OUTPUTS, GROUP_INPUTS] int8: `groups` is inputs / GROUP_INPUTS,
    rounded up; padding is 0."""
    scales: Tensor
    """[panels * PANEL_OUTPUTS] float32."""
    offsets: Tensor
    """[panels * PANEL_OUTPUTS] int32: correct sums for the ZERO_POINT of the activations' codes."""
    outputs: int
    """Number of outputs; the last panel may hold more."""

    @property
    def nbytes(self) -> int:
        """Size in memory, in bytes."""
        return self.codes.nbytes + self.scales.nbytes + self.offsets.nbytes


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """Weight [outputs, inputs] in 8-bit integers with one scale per output, as a checkpoint has it.

    A `Weight` as loaded, of which `Int8Format.prepare` makes an Int8Matrix.
    """

    format: ClassVar[str] = "int8"
    codes: Tensor
    """[outputs, inputs] int8."""
    scales: Tensor
    """[outputs] float32."""
    dtype: torch.dtype
    """Dtype of the floats that it represents."""

    @property
    def nbytes(self) -> int:
        """Size in memory, in bytes."""
        return self.codes.nbytes + self.scales.nbytes


class Int8Format(WeightFormat[Int8Matrix]):
    """8-bit integer weights of a checkpoint, or quantized from floats when a model is loaded.

    Activations are quantized too, with one scale per row.
    """

    scales_rows = True

    def dequantize(self, matrix: Any) -> Tensor:
        """Convert a loaded weight to floats [outputs, inputs] in its dtype."""
        assert isinstance(matrix, Int8Weight), "loaded weights are not packed yet"
        return (matrix.codes.float() * matrix.scales[:, None]).to(matrix.dtype)

    def prepare(self, parts: Sequence[Any], magnitudes: Tensor | None = None) -> Int8Matrix:
        """Quantize tensors to int8, or pack Int8Weights; see `WeightFormat.prepare`.

        Raises:
            ValueError: the weight has more inputs than MAX_INPUTS.
        """
        if isinstance(parts[0], Int8Weight):
            codes = torch.cat([part.codes for part in parts])
            return pack_int8(codes, torch.cat([part.scales for part in parts]))
        return prepare_int8(parts[0] if len(parts) == 1 else torch.cat(list(parts)), magnitudes)

    def row_magnitudes(self, x: Tensor) -> Tensor:
        """Return the largest absolute value of each row of x, [tokens] float32.

        It is +inf for a row that contains an infinity or NaN.
        """
        return row_magnitudes(x)

    def multiply(
        self,
        x: Tensor,
        matrix: Int8Matrix,
        bias: Tensor | None,
        out: Tensor | None,
        magnitudes: Tensor | None = None,
    ) -> Tensor:
        """Return x W^T + b, [tokens, outputs]; the arguments are as in `WeightFormat.multiply`."""
        return linear_int8(x, matrix, bias, out, magnitudes)


def row_magnitudes(x: Tensor) -> Tensor:
    """Return the largest absolute value of each row of x [rows, size], [rows] float32.

    It is +inf for a row that contains an infinity or NaN, so that the maximum over ranks is +inf
    too.
    """
    x = make_contiguous(x)
    library = library_for(x, "linear_int8")
    if library is None:
        magnitudes = x.to(torch.float32).abs().amax(dim=1)
        return magnitudes.masked_fill(~magnitudes.isfinite(), torch.inf)
    magnitudes = library.empty((len(x),), torch.float32)
    library(QuantizeArguments(x, None, None, *x.shape, x.dtype, magnitudes=magnitudes))
    return magnitudes


def quantize_rows(x: Tensor, magnitudes: Tensor | None = None) -> QuantizedRows:
    """Quantize x [rows, size] to 8-bit integers, each row scaled by its largest absolute value.

    magnitudes: [rows] float32: largest absolute values of the rows on all tensor parallel ranks, if
    x has only the columns of this rank; None to compute them from x.
    """
    x = make_contiguous(x)
    rows, size = x.shape
    codes = x.new_empty(rows, -(-size // GROUP_INPUTS) * GROUP_INPUTS, dtype=torch.uint8)
    scales = x.new_empty(rows, dtype=torch.float32)
    library = library_for(x, "linear_int8")
    if library is not None:
        library(QuantizeArguments(x, codes, scales, *x.shape, x.dtype, magnitudes=magnitudes))
        return QuantizedRows(codes, scales)
    numbers = x.to(torch.float32)
    if magnitudes is None:
        magnitudes = row_magnitudes(x)
    is_finite = magnitudes.isfinite()
    # A tensor as the dividend: torch computes number / tensor as the reciprocal times the number.
    max_codes = torch.full_like(magnitudes, MAX_CODE)
    scales.copy_(torch.where(is_finite, magnitudes / max_codes, torch.nan))
    is_scaled = is_finite & (magnitudes >= MIN_MAGNITUDE)
    inverse = torch.where(is_scaled, max_codes / magnitudes, 0.0)[:, None]
    rounded = torch.where(inverse > 0, numbers * inverse, 0.0).round()
    codes.fill_(ZERO_POINT)[:, :size] = (rounded + ZERO_POINT).to(torch.uint8)
    return QuantizedRows(codes, scales)


def prepare_int8(weight: Tensor, magnitudes: Tensor | None = None) -> Int8Matrix:
    """Quantize weight [outputs, inputs] to 8-bit integers with one scale per output.

    The codes are laid out in panels, as the kernels read them.

    Args:
        weight: [outputs, inputs].
        magnitudes: [outputs] float32: largest absolute weight of each output over all inputs, if
            `weight` has only this rank's inputs.

    Raises:
        ValueError: the weight has more inputs than MAX_INPUTS.
    """

    def read(begin: int, end: int) -> tuple[Tensor, Tensor]:
        known = None if magnitudes is None else magnitudes[begin:end]
        rows = quantize_rows(weight[begin:end], known)
        return rows.codes.bitwise_xor_(ZERO_POINT).view(torch.int8), rows.scales

    return _pack(weight.shape, weight.device, read)


def pack_int8(codes: Tensor, scales: Tensor) -> Int8Matrix:
    """Lay out codes [outputs, inputs] int8 with scales [outputs] float32 as the kernels read them.

    Raises:
        ValueError: the weight has more inputs than MAX_INPUTS.
    """
    padding = -codes.shape[1] % GROUP_INPUTS

    def read(begin: int, end: int) -> tuple[Tensor, Tensor]:
        return functional.pad(codes[begin:end], (0, padding)), scales[begin:end]

    return _pack(codes.shape, codes.device, read)


def _pack(
    weight_shape: Sequence[int],
    device: torch.device,
    read: Callable[[int, int], tuple[Tensor, Tensor]],
) -> Int8Matrix:
    """Pack a weight for the kernels.

    Args:
        weight_shape: numbers of outputs and inputs.
        device: device of the result.
        read: returns the codes int8, padded to whole groups of inputs, and the scales of the
            outputs from one index up to another, which may be beyond the last one.

    Raises:
        ValueError: the weight has more inputs than MAX_INPUTS.
    """
    outputs, inputs = weight_shape
    if inputs > MAX_INPUTS:
        raise ValueError(
            f"a weight has {inputs} inputs, but 8-bit sums fit into 32 bits up to {MAX_INPUTS}: "
            "serve this model without --quantization int8"
        )
    panels, groups = -(-outputs // PANEL_OUTPUTS), -(-inputs // GROUP_INPUTS)
    shape = (panels, groups, PANEL_OUTPUTS, GROUP_INPUTS)
    codes = torch.empty(shape, dtype=torch.int8, device=device)
    scales = torch.zeros(panels, PANEL_OUTPUTS, device=device)
    offsets = torch.zeros(panels, PANEL_OUTPUTS, dtype=torch.int32, device=device)
    for begin in range(0, outputs, SLAB_OUTPUTS):
        slab, slab_scales = read(begin, begin + SLAB_OUTPUTS)
        slab = functional.pad(slab, (0, 0, 0, -len(slab) % PANEL_OUTPUTS))
        at = slice(begin // PANEL_OUTPUTS, (begin + len(slab)) // PANEL_OUTPUTS)
        words = slab.view(torch.int32).unflatten(0, (-1, PANEL_OUTPUTS)).transpose(1, 2)
        codes[at].view(torch.int32)[..., 0] = words
        scales[at].view(-1)[: len(slab_scales)] = slab_scales
        sums = slab.sum(dim=1, dtype=torch.int32)
        offsets[at] = sums.view(-1, PANEL_OUTPUTS) * -ZERO_POINT
    return Int8Matrix(codes, scales.flatten(), offsets.flatten(), outputs)


def linear_int8(
    x: Tensor,
    matrix: Int8Matrix,
    bias: Tensor | None,
    out: Tensor | None = None,
    magnitudes: Tensor | None = None,
) -> Tensor:
    """Apply a linear layer with an int8 weight: return x W^T + b, [tokens, outputs].

    Activations are quantized to 8 bits first, with one scale per row.

    Args:
        x: [tokens, inputs].
        matrix: W [outputs, inputs].
        bias: b [outputs], of x's dtype.
        out: receives the result if given: contiguous, of x's dtype or float32.
        magnitudes: [tokens] float32, contiguous: largest magnitudes of the whole rows
            (`row_magnitudes`), if x has only this rank's inputs.
    """
    x = make_contiguous(x)
    library, shape = library_for(x, "linear_int8"), (len(x), matrix.outputs)
    if library is None:
        result = x.new_empty(shape) if out is None else out
        return _multiply_reference(quantize_rows(x, magnitudes), matrix, bias, result)
    result = library.empty(shape, x.dtype) if out is None else out
    library(
        Int8Arguments(
            *(x, matrix.codes, matrix.scales, matrix.offsets, bias, result),
            *(*x.shape, matrix.outputs),
            *(x.dtype, result.dtype == torch.float32),
            magnitudes=magnitudes,
        )
    )
    return result


def _multiply_reference(
    rows: QuantizedRows, matrix: Int8Matrix, bias: Tensor | None, out: Tensor
) -> Tensor:
    """Write the same bits as the compiled kernels to out [rows, outputs].

    float64 holds all integer sums exactly.
    """
    numbers = rows.codes.to(torch.float64) - ZERO_POINT
    for begin in range(0, matrix.outputs, SLAB_OUTPUTS):
        outputs = slice(begin, min(begin + SLAB_OUTPUTS, matrix.outputs))
        panels = slice(begin // PANEL_OUTPUTS, (begin + SLAB_OUTPUTS) // PANEL_OUTPUTS)
        slab = matrix.codes[panels].to(torch.float64)
        sums = numbers @ slab.transpose(1, 2).flatten(0, 1).flatten(1).t()
        sums = sums[:, : outputs.stop - begin].to(torch.float32)
        result = sums * (rows.scales[:, None] * matrix.scales[outputs])
        out[:, outputs] = result if bias is None else result + bias[outputs]
    return out
