"""Stability of a simulated system: does the number of requests in it grow during a run?

A stable queue fluctuates, also far above its mean, and starts empty, so that later requests wait
longer than the first ones. Growth is therefore tested against the fluctuations of the run itself.
"""

from collections.abc import Sequence
from math import sqrt
from typing import Any, NamedTuple

import numpy as np

NUM_INTERVALS = 20
"""Intervals of a run whose changes are compared with each other."""
MIN_DEVIATIONS = 3.5
"""Growth in standard errors from which a run counts as growing. A queue at exactly its capacity
exceeds it in 0.3 % of runs, one below it less often."""
MIN_GROWTH = 3.0
"""Least growth, in requests: a few more of them are no queue."""
MSER_BATCH = 5
"""Requests that the truncation rule averages."""
MIN_RAMPS = 3.0
"""Least length of a run, in times that a request takes in the system while it is still empty: a
system fills during the first of them, whatever its load."""

LAG = 4
"""Requests between two values that are compared: engines finish several requests at once."""

Floats = np.ndarray[Any, np.dtype[np.float64]]


class NumberSeries(NamedTuple):
    """Number of requests in a system that each request of a run finds at its arrival."""

    arrivals: Floats
    """Times in seconds, ascending."""
    counts: Floats
    """Requests that have arrived before and have not finished."""
    mean_sojourn: float
    """Mean seconds from arrival to finish, of the requests that finish."""
    ramp_seconds: float
    """The same for the first tenth of the requests, which find few others."""


def num_in_system(arrivals: Sequence[float], finishes: Sequence[float]) -> NumberSeries:
    """Return the number of requests in the system that each request finds at its arrival.

    Args:
        arrivals: Arrival of each request in seconds, ascending.
        finishes: Time at which each has left; infinite for one that never does.

    Raises:
        ValueError: There are no requests.
    """
    if not len(arrivals):
        raise ValueError("a run without requests has no stability: simulate at least 1")
    begins, ends = np.asarray(arrivals, np.float64), np.asarray(finishes, np.float64)
    counts = np.arange(len(begins)) - np.searchsorted(np.sort(ends), begins, "right")
    sojourns = ends - begins
    finite = sojourns[np.isfinite(sojourns)]
    first = sojourns[: max(1, len(sojourns) // 10)]
    first = first[np.isfinite(first)]
    return NumberSeries(
        begins,
        counts.astype(np.float64),
        float(finite.mean()) if len(finite) else np.inf,
        float(first.mean()) if len(first) else np.inf,
    )


def warm_up_length(values: Floats) -> int:
    """Return how many of the first values belong to the warm-up, at most half of them.

    The truncation minimizes the standard error of the mean of the remaining values (MSER-5). A run
    begins empty, so first values above the mean of the others are a busy period and no warm-up.
    """
    num_batches = len(values) // MSER_BATCH
    if num_batches < 4:
        return 0
    means = values[: num_batches * MSER_BATCH].reshape(num_batches, MSER_BATCH).mean(axis=1)
    left = np.arange(num_batches, 0, -1)
    total, square = (np.cumsum(row[::-1])[::-1] for row in (means, means * means))
    errors = (square - total * total / left) / (left * left)
    first = int(np.argmin(errors[: num_batches // 2 + 1])) * MSER_BATCH
    return first if first and values[:first].mean() < values[first:].mean() else 0


def is_growing(series: NumberSeries, first: int = 0) -> bool:
    """Return True if the number of requests in the system grows, in a run that is long enough.

    Args:
        series: Numbers of a run.
        first: Length of the warm-up in requests.
    """
    seconds = series.arrivals[-1] - series.arrivals[0]
    return bool(seconds >= MIN_RAMPS * series.ramp_seconds) and has_growth(series.counts[first:])


def has_growth(counts: Floats) -> bool:
    """Return True if the numbers grow: the interval of their growth lies above 0.

    Their changes over equal parts of the run are taken as independent, as they are in an overloaded
    queue. Those of a stable queue cancel each other, so that the test errs towards stability there.

    Args:
        counts: Number of requests in a system, or of those that wait, in the order of arrival.
    """
    if len(counts) <= NUM_INTERVALS:
        return False
    points = counts[np.linspace(0, len(counts) - 1, NUM_INTERVALS + 1).round().astype(int)]
    changes = np.diff(points)
    error = float(changes.std(ddof=1)) / sqrt(NUM_INTERVALS)
    growth = float(points[-1] - points[0])
    return growth >= MIN_GROWTH and growth / NUM_INTERVALS > MIN_DEVIATIONS * error


def slope_deviations(counts: Floats) -> float:
    """Return the slope of the numbers over the run in standard errors of a straight line.

    Neighbouring values depend on each other, so a stable run has a steep slope by chance more often
    than the figure suggests: enough to doubt a run, too little to call it overloaded.
    """
    size = len(counts) // NUM_INTERVALS
    if not size:
        return np.inf
    means = counts[: size * NUM_INTERVALS].reshape(NUM_INTERVALS, size).mean(axis=1)
    places = np.arange(NUM_INTERVALS) - (NUM_INTERVALS - 1) / 2
    slope = float(places @ means / (places @ places))
    rest = means - means.mean() - slope * places
    error = sqrt(float(rest @ rest) / (NUM_INTERVALS - 2) / float(places @ places))
    return slope / error if error else np.inf * slope if slope else 0.0


def count_relaxations(counts: Floats) -> float:
    """Return the length of a run in relaxation times of its queue.

    A queue near its capacity is a random walk: with a variance v it takes 4 v / s requests to
    forget its length, where s is the variance of the change per request. The fluctuations of
    arrivals alone, without a queue, are Poisson's, whose variance is their mean: of these only a
    quarter of the variance counts. Some of it does, as a short run of a queue may vary as little.
    """
    if len(counts) <= LAG:
        return 0.0
    variance = float(counts.var())
    queue = max(variance - float(counts.mean()), variance / 4)
    step = float(((counts[LAG:] - counts[:-LAG]) ** 2).mean()) / LAG
    return len(counts) * step / (4 * queue) if queue else np.inf
