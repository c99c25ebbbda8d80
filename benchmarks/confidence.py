"""Spread of measured figures: confidence intervals and ranges."""

import math
from collections.abc import Sequence
from statistics import median


def median_interval(values: Sequence[float], confidence: float = 0.95) -> tuple[float, float]:
    """Return a distribution-free confidence interval of the median.

    The bounds are order statistics: the k-th smallest and k-th largest value, with the largest k
    for which a binomial(n, 1/2) count lies outside with probability at most 1 - confidence. Fewer
    than six values do not reach 95 %; the interval is then their full range.

    Source: Conover, "Practical Nonparametric Statistics", 3rd edition, section 3.2.

    Args:
        values: At least one measurement.
        confidence: Coverage probability, in (0, 1).

    Raises:
        ValueError: There are no values.
    """
    if not values:
        raise ValueError("a confidence interval needs at least one value")
    ordered, count = sorted(values), len(values)
    rank, tail = 0, 0.0
    while rank < (count - 1) // 2:
        tail += math.comb(count, rank) / 2**count
        if 2 * tail > 1 - confidence:
            break
        rank += 1
    rank = max(rank, 1)
    return ordered[rank - 1], ordered[count - rank]


def format_range(values: Sequence[float], digits: int = 3) -> str:
    """Return the median of values, with the least and the greatest."""
    figures = [f"{each:.{digits}f}" for each in (median(values), min(values), max(values))]
    return "{} ({} to {})".format(*figures)
