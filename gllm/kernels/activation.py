"""Activation functions of feed-forward blocks, plain and gated."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.native.library import ACTIVATIONS as COMPILED
from gllm.kernels.native.library import DTYPES, GateArguments, data_pointer, library_for


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "relu": torch.relu,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
}
"""Source of both GELUs: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), section 2."""


def apply_activation(kind: str, x: Tensor) -> Tensor:
    """Return the activation of x, elementwise."""
    return ACTIVATIONS[kind](x)


def act_and_mul(kind: str, gate_up: Tensor) -> Tensor:
    """Return act(gate) * up, [tokens, n], for gate_up [tokens, 2 * n] with gate in the first half.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), equations 5 and 6.
    """
    if gate_up.is_cuda:
        from gllm.kernels.triton import activation as gpu

        return gpu.act_and_mul(kind, gate_up)
    library = library_for(gate_up, "gate")
    if library is not None and kind in COMPILED and gate_up.is_contiguous():
        tokens, size = len(gate_up), gate_up.shape[1] // 2
        output = library.empty((tokens, size), gate_up.dtype)
        flags = (COMPILED[kind], DTYPES[gate_up.dtype], torch.get_num_threads())
        library(GateArguments(data_pointer(gate_up), data_pointer(output), tokens, size, *flags))
        return output
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[kind](gate).mul_(up)
