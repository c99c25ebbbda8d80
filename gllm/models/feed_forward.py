"""Feed-forward blocks with their weights: gated or not, one or a mixture of experts.

Owns weights in memory. The arithmetic is in gllm/kernels. Does not know layers around it.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.activation import activate, gate
from gllm.kernels.experts import Routing, route, run_experts
from gllm.kernels.linear import Matrix, prepare
from gllm.models import spec
from gllm.models.loader import Weights
from gllm.models.parts import Linear, stacked


class MLP:
    """One feed-forward block."""

    def __init__(self, described: spec.MLP, weights: Weights, hidden: int) -> None:
        inner = described.inner
        self.up = Linear(described.up, weights, [inner] * (1 + described.gated), hidden)
        self.down = Linear(described.down, weights, [hidden], inner)
        self.act = gate if described.gated else activate
        self.activation = described.activation

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden]; the result is alike."""
        return self.down(self.act(self.activation, self.up(x)))


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
        expert, inner = described.expert, described.expert.inner
        self.up = _each(expert.up, described.count, weights, [inner, inner], hidden)
        self.down = _each(expert.down, described.count, weights, [hidden], inner)
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
        activation = self.spec.expert.activation
        result = run_experts(x, experts, shares, self.up, self.down, activation)
        if self.shared is None:
            return result
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * self.shared_gate(x).sigmoid()
        return result + shared


def _each(
    one: spec.Linear, count: int, weights: Weights, outputs: list[int], inputs: int
) -> list[Matrix]:
    """The map of each expert."""
    names = (tuple(name.format(expert) for name in one.names) for expert in range(count))
    experts = (stacked(replace(one, names=of_one), weights, outputs, inputs) for of_one in names)
    return [prepare(weight, weights.quantization) for weight in experts]
