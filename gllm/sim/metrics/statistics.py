"""Statistics of lists of figures."""

from collections.abc import Sequence

import numpy as np

PERCENTS = (50, 90, 99)
"""Percentiles of each metric."""


def summary_statistics(values: Sequence[float]) -> dict[str, float]:
    """Return the mean and percentiles of values by name; empty without values.

    Percentiles are interpolated linearly.
    """
    if not len(values):
        return {}
    # numpy, because a run has an inter-token latency for each of millions of tokens.
    ordered = np.sort(np.asarray(values, np.float64))
    statistics = {"mean": float(ordered.mean())}
    for percent in PERCENTS:
        position = (len(ordered) - 1) * percent / 100
        below = int(position)
        low, high = ordered[below], ordered[min(below + 1, len(ordered) - 1)]
        statistics[f"p{percent}"] = float(low + (high - low) * (position - below))
    return statistics


def coefficient_of_variation(values: Sequence[float]) -> float:
    """Return the standard deviation of values divided by their mean; 0 without values."""
    figures = np.asarray(values, np.float64)
    mean = float(figures.mean()) if len(figures) else 0.0
    return float(figures.std()) / mean if mean else 0.0
