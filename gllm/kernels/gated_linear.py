"""Two linear maps of which one gates the other: act(x G^T + b) * (x U^T + c).

Owns how the two are computed together: where kernels are compiled, a gate and what it gates are
both at hand as sums and only their product is written. Does not know where weights come from.

Source: Shazeer, "GLU Variants Improve Transformer" (2020), equations 5 and 6.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from gllm.kernels.activation import gate
from gllm.kernels.fp8_weights import Fp8Matrix
from gllm.kernels.linear import (
    Matrix,
    PlainMatrix,
    linear,
    multiply_packed,
    packed_in_turns,
    prepare,
)
from gllm.kernels.native.library import ACTIVATIONS


@dataclass(frozen=True, slots=True)
class GatedMatrix:
    """Both weights, ready to be multiplied by, and the activation of the first."""

    both: Matrix
    bias: Tensor | None
    """[2 * outputs]: the gates' first."""
    activation: str


def prepare_gated(
    weight: Tensor | Sequence[Tensor] | Sequence[Fp8Matrix],
    bias: Tensor | None,
    activation: str,
    quantization: str = "none",
) -> GatedMatrix:
    """weight [2 * outputs, inputs] and bias [2 * outputs], the gates first; the weight whole, or
    both halves; in 8-bit floats always as parts. It is copied. activation: of activation.py."""
    halves = weight.chunk(2) if isinstance(weight, Tensor) else weight
    floats = [half for half in halves if isinstance(half, Tensor)]
    both: Matrix | None = None
    if quantization == "none" and activation in ACTIVATIONS and floats:
        both = packed_in_turns(*floats)
    return GatedMatrix(both or prepare(halves, quantization), bias, activation)


def gated_linear(x: Tensor, matrix: GatedMatrix) -> Tensor:
    """x [tokens, inputs]; the result [tokens, outputs]."""
    both = matrix.both
    if isinstance(both, PlainMatrix) and both.is_gated:
        return multiply_packed(x, both, matrix.bias, gate=ACTIVATIONS[matrix.activation])
    return gate(matrix.activation, linear(x, both, matrix.bias))
