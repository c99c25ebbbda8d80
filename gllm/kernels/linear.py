"""Linear layers: lay out weights in their format, multiply by them, look up their rows.

The formats are in files of their own; `gllm.kernels.weight_format` has the registry.
"""

from collections.abc import Sequence

from torch import Tensor

from gllm.kernels.weight_format import UNQUANTIZED, Matrix, Weight, select_format, weight_format


def prepare(
    weight: Tensor | Sequence[Weight],
    quantization: str = UNQUANTIZED,
    magnitudes: Tensor | None = None,
) -> Matrix:
    """Convert a loaded weight to the memory layout, and if requested the quantization, of `linear`.

    The result is a copy, except for a single part that stays in the checkpoint's format.

    Args:
        weight: [outputs, inputs], whole or in parts that are stacked along the outputs.
        quantization: a key of WEIGHT_FORMATS that floats are quantized to; with "none" weights stay
            in the format of the checkpoint.
        magnitudes: [outputs] float32: largest absolute weight of each output over all inputs, if
            `weight` has only this rank's inputs and the format is int8; else None.
    """
    parts = [weight] if isinstance(weight, Tensor) else weight
    target, parts = select_format(parts, quantization)
    matrix: Matrix = target.prepare(parts, magnitudes)
    return matrix


def scales_rows(matrix: Matrix) -> bool:
    """Return True if `linear` with this matrix quantizes activations with one scale per row."""
    return weight_format(matrix.format).scales_rows


def row_magnitudes(x: Tensor, matrix: Matrix) -> Tensor:
    """Return the largest absolute value of each row of x [tokens, inputs], [tokens] float32.

    It is +inf for a row that contains an infinity or NaN. The int8 format derives the scale of a
    row from it.
    """
    return weight_format(matrix.format).row_magnitudes(x)


def linear(
    x: Tensor,
    matrix: Matrix,
    bias: Tensor | None,
    out: Tensor | None = None,
    magnitudes: Tensor | None = None,
) -> Tensor:
    """Apply a linear layer: return x W^T + b, [tokens, outputs].

    Args:
        x: [tokens, inputs].
        matrix: W, from `prepare`.
        bias: b [outputs].
        out: receives the result if given: contiguous, of x's dtype or float32.
        magnitudes: [tokens] float32: `row_magnitudes` over the inputs of all ranks, if x and W have
            only this rank's inputs and the format quantizes activations; else None.
    """
    return weight_format(matrix.format).multiply(x, matrix, bias, out, magnitudes)


def lookup_rows(matrix: Matrix, ids: Tensor) -> Tensor:
    """Return rows of a weight by index, as an embedding does: ids [n] int64 to [n, inputs].

    Raises:
        IndexError: an index is out of range, on a CPU.
        NotImplementedError: the format keeps no exact weights (see `has_lookup`).
    """
    return weight_format(matrix.format).lookup(matrix, ids)


def has_lookup(matrix: Matrix) -> bool:
    """Return True if `lookup_rows` accepts the matrix: its format keeps the exact weights."""
    return weight_format(matrix.format).has_lookup
