"""Gated linear units: act(x G^T + b) * (x U^T + c).

A weight format may compute both projections and their product in one kernel, which writes the
product only.

Source: Shazeer, "GLU Variants Improve Transformer" (2020), equations 5 and 6.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gllm.kernels.activation import apply_activation
from gllm.kernels.linear import linear
from gllm.kernels.weight_format import UNQUANTIZED, Matrix, Weight, select_format, weight_format


@dataclass(frozen=True, slots=True)
class GatedMatrix:
    """Gate and up projection of a gated MLP (such as SwiGLU) as one matrix, with the activation."""

    gate_up: Matrix
    """Gate and up projections as one matrix."""
    bias: Tensor | None
    """[2 * outputs]: the gate's first."""
    activation: str
    """A name of `gllm.kernels.activation`."""


def prepare_gated(
    weight: Tensor | Sequence[Weight],
    bias: Tensor | None,
    activation: str,
    quantization: str = UNQUANTIZED,
) -> GatedMatrix:
    """Merge the gate and up projections of a gated MLP into one matrix for `gated_linear`.

    The result is a copy.

    Args:
        weight: [2 * outputs, inputs], the gate's outputs first, or gate and up as two parts.
            Quantized weights of a checkpoint are always passed as parts.
        bias: [2 * outputs].
        activation: a name of `gllm.kernels.activation`.
        quantization: as in `gllm.kernels.linear.prepare`.
    """
    halves = weight.chunk(2) if isinstance(weight, Tensor) else weight
    target, parts = select_format(halves, quantization)
    return GatedMatrix(target.prepare_gated(parts, activation), bias, activation)


def gated_linear(x: Tensor, matrix: GatedMatrix) -> Tensor:
    """Return act(gate(x)) * up(x), [tokens, outputs], of x [tokens, inputs]."""
    gate_up = matrix.gate_up
    multiply = weight_format(gate_up.format).multiply_gated
    return multiply(x, gate_up, matrix.bias, matrix.activation)


@dataclass(frozen=True, slots=True)
class ActivatedMatrix:
    """Up projection of an MLP without a gate, with the activation."""

    up: Matrix
    bias: Tensor | None
    """[outputs]."""
    activation: str
    """A name of `gllm.kernels.activation`."""


def inner_linear(x: Tensor, matrix: GatedMatrix | ActivatedMatrix) -> Tensor:
    """Return the inner elements of an MLP, [tokens, outputs], of x [tokens, inputs]."""
    if isinstance(matrix, GatedMatrix):
        return gated_linear(x, matrix)
    return apply_activation(matrix.activation, linear(x, matrix.up, matrix.bias))
