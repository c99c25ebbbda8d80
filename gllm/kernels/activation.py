"""Activation functions of feed-forward blocks, plain and gated."""

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.native.library import ACTIVATIONS as COMPILED
from gllm.kernels.native.library import (
    NO_ACTIVATION,
    SIGMOID,
    SOFTPLUS,
    ActivateArguments,
    GateArguments,
    KernelLibrary,
    library_for,
)
from gllm.kernels.native.program import launch_host_function


def _gelu_tanh(x: Tensor) -> Tensor:
    return functional.gelu(x, approximate="tanh")


def _squared_relu(x: Tensor) -> Tensor:
    """Source: So et al., "Primer" (2021), section 3."""
    return torch.relu(x).square()


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "relu": torch.relu,
    "relu2": _squared_relu,
    "gelu": functional.gelu,
    "gelu_tanh": _gelu_tanh,
}
"""Source of both GELUs: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), section 2."""

SWIGLU_OAI = "swiglu_oai"
"""The clamped SwiGLU of gpt-oss, which exists in gated layers only: (up + 1) * gate * sigmoid(alpha
* gate). Source: OpenAI, "gpt-oss-120b & gpt-oss-20b Model Card" (2025), section 2.2, and the
implementation published with it."""
SWIGLU_OAI_LIMIT = 7.0
"""Limit of its gate from above, and of the up projection's magnitude."""
SWIGLU_OAI_ALPHA = 1.702
"""Alpha, the factor of the gate in its sigmoid."""


def apply_gate(kind: str, gate: Tensor, up: Tensor) -> Tensor:
    """Return act(gate) * up with torch, [tokens, n] as both arguments; see `act_and_mul`."""
    if kind != SWIGLU_OAI:
        return ACTIVATIONS[kind](gate).mul_(up)
    gate = gate.clamp(max=SWIGLU_OAI_LIMIT)
    up = up.clamp(-SWIGLU_OAI_LIMIT, SWIGLU_OAI_LIMIT)
    return gate * torch.sigmoid(SWIGLU_OAI_ALPHA * gate) * (up + 1)


def apply_activation(kind: str, x: Tensor) -> Tensor:
    """Apply the activation function `kind`, such as "silu", to each element of x [rows, n]."""
    compiled = COMPILED.get(kind)
    result = None if compiled is None else _activate_native(x, compiled)
    return launch_host_function(ACTIVATIONS[kind], x) if result is None else result


XIELU_BETA = 0.5
"""Slope of xIELU at 0."""
XIELU_EPS = -1e-6
"""Largest argument of its exponential."""


def xielu(x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Apply xIELU, whose curvature is learned, to each element of x [rows, n].

    Source: Huang and Schlag, "Deriving Activation Functions Using Integration" (2024), equation 9.

    Args:
        x: [rows, n].
        positive: [1] float32, learned parameter for positive elements; its softplus counts.
        negative: [1] float32, learned parameter for the others.
    """
    return launch_host_function(partial(_xielu, positive=positive, negative=negative), x)


def _xielu(x: Tensor, positive: Tensor, negative: Tensor) -> Tensor:
    """Return xIELU; the arguments are those of `xielu`."""
    y = x.to(torch.float32)
    above = functional.softplus(positive) * y * y
    below = (torch.expm1(y.clamp(max=XIELU_EPS)) - y) * (XIELU_BETA + functional.softplus(negative))
    return (torch.where(y > 0, above, below) + XIELU_BETA * y).to(x.dtype)


def sigmoid(x: Tensor) -> Tensor:
    """Return 1 / (1 + exp(-x)) for each element of x [rows, n]."""
    result = _activate_native(x, SIGMOID)
    return x.sigmoid() if result is None else result


def softplus(x: Tensor) -> Tensor:
    """Return log(1 + exp(x)) for each element of x [rows, n], computed in float32."""
    result = _activate_native(x, SOFTPLUS)
    return functional.softplus(x.to(torch.float32)).to(x.dtype) if result is None else result


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
    n]; SWIGLU_OAI also changes the up projection.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), equations 5 and 6.
    """
    if gate_up.is_cuda:
        from gllm.kernels.triton import activation as gpu

        return gpu.act_and_mul(kind, gate_up)
    gate, up = gate_up.chunk(2, dim=-1)
    library = library_for(gate_up, "gate")
    if library is not None and kind in COMPILED and gate_up.is_contiguous():
        return _gate_native(library, gate, up, COMPILED[kind])
    return launch_host_function(partial(apply_gate, kind), gate, up)


def multiply_by_sigmoid(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * sigmoid(gate), of x [rows, n] and gate [rows, n].

    Rows may be apart in memory. Source: Qiu et al., "Gated Attention for Large Language Models"
    (2025), section 2.2, for the output of attention.
    """
    library = library_for(x, "gate")
    if library is not None and x.stride(1) == gate.stride(1) == 1:
        return _gate_native(library, gate, x, SIGMOID)
    return x * gate.sigmoid()


def multiply_by_silu(x: Tensor, gate: Tensor) -> Tensor:
    """Return x * silu(gate), both [rows, n]; rows may be apart in memory."""
    library = library_for(x, "gate")
    if library is not None and x.stride(1) == gate.stride(1) == 1:
        return _gate_native(library, gate, x, COMPILED["silu"])
    return x * functional.silu(gate)


def multiply(x: Tensor, y: Tensor) -> Tensor:
    """Return x * y, both [rows, n]; rows may be apart in memory."""
    library = library_for(x, "gate")
    if library is not None and x.stride(1) == y.stride(1) == 1:
        return _gate_native(library, y, x, NO_ACTIVATION)
    return x * y


def _gate_native(library: KernelLibrary, gate: Tensor, up: Tensor, kind: int) -> Tensor:
    """Return act(gate) * up, both [rows, n], by the compiled kernel."""
    output = library.empty(up.shape, up.dtype)
    rows = gate.stride(0), up.stride(0)
    library(GateArguments(gate, up, output, *up.shape, *rows, kind, up.dtype))
    return output
