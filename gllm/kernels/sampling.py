"""Drawing one token for each row of logits.

Owns the arithmetic of temperature, top-k, top-p and min-p. Does not know requests: rows come
planned by `plan_sampling`, logits come masked. What is drawn for a row depends on that row alone,
whatever else is in the batch.

The filters apply in the order temperature, top-k, top-p, min-p; among equal logits they keep those
of smaller ids. A token is found by inverting the cumulative distribution of what is kept, in the
order of ids, at one uniform number per row (Devroye, "Non-Uniform Random Variate Generation"
(1986), section III.2). So a set and a number decide, and no order of sorting does: on GPUs
(triton/sampling.py) nothing is sorted. Top-p: Holtzman et al., "The Curious Case of Neural Text
Degeneration" (2020). Min-p: Nguyen et al., "Turning Up the Heat" (2024).
"""

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.random_numbers import uniform

Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]

WHOLE, NUCLEUS = 0, -1
"""Drawn from the whole vocabulary, with no need to sort; from the nucleus of top-p."""
TOP_P_CANDIDATES = 1024
"""Sorted first for a row with top-p alone; they nearly always hold its whole nucleus."""
SPAN = 512
"""Tokens summed at once on the way to the cumulative distribution of a whole vocabulary."""
SMALLEST = np.finfo(np.float32).tiny
"""The smallest normal float32. Smaller temperatures and top-p values are raised to it: they keep
the same tokens, and arithmetic that flushes denormals does not turn them into 0."""


