"""Sampling of one token per row of logits, with temperature, top-k, top-p and min-p.

Rows are planned by `plan_sampling`; logits are already masked. The token of a row depends on that
row alone, not on the rest of the batch.

The filters apply in the order temperature, top-k, top-p, min-p; among equal logits they keep the
smaller ids. The token is found by inverting the cumulative distribution of the kept tokens, in the
order of ids, at one uniform number per row (Devroye, "Non-Uniform Random Variate Generation"
(1986), section III.2). The result therefore does not depend on how equal logits are sorted; on GPUs
(triton/sampling.py) nothing is sorted. Top-p: Holtzman et al., "The Curious Case of Neural Text
Degeneration" (2020). Min-p: Nguyen et al., "Turning Up the Heat" (2024).
"""

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.sampling_plan import (
    TOP_P_NUCLEUS,
    WHOLE_VOCABULARY,
    RandomSamplingGroup,
    SamplingPlan,
)

TOP_P_CANDIDATES = 1024
"""Tokens that are sorted first for a row with top-p alone: nearly always the whole nucleus."""
SPAN_TOKENS = 512
"""Tokens per partial sum of the cumulative distribution over a whole vocabulary."""


def sample(logits: Tensor, plan: SamplingPlan) -> Tensor:
    """Sample one token id per row of logits, [rows] int64, with each row's sampling parameters.

    logits: [rows, vocabulary] float32; -inf means that a token is banned.
    """
    if logits.is_cuda:
        from gllm.kernels.triton import sampling

        return sampling.sample(logits, plan)
    if not plan.random:
        return argmax_rows(logits)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(plan.greedy):
        tokens[plan.greedy] = argmax_rows(logits[plan.greedy])
    for group in plan.random:
        tokens[group.rows] = _sample_group(logits[group.rows], group)
    return tokens


def argmax_rows(logits: Tensor) -> Tensor:
    """Return the index of the largest logit of each row, [rows]; the first one among equals."""
    if logits.is_cpu:
        # 14 times as fast as torch, whose argmax on CPUs is not vectorized.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def list_finite_rows(logits: Tensor) -> list[bool]:
    """Return a list with True for each row of logits that has only finite values.

    logits: [rows, vocabulary] on the CPU. Runs on one thread, without helpers of OpenMP, which
    would spin on cores that the next step needs.
    """
    array = logits.numpy()
    finite = np.isfinite(array.min(axis=-1)) & np.isfinite(array.max(axis=-1))
    return finite.tolist()


def find_finite_rows(logits: Tensor) -> Tensor:
    """Return a tensor [rows] bool: True for each row of logits that has only finite values.

    Unlike `list_finite_rows`, it works on a GPU and does not synchronize with it.
    """
    # One pass for both: logits are the largest tensor of a decode step.
    least, largest = logits.aminmax(dim=-1)
    return torch.isfinite(least) & torch.isfinite(largest)


def _sample_group(logits: Tensor, group: RandomSamplingGroup) -> Tensor:
    """Sample tokens [rows] from logits [rows, vocabulary], which are overwritten."""
    # Relative to the maximum before the division: a tiny temperature cannot overflow.
    logits -= logits.amax(dim=-1, keepdim=True)
    if group.candidates != WHOLE_VOCABULARY:
        # One more than can be kept, to detect tokens equal to the last kept one.
        count = TOP_P_CANDIDATES if group.candidates == TOP_P_NUCLEUS else group.candidates
        return _sample_filtered(logits, group, count + 1)
    weights = logits.div_(group.temperature[:, None]).exp_()
    weights.masked_fill_(weights < group.min_p[:, None], 0)
    return _invert_whole(weights, group.number)


def _sample_filtered(logits: Tensor, group: RandomSamplingGroup, count: int) -> Tensor:
    """Sample tokens [rows] from logits [rows, vocabulary] with top-k or top-p.

    logits are relative to their maxima. The `count` likeliest tokens are tried first; rows for
    which they do not suffice are repeated with the whole vocabulary.
    """
    temperature = group.temperature[:, None]
    is_all = count >= logits.shape[1]
    if is_all:
        likeliest, ids = logits.sort(dim=-1, descending=True, stable=True)
    else:
        likeliest, ids = logits.topk(count, dim=-1)
    weights = (likeliest / temperature).exp_()
    if group.candidates == TOP_P_NUCLEUS:
        total = _cumulative_spans(_spans((logits / temperature).exp_()))[:, -1:]
    else:
        ranks = torch.arange(weights.shape[1], device=weights.device)
        weights.masked_fill_(ranks >= group.top_k[:, None], 0)
        total = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    before = functional.pad(weights.cumsum(dim=-1, dtype=torch.float64)[:, :-1], (1, 0))
    # The likeliest token is always kept: the sum before it is 0.
    weights.masked_fill_(before >= group.top_p[:, None] * total, 0)
    kept = (weights > 0).sum(dim=-1, keepdim=True)
    weights.masked_fill_(weights < group.min_p[:, None], 0)
    if is_all:
        # Scattering back by id is cheaper than sorting again.
        return _invert_cumulative(torch.zeros_like(logits).scatter_(1, ids, weights), group.number)
    width = max(int(kept.max()), 1)
    ids, order = ids[:, :width].sort(dim=-1)
    column = _invert_cumulative(weights.gather(1, order), group.number)
    tokens = ids.gather(1, column[:, None])[:, 0]
    # The last kept logit equals the first dropped one: further logits may be equal.
    last = likeliest.gather(1, (kept - 1).clamp_min(0))
    unsure = (last == likeliest.gather(1, kept.clamp_max(count - 1)))[:, 0]
    if bool(unsure.any()):
        rest = group.select(unsure)
        tokens[unsure] = _sample_filtered(logits[unsure], rest, logits.shape[1])
    return tokens


def _invert_cumulative(weights: Tensor, number: Tensor) -> Tensor:
    """Return indices [rows] where the cumulative share of weights [rows, n] exceeds number."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    return _passed(cumulative, number[:, None] * cumulative[:, -1:])


def _passed(cumulative: Tensor, target: Tensor) -> Tensor:
    """Return the first index of cumulative [rows, n] above target [rows, 1].

    The weight at the index is always positive.
    """
    above = torch.searchsorted(cumulative, target, right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(above, last)[:, 0]


def _invert_whole(weights: Tensor, number: Tensor) -> Tensor:
    """Invert over a whole vocabulary: find the span first, then the token within it.

    Sums per span are several times faster than a cumulative sum over the vocabulary.
    """
    spans = _spans(weights)
    sums = _cumulative_spans(spans)
    target = number[:, None] * sums[:, -1:]
    span = _passed(sums, target)[:, None]
    before = functional.pad(sums[:, :-1], (1, 0)).gather(1, span)
    inside = spans.take_along_dim(span[:, :, None], dim=1)[:, 0]
    token = _passed(inside.cumsum(dim=-1, dtype=torch.float64), target - before)
    return span[:, 0] * SPAN_TOKENS + token


def _spans(weights: Tensor) -> Tensor:
    """Reshape weights [rows, vocabulary] to [rows, spans, SPAN_TOKENS], zero-padded."""
    return functional.pad(weights, (0, -weights.shape[1] % SPAN_TOKENS)).unflatten(
        1, (-1, SPAN_TOKENS)
    )


def _cumulative_spans(spans: Tensor) -> Tensor:
    """Return the weight up to the end of each span, [rows, spans] float64.

    The sums are short, so that no row is summed by several threads in an order that depends on the
    batch.
    """
    return spans.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
