"""Activation functions of feed-forward blocks, plain and gated."""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.native.library import ACTIVATIONS as COMPILED
from gllm.kernels.native.library import SIGMOID, ActivateArguments, GateArguments, library_for


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
    """Apply the activation function `kind`, such as "silu", to each element of x [rows, n]."""
    compiled = COMPILED.get(kind)
    result = None if compiled is None else _activate_native(x, compiled)
    return ACTIVATIONS[kind](x) if result is None else result


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) for each element of x [rows, n]."""
    result = _activate_native(x, SIGMOID)
    return x.sigmoid() if result is None else result


def _activate_native(x: Tensor, kind: int) -> Tensor | None:
    """Return an activation of x [rows, n] by the compiled kernel; None if torch computes it.

    torch computes the last elements of a tensor, those that do not fill a vector, by another
    function than the others, so that a row's result depends on the rows after it. The kernel
    computes each row alone.
    """
    library = library_for(x, "gate")
    if library is None or not x.is_contiguous():
        return None
    output = library.empty(x.shape, x.dtype)
    library(ActivateArguments(x, output, *x.shape, kind, x.dtype))
    return output


def act_and_mul(kind: str, gate_up: Tensor) -> Tensor:
    """Multiply the activated gate projection by the up projection, as in SwiGLU and GeGLU.

    kind is the name of the activation, for example "silu". gate_up [tokens, 2 * n] has the gate in
    the first n columns and the up projection in the others. The result is act(gate) * up, [tokens,
    n].

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), equations 5 and 6.
    """
    if gate_up.is_cuda:
        from gllm.kernels.triton import activation as gpu

        return gpu.act_and_mul(kind, gate_up)
    library = library_for(gate_up, "gate")
    if library is not None and kind in COMPILED and gate_up.is_contiguous():
        tokens, size = len(gate_up), gate_up.shape[1] // 2
        output = library.empty((tokens, size), gate_up.dtype)
        library(GateArguments(gate_up, output, tokens, size, COMPILED[kind], gate_up.dtype))
        return output
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS[kind](gate).mul_(up)
