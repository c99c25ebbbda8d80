"""Linear layers with one weight per head: y[t, h] = x[t, h] W[h]^T, without biases.

Multi-head latent attention applies its absorbed up projections so. Where compiled kernels exist,
the weights are packed into the panels of `linear_unquantized.py`, and a row's result does not
depend on the batch. Otherwise torch multiplies.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gllm.kernels.linear_unquantized import UnquantizedMatrix, pack_weight
from gllm.kernels.native.library import HeadLinearArguments, library_for


@dataclass(frozen=True, slots=True)
class HeadMatrices:
    """Weights of a linear layer that has a separate matrix for each attention head."""

    weight: Tensor
    """[heads, outputs, inputs], or [heads, padded outputs, inputs] in panels if is_packed."""
    outputs: int
    """Number of outputs per head."""
    is_packed: bool
    """True if the weights are packed for the compiled CPU kernels."""


def prepare_heads(weight: Tensor) -> HeadMatrices:
    """Return a copy of weight [heads, outputs, inputs] in the memory layout of `multiply_heads`."""
    outputs = weight.shape[1]
    packed: list[Tensor] = []
    for head in weight:
        matrix: UnquantizedMatrix | None = pack_weight(head)
        if matrix is None:
            return HeadMatrices(weight.contiguous(), outputs, False)
        packed.append(matrix.weight)
    return HeadMatrices(torch.stack(packed), outputs, True)


def multiply_heads(x: Tensor, matrices: HeadMatrices, out: Tensor | None = None) -> Tensor:
    """Multiply each attention head's part of x by the head's own matrix.

    Maps x [tokens, heads, inputs] to the result [tokens, heads, outputs].

    Args:
        x: elements of a head are contiguous.
        matrices: W of each head.
        out: receives the result if given: [tokens, heads, outputs] of x's dtype, elements of a head
            are contiguous.
    """
    if not matrices.is_packed:
        result = (x.transpose(0, 1) @ matrices.weight.transpose(1, 2)).transpose(0, 1)
        return result if out is None else out.copy_(result)
    library = library_for(x, "linear")
    assert library is not None, "packed by compiled kernels"
    tokens, heads, inputs = x.shape
    if out is None:
        out = library.empty((tokens, heads, matrices.outputs), x.dtype)
    library(
        HeadLinearArguments(
            *(out, x, matrices.weight),
            *(tokens, heads, inputs, matrices.outputs),
            *(*x.stride()[:2], *out.stride()[:2], matrices.weight.stride(0)),
            x.dtype,
        )
    )
    return out
