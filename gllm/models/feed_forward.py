"""Feed-forward blocks with their weights: gated or not, one or a mixture of experts.

Owns weights in memory. The arithmetic is in gllm/kernels. Does not know layers around it.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.activation import activate
from gllm.kernels.experts import Routing, route, run_experts
from gllm.kernels.gated_linear import GatedMatrix, gated_linear, prepare_gated
from gllm.kernels.linear import prepare
from gllm.models import spec
from gllm.models.loader import Weights
from gllm.models.parts import Linear, matrices_of, stacked_bias


class MLP:
    """One feed-forward block."""

    def __init__(self, described: spec.MLP, weights: Weights, hidden: int) -> None:
        inner, self.activation = described.inner, described.activation
        self.up: Linear | GatedMatrix
        if described.gated:
            self.up = gated(described, weights, hidden)
        else:
            self.up = Linear(described.up, weights, [inner], hidden)
        self.down = Linear(described.down, weights, [hidden], inner)

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden]; the result is alike."""
        if isinstance(self.up, GatedMatrix):
            return self.down(gated_linear(x, self.up))
        return self.down(activate(self.activation, self.up(x)))


def gated(described: spec.MLP, weights: Weights, hidden: int) -> GatedMatrix:
    """The maps of a gated block up to its gate."""
    outputs = [described.inner, described.inner]
    parts = matrices_of(described.up, weights, outputs, hidden)
    bias = stacked_bias(described.up, weights, outputs)
    whole = parts[0] if len(parts) == 1 else None
    halves = whole if isinstance(whole, Tensor) else parts
    return prepare_gated(halves, bias, described.activation, weights.quantization)


class Experts:
    """A mixture of experts, those that all tokens share included."""

    def __init__(self, described: spec.Experts, weights: Weights, hidden: int) -> None:
        self.spec = described
        self.router = weights.read_exact(
            f"{described.router.names[0]}.weight", described.count, hidden
        )
        self.correction: Tensor | None = None
        if described.correction is not None:
            self.correction = weights.read_exact(described.correction, described.count)
        self.routing = Routing(
            described.active,
            described.scores == "sigmoid",
            described.normalize,
            described.scale,
            described.groups,
            described.active_groups,
            described.group_score == "best two",
        )
        numbered = [_numbered(described.expert, expert) for expert in range(described.count)]
        self.up = [gated(expert, weights, hidden) for expert in numbered]
        self.down = [
            prepare(matrices_of(one.down, weights, [hidden], one.inner), weights.quantization)
            for one in numbered
        ]
        self.shared = MLP(described.shared, weights, hidden) if described.shared else None
        self.shared_gate = (
            Linear(described.shared_gate, weights, [1], hidden, exact=True)
            if described.shared_gate
            else None
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden]; the result is alike."""
        logits = functional.linear(x.to(torch.float32), self.router)
        experts, shares = route(logits, self.routing, self.correction)
        result = run_experts(x, experts, shares, self.up, self.down)
        if self.shared is None:
            return result
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * self.shared_gate(x).sigmoid()
        return result + shared


def _numbered(described: spec.MLP, expert: int) -> spec.MLP:
    """The block of one expert, by its tensors' names."""

    def named(maps: spec.Linear) -> spec.Linear:
        return replace(maps, names=tuple(name.format(expert) for name in maps.names))

    return replace(described, up=named(described.up), down=named(described.down))
