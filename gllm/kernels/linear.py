"""Linear maps by weights that never change.

Owns how a weight is laid out in memory: where oneDNN multiplies bfloat16 itself it is put into the
blocks that its kernels read, once, instead of at every product. What quantized ones are made of is
in files of their own. Does not know where weights come from.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.linear_int8 import Int8Matrix, linear_int8, prepare_int8


@dataclass(frozen=True, slots=True)
class PlainMatrix:
    """A weight in a type of floating-point numbers."""

    weight: Tensor
    """[outputs, inputs]; opaque where it is packed."""
    is_packed: bool


Matrix = PlainMatrix | Int8Matrix
"""A weight, ready to be multiplied by."""


def prepare(weight: Tensor, quantization: str = "none") -> Matrix:
    """Lay out weight [outputs, inputs], as it is or in int8; the caller should drop it then."""
    if quantization == "int8":
        return prepare_int8(weight)
    if weight.is_cpu and weight.dtype == torch.bfloat16 and _multiplies_bfloat16():
        return PlainMatrix(torch.ops.mkldnn._reorder_linear_weight(weight, None), True)
    return PlainMatrix(weight, False)


def linear(x: Tensor, matrix: Matrix, bias: Tensor | None, out: Tensor | None = None) -> Tensor:
    """x W^T + b: x [tokens, inputs], bias [outputs]; the result [tokens, outputs].

    out [tokens, outputs]: where it goes instead, of x's type or float32.
    """
    if isinstance(matrix, Int8Matrix):
        return linear_int8(x, matrix, bias, out)
    result = _plain(x, matrix, bias)
    return result if out is None else out.copy_(result)


def _plain(x: Tensor, matrix: PlainMatrix, bias: Tensor | None) -> Tensor:
    if not matrix.is_packed:
        return functional.linear(x, matrix.weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, matrix.weight, bias, "none", [], "")


def _multiplies_bfloat16() -> bool:
    """Whether oneDNN's kernels are there and this processor has instructions for them."""
    return (
        torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_reorder_linear_weight")
        and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
