"""Feed-forward blocks with their weights: gated or not, one or a mixture of experts.

Owns weights in memory. The arithmetic is in gllm/kernels. Does not know layers around it.
"""

from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.activation import activate, gate
from gllm.kernels.experts import Routing, route, run_experts
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
        up = _stacked(described.expert.up, described.count)
        down = _stacked(described.expert.down, described.count)
        inner = described.expert.inner
        gates = [inner] * len(up.names)
        self.up = stacked(up, weights, gates, hidden).view(described.count, 2 * inner, hidden)
        downs = [hidden] * described.count
        self.down = stacked(down, weights, downs, inner).view(described.count, hidden, inner)
        self.shared = MLP(described.shared, weights, hidden) if described.shared else None
        self.shared_gate = (
            Linear(described.shared_gate, weights, [1], hidden) if described.shared_gate else None
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


def _stacked(one: spec.Linear, count: int) -> spec.Linear:
    """The maps of all experts as one."""
    return replace(one, names=tuple(n.format(e) for e in range(count) for n in one.names))
