"""The smallest parts of a model with their weights: linear maps and norms.

Owns weights in memory. The arithmetic is in gllm/kernels. Does not know layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from gllm.kernels.layer_norm import layer_norm
from gllm.kernels.linear import linear, prepare
from gllm.kernels.rms_norm import add_rms_norm, rms_norm
from gllm.kernels.weight_format import Weight
from gllm.models import spec
from gllm.models.loader import Weights


def parts_of(
    described: spec.Linear, weights: Weights, outputs: Sequence[int], inputs: int
) -> list[Tensor]:
    """The weights [outputs, inputs] of several projections, which are one where there is one name
    only; to be copied."""
    names = described.names
    rows = [sum(outputs)] if len(names) == 1 else outputs
    if described.transposed:
        return [weights.read(f"{names[0]}.weight", inputs, sum(rows)).t().contiguous()]
    return weights.parts(names, "weight", rows, inputs)


def matrices_of(
    described: spec.Linear, weights: Weights, outputs: Sequence[int], inputs: int
) -> Sequence[Weight]:
    """As `parts_of`, in the checkpoint's format where weights are to stay so."""
    if described.transposed:
        return parts_of(described, weights, outputs, inputs)
    rows = [sum(outputs)] if len(described.names) == 1 else outputs
    return weights.matrices(described.names, rows, inputs)


def stacked_bias(described: spec.Linear, weights: Weights, outputs: Sequence[int]) -> Tensor | None:
    """Their biases [sum of outputs], where they have some."""
    rows = [sum(outputs)] if len(described.names) == 1 else outputs
    return weights.fused(described.names, "bias", rows) if described.bias else None


class Linear:
    """y = x W^T + b, W stacked from the checkpoint's tensors of several projections."""

    def __init__(
        self,
        described: spec.Linear,
        weights: Weights,
        outputs: Sequence[int],
        inputs: int,
        order: Tensor | None = None,
        exact: bool = False,
    ) -> None:
        """`outputs`: of each projection; `order` [sum of outputs] int64: which stored output each
        one is, where they are stored in another order; `exact`: not to be quantized."""
        quantization = "none" if exact else weights.quantization
        self.bias = stacked_bias(described, weights, outputs)
        if order is None:
            parts = matrices_of(described, weights, outputs, inputs)
            self.matrix = prepare(parts, quantization)
            return
        ordered = torch.cat(parts_of(described, weights, outputs, inputs))[order]
        self.matrix = prepare(ordered, quantization)
        self.bias = None if self.bias is None else self.bias[order]

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, inputs] to [tokens, outputs]."""
        return linear(x, self.matrix, self.bias)


class Norm:
    """RMSNorm or LayerNorm of the last dimension."""

    def __init__(self, described: spec.Norm, weights: Weights, *shape: int) -> None:
        """`shape`: of the scale."""
        self.weight = weights.read(f"{described.name}.weight", *shape)
        if described.offset:
            # A sum that the compute dtype would round: float32 from here on.
            self.weight = self.weight.to(torch.float32) + described.offset
        self.bias = weights.read(f"{described.name}.bias", *shape) if described.bias else None
        self.kind, self.eps = described.kind, described.eps

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., *shape]; the result is alike."""
        if self.kind == "rms":
            return rms_norm(x, self.weight, self.eps)
        return layer_norm(x, self.weight, self.bias, self.eps)

    def after(self, hidden: Tensor, delta: Tensor | None) -> Tensor:
        """The norm of hidden + delta [tokens, size], which hidden becomes."""
        if delta is None:
            return self(hidden)
        if self.kind == "rms":
            return add_rms_norm(hidden, delta, self.weight, self.eps)
        return self(hidden.add_(delta))


def norm_of(described: spec.Norm | None, weights: Weights, *shape: int) -> Norm | None:
    """The norm, where there is one."""
    return None if described is None else Norm(described, weights, *shape)
