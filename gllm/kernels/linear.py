"""Linear maps by weights that never change.

Owns how a weight is laid out in memory: where there are compiled kernels it is put into the panels
that they read, once, and the original is dropped. What quantized ones are made of is in files of
their own. Does not know where weights come from.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.linear_int8 import Int8Matrix, linear_int8, prepare_int8
from gllm.kernels.native.library import (
    LinearArguments,
    PackArguments,
    UnpackArguments,
    native,
    pointer,
)

PANEL = 16
"""Outputs of a panel, as in linear.cpp."""


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """A weight in a type of floating-point numbers."""

    weight: Tensor
    """[outputs, inputs]; in panels where it is packed."""
    outputs: int
    is_packed: bool
    is_gated: bool = False
    """Panels of `outputs` gates and of as many that they gate take turns (gated_linear.py)."""


Matrix = PlainMatrix | Int8Matrix
"""A weight, ready to be multiplied by."""


def plain(weight: Tensor) -> PlainMatrix:
    """weight [outputs, inputs] as it is."""
    return PlainMatrix(weight, len(weight), False)


def prepare(weight: Tensor, quantization: str = "none") -> Matrix:
    """Lay out weight [outputs, inputs], as it is or in int8; the caller should drop it then."""
    if quantization == "int8":
        return prepare_int8(weight)
    return packed(weight) or plain(weight)


def packed(weight: Tensor, is_gated: bool = False) -> PlainMatrix | None:
    """weight [outputs, inputs], or [2 * outputs, inputs] with the gates first, in panels; None
    where there are no compiled kernels for it."""
    rows, inputs = weight.shape
    library = native(weight)
    # Two neighbouring bfloat16 are multiplied at once.
    if library is None or inputs % 2:
        return None
    outputs = rows // 2 if is_gated else rows
    panels = -(-outputs // PANEL) * (1 + is_gated)
    made = torch.empty(panels * PANEL, inputs, dtype=weight.dtype)
    weight = weight.contiguous()
    is_bfloat16 = weight.dtype == torch.bfloat16
    library(
        PackArguments(
            *(pointer(made), pointer(weight), inputs, outputs),
            *(is_gated, is_bfloat16, torch.get_num_threads()),
        )
    )
    return PlainMatrix(made, outputs, True, is_gated)


def linear(x: Tensor, matrix: Matrix, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x W^T + b: x [tokens, inputs], bias [outputs]; the result [tokens, outputs].

    out: where the result goes, contiguous, of x's dtype or float32.
    """
    if isinstance(matrix, Int8Matrix):
        return linear_int8(x, matrix, bias, out)
    if not matrix.is_packed:
        result = functional.linear(x, matrix.weight, bias)
        return result if out is None else out.copy_(result)
    return multiply_packed(x, matrix, bias, out)


def multiply_packed(
    x: Tensor, matrix: PlainMatrix, bias: Tensor | None, out: Tensor | None = None, gate: int = 0
) -> Tensor:
    """`linear` by a packed matrix. gate: the activation (library.py) of gates, where it has some;
    bias then [2 * outputs]."""
    library = native(x)
    assert library is not None, "packed by compiled kernels"
    assert matrix.is_gated == bool(gate), "gates and their activation come together"
    if x.stride(1) != 1:
        x = x.contiguous()
    if out is None:
        out = library.empty((len(x), matrix.outputs), x.dtype)
    library(
        LinearArguments(
            *(pointer(tensor) for tensor in (out, x, matrix.weight, bias)),
            *(len(x), x.shape[1], matrix.outputs, x.stride(0), gate),
            out.dtype == torch.float32,
            x.dtype == torch.bfloat16,
            torch.get_num_threads(),
        )
    )
    return out


def rows_of(matrix: PlainMatrix, chosen: Tensor) -> Tensor:
    """Rows of the weight by index [n] int64: [n, inputs]."""
    if not matrix.is_packed:
        return functional.embedding(chosen, matrix.weight)
    library, inputs = native(matrix.weight), matrix.weight.shape[1]
    assert library is not None, "packed by compiled kernels"
    if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < matrix.outputs:
        raise IndexError(f"a row beyond the weight's {matrix.outputs}")
    result = torch.empty(len(chosen), inputs, dtype=matrix.weight.dtype)
    library(
        UnpackArguments(
            *(pointer(tensor) for tensor in (result, matrix.weight, chosen)),
            *(len(chosen), inputs, result.dtype == torch.bfloat16, torch.get_num_threads()),
        )
    )
    return result
