"""The smallest parts of a model with their weights: linear maps and norms.

Owns weights in memory. The arithmetic is in gllm/kernels. Does not know layers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.layer_norm import layer_norm
from gllm.kernels.rms_norm import rms_norm
from gllm.models import spec
from gllm.models.loader import Weights


class Linear:
    """y = x W^T + b, W stacked from the checkpoint's tensors of several projections."""

    def __init__(
        self, described: spec.Linear, weights: Weights, outputs: Sequence[int], inputs: int
    ) -> None:
        """`outputs`: of each projection; they share one tensor where there is one name only."""
        names = described.names
        rows = [sum(outputs)] if len(names) == 1 else outputs
        if described.transposed:
            stored = weights.read(f"{names[0]}.weight", inputs, sum(rows))
            self.weight = stored.t().contiguous()
        else:
            self.weight = weights.fused(names, "weight", rows, inputs)
        self.bias = weights.fused(names, "bias", rows) if described.bias else None

    def reorder(self, rows: Tensor) -> None:
        """Put the outputs into the order that `rows` [outputs] int64 gives."""
        self.weight = self.weight[rows]
        if self.bias is not None:
            self.bias = self.bias[rows]

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, inputs] to [tokens, outputs]."""
        return functional.linear(x, self.weight, self.bias)


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


def norm_of(described: spec.Norm | None, weights: Weights, *shape: int) -> Norm | None:
    """The norm, where there is one."""
    return None if described is None else Norm(described, weights, *shape)
