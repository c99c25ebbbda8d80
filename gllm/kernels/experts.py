"""Mixture of experts: routing of tokens to experts, and the grouped feed-forward products.

Sources: Fedus, Zoph and Shazeer, "Switch Transformers" (2022), section 2; DeepSeek-AI,
"DeepSeek-V2" (2024), section 2.2.2 (groups); DeepSeek-AI, "DeepSeek-V3" (2024), equation 16
(correction bias).
"""

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, pairwise
from typing import Any, Literal

import torch
from torch import Tensor

from gllm.kernels.activation import sigmoid
from gllm.kernels.fp8_weights import Fp8Stack
from gllm.kernels.gated_linear import ActivatedMatrix, GatedMatrix, inner_linear
from gllm.kernels.grouped_words import GroupedStack
from gllm.kernels.linear import linear, row_magnitudes
from gllm.kernels.weight_format import UNQUANTIZED, Matrix, Weight, format_of, select_format


@dataclass(frozen=True, slots=True)
class Routing:
    """Settings of a mixture-of-experts router: how experts are scored, grouped and selected."""

    top_k: int
    """Experts per token."""
    scoring: Literal["softmax", "sigmoid", "sparse mixer"]
    """Function from logits to scores; the softmax is over all experts."""
    renormalize: bool
    """True if the weights of a token's experts are divided by their sum."""
    scaling_factor: float
    """Factor on the weights of the selected experts."""
    num_groups: int = 1
    """Number of equal groups that the experts are divided into; 1 means no groups."""
    top_k_groups: int = 1
    """Number of groups, the best ones, from which a token's experts are selected."""
    group_scoring: Literal["best", "best two"] = "best"
    """Score of a group: that of its best expert, or the sum of its best two."""
    jitter: float = 0.0
    """Width of the sparse mixer's ties."""
    selects_by_logits: bool = False
    """True if experts are selected by their logits, not by their scores."""


