"""Figures of a run's micro-batches: sizes, KV cache, arithmetic, time by tokens and operators."""

from array import array
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import isnan, nan
from statistics import fmean
from typing import Any

from gllm.sim.costs.base import CostModel, OperatorCostModel
from gllm.sim.hardware.shapes import ModelShape
from gllm.sim.metrics.micro_batch_table import MicroBatch
from gllm.sim.metrics.statistics import coefficient_of_variation, summary_statistics

MAX_PRICED_BATCHES = 1000
"""Maximum number of micro-batches for which operator times are predicted; shares need no more."""
STEADY_TOKEN_SHARE = 0.8
"""Share of a run's tokens that counts as its steady part: what comes after is a tail of few long
requests, during which no system is at its best."""


def _make_counts() -> "array[int]":
    return array("q")


def _make_figures() -> "array[float]":
    return array("d")


@dataclass
class BatchStatistics:
    """Sizes, compute times and KV usage of all micro-batches of a run, one array per metric."""

    num_tokens: "array[int]" = field(default_factory=_make_counts)
    """Number of tokens of each micro-batch."""
    num_requests: "array[int]" = field(default_factory=_make_counts)
    """Number of sequences in each micro-batch."""
    kv_usage: "array[float]" = field(default_factory=_make_figures)
    """Share of KV blocks in use, 0..1; empty if unknown."""
    stage_seconds: "array[float]" = field(default_factory=_make_figures)
    """Computation time of each micro-batch in seconds, summed over the stages."""
    committed_times: "array[float]" = field(default_factory=_make_figures)
    """Time at which the driver received each result, in seconds; NaN if the run ended before."""
    flops: float = 0.0
    """Floating-point operations of all micro-batches together; 0 if the model's shape is
    unknown."""

    def extend(self, other: "BatchStatistics") -> None:
        """Add the micro-batches of another engine."""
        self.num_tokens += other.num_tokens
        self.num_requests += other.num_requests
        self.kv_usage += other.kv_usage
        self.stage_seconds += other.stage_seconds
        self.committed_times += other.committed_times
        self.flops += other.flops

    def steady_rates(self, begin: float, num_requests: int) -> tuple[float, float]:
        """Return tokens and requests per second while the first 80 % of all tokens were computed.

        Args:
            begin: Time of the first arrival.
            num_requests: Number of requests of the run.
        """
        tokens = sum(self.num_tokens)
        done = 0
        for num_tokens, committed_time in zip(self.num_tokens, self.committed_times, strict=True):
            done += num_tokens
            if done >= STEADY_TOKEN_SHARE * tokens and not isnan(committed_time):
                seconds = committed_time - begin
                return done / seconds, done / tokens * num_requests / seconds
        return 0.0, 0.0

    def seconds_by_tokens(self) -> dict[int, float]:
        """Return the stages' time in micro-batches by number of tokens, rounded up to 2^n."""
        seconds: defaultdict[int, float] = defaultdict(float)
        for tokens, stage_seconds in zip(self.num_tokens, self.stage_seconds, strict=True):
            seconds[1 << max(0, tokens - 1).bit_length()] += stage_seconds
        return dict(sorted(seconds.items()))

    def time_percentile(self, percent: float) -> float | None:
        """Return a percentile (0..100) of tokens per micro-batch, weighted by the stages' time."""
        total = sum(self.stage_seconds)
        done = 0.0
        for tokens, seconds in sorted(zip(self.num_tokens, self.stage_seconds, strict=True)):
            done += seconds
            if total and done >= total * percent / 100:
                return tokens
        return None


def measure_micro_batches(
    micro_batches: Iterable[MicroBatch], shape: ModelShape | None = None
) -> BatchStatistics:
    """Return the sizes, compute times, KV usage and FLOPs of the micro-batches of a run.

    Args:
        micro_batches: All micro-batches of the run.
        shape: Shape of the model, to count FLOPs; None: not counted.
    """
    figures = BatchStatistics()
    for step in micro_batches:
        figures.num_tokens.append(step.work.num_tokens)
        figures.num_requests.append(step.work.num_decodes + len(step.work.prefill_chunks))
        if step.kv_usage is not None:
            figures.kv_usage.append(step.kv_usage)
        figures.stage_seconds.append(
            sum(times.end - times.start for times in step.stage_times if times is not None)
        )
        figures.committed_times.append(nan if step.committed_time is None else step.committed_time)
        if shape is not None:
            figures.flops += shape.step_flops(step.work)
    return figures


def operator_shares(
    micro_batches: Sequence[MicroBatch], num_stages: int, cost: CostModel
) -> dict[str, float]:
    """Return the fraction of the stages' time spent in each operator class, by a cost model.

    At most 1,000 evenly spaced micro-batches are evaluated.

    Args:
        micro_batches: Micro-batches of a run.
        num_stages: Number of pipeline stages.
        cost: Cost model of the run.

    Returns:
        Fraction (0..1) by operator class; empty if the cost model does not predict operators.
    """
    if not isinstance(cost, OperatorCostModel):
        return {}
    seconds: defaultdict[str, float] = defaultdict(float)
    for step in micro_batches[:: 1 + len(micro_batches) // MAX_PRICED_BATCHES]:
        for stage in range(num_stages):
            for name, value in cost.operator_seconds(stage, step.work).items():
                seconds[name] += value
    total = sum(seconds.values())
    return {name: value / total for name, value in sorted(seconds.items())} if total else {}


def summarize_batches(figures: BatchStatistics) -> dict[str, Any]:
    """Return a run's metrics of micro-batches by name: batch sizes, time by batch size, KV usage.

    Args:
        figures: Sizes and times of all micro-batches.
    """
    seconds = figures.seconds_by_tokens()
    summary: dict[str, Any] = {
        "steps": len(figures.num_tokens),
        "tokens_per_step": summary_statistics(figures.num_tokens),
        "tokens_per_step_variation": coefficient_of_variation(figures.num_tokens),
        "seconds_per_step_variation": coefficient_of_variation(figures.stage_seconds),
        "requests_per_step": summary_statistics(figures.num_requests),
        "seconds_by_tokens": {str(tokens): value for tokens, value in seconds.items()},
    }
    for percent in (50, 90):
        summary[f"tokens_by_time_p{percent}"] = figures.time_percentile(percent)
    if figures.kv_usage:
        summary["kv_usage"] = {"mean": fmean(figures.kv_usage), "max": max(figures.kv_usage)}
    return summary
