"""Mixtures of experts: which experts a token goes to, and what they compute.

Owns routing and the grouped products. Does not know how experts are stored in files.

Sources: Fedus, Zoph and Shazeer, "Switch Transformers" (2022), section 2; DeepSeek-AI,
"DeepSeek-V2" (2024), section 2.2.2 (groups); DeepSeek-AI, "DeepSeek-V3" (2024), equation 16
(correction).
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gllm.kernels.fp8_weights import Fp8Matrix, Fp8Stack
from gllm.kernels.gated_linear import GatedMatrix, gated_linear
from gllm.kernels.linear import Matrix, linear, plain
from gllm.kernels.linear_fp8 import stack_fp8


@dataclass(frozen=True, slots=True)
class Routing:
    """How experts are picked from the router's logits."""

    active: int
    sigmoid: bool
    """Scores are sigmoids; else a softmax over all experts."""
    normalize: bool
    scale: float
    groups: int = 1
    active_groups: int = 1
    best_two: bool = False
    """A group is judged by the sum of its best two scores, not by its best."""


def route(logits: Tensor, routing: Routing, correction: Tensor | None) -> tuple[Tensor, Tensor]:
    """Experts [tokens, active] int64 and their weights, float32, from logits [tokens, experts].

    correction [experts] float32 is added to scores where they pick, not where they weigh.
    """
    logits = logits.to(torch.float32)
    scores = logits.sigmoid() if routing.sigmoid else logits.softmax(dim=-1)
    picking = scores if correction is None else scores + correction
    if routing.groups > routing.active_groups:
        picking = _only_best_groups(picking, routing)
    experts = picking.topk(routing.active, dim=-1).indices
    weights = scores.gather(1, experts)
    if routing.normalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return experts, weights * routing.scale


def _only_best_groups(scores: Tensor, routing: Routing) -> Tensor:
    """scores [tokens, experts], -inf outside of the best groups."""
    grouped = scores.unflatten(1, (routing.groups, -1))
    judged = grouped.topk(2 if routing.best_two else 1, dim=-1).values.sum(dim=-1)
    best = judged.topk(routing.active_groups, dim=-1).indices
    outside = torch.ones_like(judged, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(outside[:, :, None], -torch.inf).flatten(1)


def run_experts(
    x: Tensor,
    experts: Tensor,
    weights: Tensor,
    up: Sequence[GatedMatrix],
    down: Sequence[Matrix],
) -> Tensor:
    """Weighted sum of what its experts make of each token; x [tokens, hidden], the result alike.

    experts and weights [tokens, active], as `route` gives them; up [2 * inner, hidden] of each
    expert; down [hidden, inner] of each. Tokens are gathered expert by expert, and
    each token's parts are added in the order of its experts' numbers, whatever else is in the
    batch.
    """
    order = experts.flatten().argsort(stable=True)
    tokens = order // experts.shape[1]
    counts = torch.bincount(experts.flatten(), minlength=len(up)).tolist()
    flat = weights.flatten()
    result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    begin = 0
    for expert, count in enumerate(counts):
        if not count:
            continue
        rows = tokens[begin : begin + count]
        made = linear(gated_linear(x[rows], up[expert]), down[expert], None).to(torch.float32)
        result.index_add_(0, rows, made * flat[order[begin : begin + count], None])
        begin += count
    return result.to(x.dtype)


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """The weights of all experts, each kind in one tensor, as kernels for GPUs read them."""

    up: Tensor | Fp8Stack
    """[experts, 2 * inner, hidden]: the gates first."""
    down: Tensor | Fp8Stack
    """[experts, hidden, inner]."""
    activation: str
    """Of activation.py."""


def stack(
    count: int, experts: Iterable[Sequence[Tensor] | Sequence[Fp8Matrix]]
) -> Tensor | Fp8Stack:
    """The weights of `count` experts, given one by one as parts [outputs, inputs] that lie one
    below the other; those in 8-bit floats stay so.

    Raises ValueError where experts have weights of different shapes, types or blocks.
    """
    floats: list[Tensor] = []
    scales: list[Tensor] = []
    like: Fp8Matrix | None = None
    for number, parts in enumerate(experts):
        eights = [part for part in parts if isinstance(part, Fp8Matrix)]
        one = stack_fp8(eights) if eights else None
        if number and (one is None) != (like is None):
            raise ValueError("experts of one layer are in 8-bit floats in part only")
        whole = torch.cat([*parts]) if one is None else one.codes.view(torch.uint8)
        if not floats:
            like, floats = one, [whole.new_empty(count, *whole.shape)]
        if whole.shape != floats[0].shape[1:]:
            raise ValueError("experts of one layer have weights of different shapes")
        floats[0][number] = whole
        if one is not None and like is not None:
            if (one.rows, one.columns) != (like.rows, like.columns):
                raise ValueError("experts of one layer have blocks of different sizes")
            scales.append(one.scales)
    if like is None:
        return floats[0]
    codes = floats[0].view(like.codes.dtype)
    return Fp8Stack(codes, torch.stack(scales), like.rows, like.columns, like.dtype)


def run_stacked(x: Tensor, experts: Tensor, weights: Tensor, stacked: StackedExperts) -> Tensor:
    """As `run_experts`; on GPUs without waiting for which experts were picked."""
    up, down, activation = stacked.up, stacked.down, stacked.activation
    if x.is_cuda:
        from gllm.kernels.triton import experts as gpu

        return gpu.run_experts(x, experts, weights, up, down, activation)
    count = up.shape[0]
    gated = [GatedMatrix(_matrix(up, number), None, activation) for number in range(count)]
    return run_experts(x, experts, weights, gated, [_matrix(down, one) for one in range(count)])


def _matrix(weights: Tensor | Fp8Stack, expert: int) -> Matrix:
    return weights[expert] if isinstance(weights, Fp8Stack) else plain(weights[expert])
