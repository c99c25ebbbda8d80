"""RMSNorm with a gate, for the outputs of recurrent layers."""

import torch
from torch import Tensor

from gllm.kernels.activation import ACTIVATIONS
from gllm.kernels.native.library import ACTIVATIONS as COMPILED
from gllm.kernels.native.library import SIGMOID, GatedNormArguments, library_for

GATES = {**ACTIVATIONS, "sigmoid": torch.sigmoid}
"""Functions of the gate."""


def gated_rms_norm(
    x: Tensor,
    gate: Tensor,
    weight: Tensor,
    eps: float,
    activation: str = "silu",
    is_gated_first: bool = False,
) -> Tensor:
    """Return RMSNorm(x) * act(gate), or RMSNorm(x * act(gate)), over the last dimension.

    Source: Dao and Gu, "Transformers are SSMs" (2024), section 7.1, for the norm of the gated
    output.

    Args:
        x: [tokens, groups, n], contiguous.
        gate: [tokens, groups * n]; rows may be apart in memory.
        weight: [n], or [groups, n]; of x's dtype or float32.
        eps: added to the mean square.
        activation: a name of GATES.
        is_gated_first: True if the gate is applied before the norm.

    Returns:
        [tokens, groups, n] of x's dtype.
    """
    library = library_for(x, "recurrence")
    number = SIGMOID if activation == "sigmoid" else COMPILED.get(activation)
    if library is not None and number is not None and gate.stride(1) == 1:
        output = library.empty(x.shape, x.dtype)
        tokens, groups, size = x.shape
        weight_groups = weight.numel() // size
        library(
            GatedNormArguments(
                *(x, gate, weight, output),
                *(tokens * groups, groups, weight_groups, size, gate.stride(0)),
                *(eps, is_gated_first, number, weight.dtype == torch.float32, x.dtype),
            )
        )
        return output
    gates = GATES[activation](gate.to(torch.float32)).view(x.shape)
    values = x.to(torch.float32)
    gated = values * gates
    squares = (gated if is_gated_first else values).square()
    factor = (squares.mean(dim=-1, keepdim=True) + eps).rsqrt()
    return (gated * factor * weight).to(x.dtype)
