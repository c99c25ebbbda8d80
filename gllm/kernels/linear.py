"""Linear maps by weights that never change.

Owns how a weight is laid out in memory: where there are compiled kernels it is put into the panels
that they read, once, and the original is dropped. What quantized ones are made of is in files of
their own. Does not know where weights come from.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.fp8_weights import Fp8Matrix
from gllm.kernels.linear_fp8 import dequantize, linear_fp8, stack_fp8
from gllm.kernels.linear_int8 import Int8Matrix, linear_int8, prepare_int8
from gllm.kernels.native.library import (
    DTYPES,
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


Matrix = PlainMatrix | Int8Matrix | Fp8Matrix
"""A weight, ready to be multiplied by."""


def plain(weight: Tensor) -> PlainMatrix:
    """weight [outputs, inputs] as it is."""
    return PlainMatrix(weight, len(weight), False)


def prepare(
    weight: Tensor | Sequence[Tensor] | Sequence[Fp8Matrix], quantization: str = "none"
) -> Matrix:
    """Lay out a weight [outputs, inputs], whole or in parts one below the other, as it is or in
    int8; where all parts are in 8-bit floats it stays so. It is copied, but for a single part in
    8-bit floats."""
    given = [weight] if isinstance(weight, Tensor) else weight
    codes = [part for part in given if isinstance(part, Fp8Matrix)]
    if codes and quantization == "none":
        return stack_fp8(codes)
    parts = [dequantize(part) if isinstance(part, Fp8Matrix) else part for part in given]
    if quantization == "int8":
        return prepare_int8(parts[0] if len(parts) == 1 else torch.cat([*parts]))
    return packed(parts) or plain(torch.cat([*parts]))


def packed(parts: Sequence[Tensor]) -> PlainMatrix | None:
    """The weight of these parts in panels; None where there are no compiled kernels for it."""
    if any(len(part) % PANEL for part in parts[:-1]):
        parts = [torch.cat([*parts])]
    outputs = sum(map(len, parts))
    made = _panels(parts[0], outputs)
    if made is None:
        return None
    begin = 0
    for part in parts:
        _pack(part, made[begin:])
        begin += len(part)
    return PlainMatrix(made, outputs, True)


def packed_in_turns(gates: Tensor, others: Tensor) -> PlainMatrix | None:
    """Two weights [outputs, inputs] whose panels take turns; None where there are no compiled
    kernels for them."""
    padded = -(-len(gates) // PANEL) * PANEL
    made = _panels(gates, 2 * padded)
    if made is None:
        return None
    _pack(gates, made, step=2)
    _pack(others, made[PANEL:], step=2)
    return PlainMatrix(made, len(gates), True, is_gated=True)


def _panels(like: Tensor, outputs: int) -> Tensor | None:
    """Memory for so many outputs in panels."""
    # Two neighbouring bfloat16 are multiplied at once.
    if native(like, "linear") is None or like.shape[1] % 2:
        return None
    return torch.empty(-(-outputs // PANEL) * PANEL, like.shape[1], dtype=like.dtype)


def _pack(weight: Tensor, to: Tensor, step: int = 1) -> None:
    """Put the weight into every panel, or every second one."""
    library = native(weight, "linear")
    assert library is not None, "there are panels"
    outputs, inputs = weight.shape
    weight = weight.contiguous()
    flags = (step, DTYPES[weight.dtype], torch.get_num_threads())
    library(PackArguments(pointer(to), pointer(weight), inputs, outputs, *flags))


def linear(x: Tensor, matrix: Matrix, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x W^T + b: x [tokens, inputs], bias [outputs]; the result [tokens, outputs].

    out: where the result goes, contiguous, of x's dtype or float32.
    """
    if isinstance(matrix, Int8Matrix):
        return linear_int8(x, matrix, bias, out)
    if isinstance(matrix, Fp8Matrix):
        return linear_fp8(x, matrix, bias, out)
    if not matrix.is_packed:
        result = functional.linear(x, matrix.weight, bias)
        return result if out is None else out.copy_(result)
    return multiply_packed(x, matrix, bias, out)


def multiply_packed(
    x: Tensor, matrix: PlainMatrix, bias: Tensor | None, out: Tensor | None = None, gate: int = 0
) -> Tensor:
    """`linear` by a packed matrix. gate: the activation (library.py) of gates, where it has some;
    bias then [2 * outputs]."""
    library = native(x, "linear")
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
            DTYPES[x.dtype],
            torch.get_num_threads(),
        )
    )
    return out


def rows_of(matrix: PlainMatrix, chosen: Tensor) -> Tensor:
    """Rows of the weight by index [n] int64: [n, inputs]."""
    if not matrix.is_packed:
        return functional.embedding(chosen, matrix.weight)
    library, inputs = native(matrix.weight, "linear"), matrix.weight.shape[1]
    assert library is not None, "packed by compiled kernels"
    if len(chosen) and not 0 <= int(chosen.min()) <= int(chosen.max()) < matrix.outputs:
        raise IndexError(f"a row beyond the weight's {matrix.outputs}")
    result = torch.empty(len(chosen), inputs, dtype=matrix.weight.dtype)
    library(
        UnpackArguments(
            *(pointer(tensor) for tensor in (result, matrix.weight, chosen)),
            *(len(chosen), inputs, DTYPES[result.dtype], torch.get_num_threads()),
        )
    )
    return result
