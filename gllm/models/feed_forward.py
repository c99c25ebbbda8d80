"""Feed-forward blocks with their weights: gated or not, one or a mixture of experts.

Owns weights in memory. The arithmetic is in gllm/kernels. Does not know layers around it.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from gllm.kernels.activation import apply_activation
from gllm.kernels.experts import (
    Routing,
    StackedExperts,
    route,
    run_experts,
    run_stacked,
    stack,
)
from gllm.kernels.gated_linear import GatedMatrix, gated_linear, prepare_gated
from gllm.kernels.linear import linear, prepare
from gllm.kernels.weight_format import Matrix
from gllm.models import spec
from gllm.models.errors import ModelError
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
        return self.down(apply_activation(self.activation, self.up(x)))


def gated(described: spec.MLP, weights: Weights, hidden: int) -> GatedMatrix:
    """The maps of a gated block up to its gate."""
    outputs = [described.inner, described.inner]
    parts = matrices_of(described.up, weights, outputs, hidden)
    bias = stacked_bias(described.up, weights, outputs)
    whole = parts[0] if len(parts) == 1 else None
    halves = whole if isinstance(whole, Tensor) else parts
    return prepare_gated(halves, bias, described.activation, weights.quantization)


SingleExperts = tuple[Sequence[GatedMatrix], Sequence[Matrix]]
"""The maps of each expert up to its gate, and down."""


def single(experts: Sequence[spec.MLP], weights: Weights, hidden: int) -> SingleExperts:
    """The weights of experts, each by itself."""
    up = [gated(one, weights, hidden) for one in experts]
    parts = (matrices_of(one.down, weights, [hidden], one.inner) for one in experts)
    return up, [prepare(part, weights.quantization) for part in parts]


def stacked(experts: Sequence[spec.MLP], weights: Weights, hidden: int) -> StackedExperts:
    """The weights of experts that have the same shapes and no biases, in one tensor of a kind.

    Raises ModelError where they are not stored alike.
    """
    inner, activation = experts[0].inner, experts[0].activation
    up = (matrices_of(one.up, weights, [inner, inner], hidden) for one in experts)
    down = (matrices_of(one.down, weights, [hidden], inner) for one in experts)
    try:
        return StackedExperts(stack(len(experts), up), stack(len(experts), down), activation)
    except ValueError as error:
        raise ModelError(f"{experts[0].up.names[0]}: {error}") from error


class Experts:
    """A mixture of experts, those that all tokens share included."""

    def __init__(self, described: spec.Experts, weights: Weights, hidden: int) -> None:
        self.spec = described
        router = weights.read_exact(f"{described.router.names[0]}.weight", described.count, hidden)
        # Not a BLAS's product: which experts a token takes must not depend on its batch.
        self.router = prepare([router])
        self.correction: Tensor | None = None
        if described.correction is not None:
            self.correction = weights.read_exact(described.correction, described.count)
        self.routing = Routing(
            described.active,
            described.scores,
            described.normalize,
            described.scale,
            described.groups,
            described.active_groups,
            described.group_score,
        )
        numbered = [expert_of(described.expert, expert) for expert in range(described.count)]
        self.experts: StackedExperts | SingleExperts
        # Kernels for GPUs read stacks; those for CPUs lay out each weight by itself.
        if router.is_cuda and weights.quantization == "none" and not described.expert.up.bias:
            self.experts = stacked(numbered, weights, hidden)
        else:
            self.experts = single(numbered, weights, hidden)
        self.shared = MLP(described.shared, weights, hidden) if described.shared else None
        self.shared_gate = (
            Linear(described.shared_gate, weights, [1], hidden, exact=True)
            if described.shared_gate
            else None
        )

    def __call__(self, x: Tensor) -> Tensor:
        """x [tokens, hidden]; the result is alike."""
        logits = linear(x.to(torch.float32), self.router, None)
        experts, shares = route(logits, self.routing, self.correction)
        if isinstance(self.experts, StackedExperts):
            result = run_stacked(x, experts, shares, self.experts)
        else:
            result = run_experts(x, experts, shares, *self.experts)
        if self.shared is None:
            return result
        shared = self.shared(x)
        if self.shared_gate is not None:
            shared = shared * self.shared_gate(x).sigmoid()
        return result + shared


def expert_of(described: spec.MLP, expert: int) -> spec.MLP:
    """The block of one expert, by its tensors' names."""

    def named(maps: spec.Linear) -> spec.Linear:
        return replace(maps, names=tuple(name.format(expert) for name in maps.names))

    return replace(described, up=named(described.up), down=named(described.down))