@dataclass(frozen=True, slots=True)
class RandomRows:
    """Rows that are drawn in one way. Tensors are [rows], int64 or float32."""

    rows: Tensor
    candidates: int
    """At least top-k of each row; WHOLE or NUCLEUS for rows without top-k."""
    temperature: Tensor
    top_k: Tensor
    """0 means off."""
    top_p: Tensor
    """Infinite means off."""
    min_p: Tensor
    number: Tensor
    """float64 in [0, 1): what decides."""

    def pick(self, chosen: Tensor) -> "RandomRows":
        """Those where `chosen` [rows] bool holds."""
        columns = (self.temperature, self.top_k, self.top_p, self.min_p, self.number)
        kept = (column[chosen] for column in columns)
        return RandomRows(self.rows[chosen], self.candidates, *kept)


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How each row of a batch is drawn."""

    greedy: Tensor
    """[greedy rows] int64."""
    random: list[RandomRows]
    settings: Tensor
    """[3, rows] float32, for a GPU: temperature, top-p (infinite means off), min-p."""
    counters: Tensor
    """[4, rows] int64, for a GPU: top-k (0 means off), seed, choice, index."""
    filters: bool
    """Whether a row has top-k or top-p."""

    def for_gpu(self) -> "SamplingPlan":
        """The same without what a GPU does not read: less to be copied there."""
        return replace(self, greedy=self.greedy[:0], random=[])


def plan_sampling(
    temperature: Floats,
    top_k: Ints,
    top_p: Floats,
    min_p: Floats,
    seed: Ints,
    choice: Ints,
    index: Ints,
) -> SamplingPlan:
    """Sort rows by the way they are drawn; all arguments [rows].

    temperature 0 is greedy whatever the rest, top_k 0 and top_p 1 are off; a top_p that rounds to 0
    keeps the best token. seed, choice (of its request) and index (of the token in the output) are
    the counters of the random number.
    """
    top_p = np.maximum(top_p, SMALLEST)
    temperature = np.where(temperature > 0, np.maximum(temperature, SMALLEST), temperature)
    # Powers of two, so that few groups arise, and so that a row's group is its own affair.
    by_k = 2 ** np.ceil(np.log2(np.maximum(top_k, 1))).astype(np.int64)
    candidates = np.where(top_k > 0, by_k, np.where(top_p < 1, NUCLEUS, WHOLE))
    limit = np.where(top_p < 1, top_p, np.float32(np.inf))
    is_random = temperature > 0
    groups = []
    for count in np.unique(candidates[is_random]).tolist():
        rows = np.flatnonzero(is_random & (candidates == count))
        group = RandomRows(
            rows=torch.from_numpy(rows),
            candidates=count,
            temperature=torch.from_numpy(temperature[rows]),
            top_k=torch.from_numpy(top_k[rows]),
            top_p=torch.from_numpy(limit[rows]),
            min_p=torch.from_numpy(min_p[rows]),
            number=uniform(*(torch.from_numpy(word[rows]) for word in (seed, choice, index))),
        )
        groups.append(group)
    return SamplingPlan(
        torch.from_numpy(np.flatnonzero(~is_random)),
        groups,
        torch.from_numpy(np.stack((temperature, limit, min_p)).astype(np.float32, copy=False)),
        torch.from_numpy(np.stack((top_k, seed, choice, index))),
        any(group.candidates != WHOLE for group in groups),
    )


def sample(logits: Tensor, plan: SamplingPlan) -> Tensor:
    """Token ids [rows] int64 from logits [rows, vocabulary] float32, -inf where forbidden."""
    if logits.is_cuda:
        from gllm.kernels.triton import sampling

        return sampling.sample(logits, plan)
    if not plan.random:
        return likeliest(logits)
    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    if len(plan.greedy):
        tokens[plan.greedy] = likeliest(logits[plan.greedy])
    for group in plan.random:
        tokens[group.rows] = _draw(logits[group.rows], group)
    return tokens


def likeliest(logits: Tensor) -> Tensor:
    """Index [rows] of the largest of logits [rows, vocabulary], the first where several are."""
    if logits.is_cpu:
        # numpy compares whole vectors of floats where torch goes one by one: 14 times the speed.
        return torch.from_numpy(logits.numpy().argmax(axis=-1))
    return logits.argmax(dim=-1)


def all_finite(logits: Tensor) -> list[bool]:
    """Whether all logits of each row of [rows, vocabulary], on the CPU, are finite.

    On one thread: a second thread that forks would have OpenMP count more threads than cores and
    put those of the stage's arithmetic to sleep at each of their barriers.
    """
    array = logits.numpy()
    finite = np.isfinite(array.min(axis=-1)) & np.isfinite(array.max(axis=-1))
    return finite.tolist()


def finite_rows(logits: Tensor) -> Tensor:
    """As `all_finite` on any device, [rows] bool; nobody waits for it."""
    # Both in one pass: logits are the largest tensor of a decode step.
    least, largest = logits.aminmax(dim=-1)
    return torch.isfinite(least) & torch.isfinite(largest)


def _draw(logits: Tensor, group: RandomRows) -> Tensor:
    """Tokens [rows] for logits [rows, vocabulary], which are overwritten."""
    # Relative to the maximum before the division: a tiny temperature cannot overflow.
    logits -= logits.amax(dim=-1, keepdim=True)
    if group.candidates != WHOLE:
        # One more than can be kept, to see whether the last that is kept has an equal.
        count = TOP_P_CANDIDATES if group.candidates == NUCLEUS else group.candidates
        return _draw_kept(logits, group, count + 1)
    weights = logits.div_(group.temperature[:, None]).exp_()
    weights.masked_fill_(weights < group.min_p[:, None], 0)
    return _invert_whole(weights, group.number)


def _draw_kept(logits: Tensor, group: RandomRows, count: int) -> Tensor:
    """Tokens [rows] for logits [rows, vocabulary] relative to their maxima, among what top-k and
    top-p keep; the `count` likeliest tokens are looked at first."""
    temperature = group.temperature[:, None]
    is_all = count >= logits.shape[1]
    if is_all:
        likeliest, ids = logits.sort(dim=-1, descending=True, stable=True)
    else:
        likeliest, ids = logits.topk(count, dim=-1)
    weights = (likeliest / temperature).exp_()
    if group.candidates == NUCLEUS:
        total = _cumulative_spans(_spans((logits / temperature).exp_()))[:, -1:]
    else:
        ranks = torch.arange(weights.shape[1], device=weights.device)
        weights.masked_fill_(ranks >= group.top_k[:, None], 0)
        total = weights.sum(dim=-1, keepdim=True, dtype=torch.float64)
    before = functional.pad(weights.cumsum(dim=-1, dtype=torch.float64)[:, :-1], (1, 0))
    # The likeliest token always stays: nothing is before it.
    weights.masked_fill_(before >= group.top_p[:, None] * total, 0)
    kept = (weights > 0).sum(dim=-1, keepdim=True)
    weights.masked_fill_(weights < group.min_p[:, None], 0)
    if is_all:
        # Back to their places: cheaper than to sort them again.
        return _invert(torch.zeros_like(logits).scatter_(1, ids, weights), group.number)
    width = max(int(kept.max()), 1)
    ids, order = ids[:, :width].sort(dim=-1)
    column = _invert(weights.gather(1, order), group.number)
    tokens = ids.gather(1, column[:, None])[:, 0]
    # Equal to the first that is dropped, or the last that was looked at: others may be equal.
    last = likeliest.gather(1, (kept - 1).clamp_min(0))
    unsure = (last == likeliest.gather(1, kept.clamp_max(count - 1)))[:, 0]
    if bool(unsure.any()):
        rest = group.pick(unsure)
        tokens[unsure] = _draw_kept(logits[unsure], rest, logits.shape[1])
    return tokens


def _invert(weights: Tensor, number: Tensor) -> Tensor:
    """Indices [rows] at which the cumulative share of weights [rows, n] passes number [rows]."""
    cumulative = weights.cumsum(dim=-1, dtype=torch.float64)
    return _passed(cumulative, number[:, None] * cumulative[:, -1:])


def _passed(cumulative: Tensor, target: Tensor) -> Tensor:
    """First index of cumulative [rows, n] above target [rows, 1], one of positive weight always."""
    above = torch.searchsorted(cumulative, target, right=True)
    last = torch.searchsorted(cumulative, cumulative[:, -1:].contiguous())
    return torch.minimum(above, last)[:, 0]


def _invert_whole(weights: Tensor, number: Tensor) -> Tensor:
    """As `_invert` for a whole vocabulary: spans first, then tokens within the span.

    Summing spans is several times faster than a cumulative sum over everything.
    """
    spans = _spans(weights)
    sums = _cumulative_spans(spans)
    target = number[:, None] * sums[:, -1:]
    span = _passed(sums, target)[:, None]
    before = functional.pad(sums[:, :-1], (1, 0)).gather(1, span)
    inside = spans.take_along_dim(span[:, :, None], dim=1)[:, 0]
    token = _passed(inside.cumsum(dim=-1, dtype=torch.float64), target - before)
    return span[:, 0] * SPAN + token


def _spans(weights: Tensor) -> Tensor:
    """weights [rows, vocabulary] as [rows, spans, SPAN], padded with zeros."""
    return functional.pad(weights, (0, -weights.shape[1] % SPAN)).unflatten(1, (-1, SPAN))


def _cumulative_spans(spans: Tensor) -> Tensor:
    """Weight up to the end of each span, [rows, spans] float64.

    Short sums, so that no row is summed by several threads, in an order that the batch decides.
    """
    return spans.sum(dim=-1).cumsum(dim=-1, dtype=torch.float64)
