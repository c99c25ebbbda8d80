"""Statistics of lists of figures."""

from collections.abc import Sequence
from statistics import fmean, pstdev

from gllm.observability.latency import percentile

PERCENTS = (50, 90, 99)
"""Percentiles of each metric."""


def summary_statistics(values: Sequence[float]) -> dict[str, float]:
    """Return mean and percentiles; nothing if there are no values."""
    if not values:
        return {}
    ordered = sorted(values)  # Only once: sorting it again takes no time.
    return {"mean": fmean(ordered), **{f"p{p}": percentile(ordered, p) for p in PERCENTS}}


def coefficient_of_variation(values: Sequence[float]) -> float:
    """Return standard deviation over mean; 0 if there are no values."""
    mean = fmean(values) if values else 0.0
    return pstdev(values) / mean if mean else 0.0
