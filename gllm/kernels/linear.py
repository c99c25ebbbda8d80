"""Linear maps by weights that never change.

Owns how a weight is laid out in memory: where oneDNN multiplies bfloat16 itself it is put into the
blocks that its kernels read, once, instead of at every product. Does not know where weights come
from.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True, slots=True)
class Matrix:
    """A weight, ready to be multiplied by."""

    weight: Tensor
    """[outputs, inputs]; opaque where it is packed."""
    is_packed: bool


def prepare(weight: Tensor) -> Matrix:
    """Lay out weight [outputs, inputs]; the caller should drop it then."""
    if weight.is_cpu and weight.dtype == torch.bfloat16 and _multiplies_bfloat16():
        return Matrix(torch.ops.mkldnn._reorder_linear_weight(weight, None), True)
    return Matrix(weight, False)


def linear(x: Tensor, matrix: Matrix, bias: Tensor | None) -> Tensor:
    """x W^T + b: x [tokens, inputs], bias [outputs]; the result [tokens, outputs]."""
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