def route(
    logits: Tensor, routing: Routing, correction_bias: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Select the top-k experts of each token and compute their weights.

    Args:
        logits: [tokens, experts], from the router.
        routing: scoring function, number of experts and groups.
        correction_bias: [experts] float32, added for the selection only.

    Returns:
        Expert ids [tokens, top_k] int64, and their weights, float32 of the same shape.
    """
    logits = logits.to(torch.float32)
    if routing.scoring == "sparse mixer":
        return _mix_sparsely(logits, routing)
    scores = sigmoid(logits) if routing.scoring == "sigmoid" else logits.softmax(dim=-1)
    selection = logits if routing.selects_by_logits else scores
    selection = selection if correction_bias is None else selection + correction_bias
    if routing.num_groups > routing.top_k_groups:
        selection = _mask_groups(selection, routing)
    expert_ids = selection.topk(routing.top_k, dim=-1).indices
    weights = scores.gather(1, expert_ids)
    if routing.renormalize:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + 1e-20)
    return expert_ids, weights * routing.scaling_factor


def _mix_sparsely(logits: Tensor, routing: Routing) -> tuple[Tensor, Tensor]:
    """Select experts one after another; the weight of each is its share among those about as good.

    Source: Liu, Gao and Chen, "Sparse Backpropagation for MoE Training" (2023); Phi-3.5-MoE.
    """
    ids, weights = [], []
    remaining = logits
    for _ in range(routing.top_k):
        best, expert = remaining.max(dim=-1, keepdim=True)
        distance = (best - logits) / torch.maximum(logits.abs(), best)
        shares = remaining.masked_fill(distance > 2 * routing.jitter, -torch.inf).softmax(dim=-1)
        ids.append(expert)
        weights.append(shares.gather(1, expert))
        remaining = remaining.scatter(1, expert, -torch.inf)
    return torch.cat(ids, dim=1), torch.cat(weights, dim=1)


def _mask_groups(scores: Tensor, routing: Routing) -> Tensor:
    """Return scores [tokens, experts], -inf outside of the best groups."""
    grouped = scores.unflatten(1, (routing.num_groups, -1))
    num_best = 2 if routing.group_scoring == "best two" else 1
    group_scores = grouped.topk(num_best, dim=-1).values.sum(dim=-1)
    best = group_scores.topk(routing.top_k_groups, dim=-1).indices
    is_masked = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, best, False)
    return grouped.masked_fill(is_masked[:, :, None], -torch.inf).flatten(1)


def run_experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Sequence[GatedMatrix | ActivatedMatrix],
    down: Sequence[Matrix],
    down_bias: Tensor | None = None,
    out: Tensor | None = None,
    reduce_magnitudes: Callable[[Tensor], Tensor] | None = None,
    skipped: Container[int] = (),
) -> Tensor:
    """Run each token's selected experts and return their weighted sum, [tokens, hidden].

    Tokens are gathered expert by expert. The outputs for a token are added in the order of the
    expert ids, so that its result does not depend on the rest of the batch.

    Args:
        x: [tokens, hidden].
        expert_ids: [tokens, top_k], from `route`.
        expert_weights: [tokens, top_k], from `route`.
        gate_up: gate and up projection of each expert, [2 * intermediate, hidden], or the up
            projection of experts without a gate.
        down: [hidden, intermediate] of each expert.
        down_bias: [experts, hidden].
        out: [tokens, hidden] float32: receives the sum without rounding and is returned, if each
            tensor-parallel rank has only some of the intermediate elements.
        reduce_magnitudes: returns the maximum over the ranks of row magnitudes [tokens * top_k];
            only if each rank has some of the intermediate elements and the format of `down`
            quantizes activations with one scale per row.
        skipped: experts that are left out of the sum, because another device runs them.
    """
    order = expert_ids.flatten().argsort(stable=True)
    tokens = order // expert_ids.shape[1]
    ends = torch.bincount(expert_ids.flatten(), minlength=len(gate_up)).cumsum(0).tolist()
    spans = [
        (expert, slice(begin, end))
        for expert, (begin, end) in enumerate(pairwise([0, *ends]))
        if begin < end and expert not in skipped
    ]
    flat_weights = expert_weights.flatten()[order]
    inner: Iterable[Tensor] = (
        inner_linear(x[tokens[span]], gate_up[expert]) for expert, span in spans
    )
    magnitudes = None
    if reduce_magnitudes is not None and spans:
        # All experts at once: ranks agree in one exchange.
        inner = list(inner)
        magnitudes = reduce_magnitudes(torch.cat([row_magnitudes(rows, down[0]) for rows in inner]))
    if out is None:
        result = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    else:
        result = out.zero_()
    for (expert, span), gated in zip(spans, inner, strict=True):
        output = None if out is None else torch.empty_like(out[: len(gated)])
        scales = None if magnitudes is None else magnitudes[span]
        bias = None if down_bias is None else down_bias[expert]
        output = linear(gated, down[expert], bias, output, scales)
        weighted = output.to(torch.float32) * flat_weights[span, None]
        result.index_add_(0, tokens[span], weighted)
    return result.to(x.dtype) if out is None else result


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Weights of all experts of a layer, each projection stacked in one tensor, for GPU kernels."""

    gate_up_proj: Tensor | Fp8Stack | GroupedStack
    """[experts, 2 * intermediate, hidden]: the gates' outputs first."""
    down_proj: Tensor | Fp8Stack | GroupedStack
    """[experts, hidden, intermediate]."""
    activation: str
    """A name of `gllm.kernels.activation`."""
    gate_up_bias: Tensor | None = None
    """[experts, 2 * intermediate]."""
    down_bias: Tensor | None = None
    """[experts, hidden]."""


def stack_experts(
    num_experts: int, experts: Iterable[Sequence[Weight]], quantization: str = UNQUANTIZED
) -> Any:
    """Stack the weights of all experts along a new first dimension.

    Args:
        num_experts: number of items of `experts`.
        experts: parts [outputs, inputs] of each expert, to be stacked along the outputs.
        quantization: as in `gllm.kernels.linear.prepare`.

    Raises:
        ValueError: experts have weights of different shapes, formats or blocks.
    """
    iterator = iter(experts)
    first = next(iterator)
    weight_format, _ = select_format(first, quantization)

    def parts() -> Iterator[Sequence[Weight]]:
        for expert in chain([first], iterator):
            own, converted = select_format(expert, quantization)
            if own is not weight_format:
                raise ValueError("experts of one layer have weights in different formats")
            yield converted

    return weight_format.stack(num_experts, parts())


def run_stacked(
    x: Tensor, expert_ids: Tensor, expert_weights: Tensor, stacked: StackedExperts
) -> Tensor:
    """Run each token's selected experts with stacked weights; return the sum [tokens, hidden].

    The result is that of `run_experts`. On GPUs the host does not wait for the expert ids.

    Args:
        x: [tokens, hidden].
        expert_ids: [tokens, top_k], from `route`.
        expert_weights: [tokens, top_k], from `route`.
        stacked: weights of all experts.
    """
    up, down, activation = stacked.gate_up_proj, stacked.down_proj, stacked.activation
    if x.is_cuda:
        from gllm.kernels.triton import experts as gpu

        biases = stacked.gate_up_bias, stacked.down_bias
        return gpu.run_experts(x, expert_ids, expert_weights, up, down, activation, biases=biases)
    up_format, down_format = format_of(up), format_of(down)
    experts = range(up.shape[0])
    bias = stacked.gate_up_bias
    gate_up = [
        GatedMatrix(
            up_format.select_expert(up, expert), None if bias is None else bias[expert], activation
        )
        for expert in experts
    ]
    return run_experts(
        x,
        expert_ids,
        expert_weights,
        gate_up,
        [down_format.select_expert(down, expert) for expert in experts],
        stacked.down_bias,
    )
