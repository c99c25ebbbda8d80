"""Distributions of a length in tokens: fixed, uniform, Zipf and lognormal."""

import math
import random
from bisect import bisect_left
from collections.abc import Callable
from functools import cache
from itertools import accumulate
from statistics import NormalDist
from typing import NamedTuple

NORMAL = NormalDist()
BISECTION_STEPS = 100
"""Halvings of an interval in which a parameter is searched; more than a double can resolve."""


def _normal_cdf(value: float) -> float:
    """Return the normal distribution function, precise far below zero too."""
    return math.erfc(-value / math.sqrt(2)) / 2


class TruncatedLognormal(NamedTuple):
    """Lognormal distribution restricted to lengths up to `most`."""

    mu: float
    """Mean of the logarithm, before truncation."""
    sigma: float
    """Standard deviation of the logarithm, before truncation."""
    most: float
    """Longest length in tokens."""

    @staticmethod
    def from_quantiles(median: float, p90: float, most: float) -> "TruncatedLognormal":
        """Return the distribution whose median and 90th percentile, after truncation, are these.

        Without truncation sigma is ln(p90 / median) / 1.2816. With a share c of the lognormal
        below `most`, the two percentiles are its quantiles 0.5 c and 0.9 c.

        Raises:
            ValueError: No lognormal has these percentiles below `most`.
        """

        def fit(share: float) -> TruncatedLognormal:
            low, high = NORMAL.inv_cdf(0.5 * share), NORMAL.inv_cdf(0.9 * share)
            sigma = math.log(p90 / median) / (high - low)
            return TruncatedLognormal(math.log(median) - sigma * low, sigma, most)

        low, high = 1e-9, 1.0
        for _ in range(BISECTION_STEPS):
            middle = (low + high) / 2
            # The share below `most` of the fitted distribution exceeds the assumed one where the
            # assumed one is too small.
            low, high = (middle, high) if fit(middle).share > middle else (low, middle)
        fitted = fit(high)
        if not math.isclose(fitted.quantile(0.9), p90, rel_tol=1e-3):
            raise ValueError(f"no lognormal below {most} has median {median} and p90 {p90}")
        return fitted

    @staticmethod
    def from_mean(mean: float, sigma: float, most: float) -> "TruncatedLognormal":
        """Return the distribution of this sigma whose mean, after truncation, is `mean`.

        Raises:
            ValueError: The mean is not below `most`.
        """
        if not 0 < mean < most:
            raise ValueError(f"mean is {mean}, but has to be above 0 and below {most}")
        low = math.log(mean) - sigma**2
        high = math.log(most) + sigma**2 * most / (most - mean)
        for _ in range(BISECTION_STEPS):
            middle = (low + high) / 2
            is_below = TruncatedLognormal(middle, sigma, most).mean < mean
            low, high = (middle, high) if is_below else (low, middle)
        return TruncatedLognormal(high, sigma, most)

    @property
    def share(self) -> float:
        """Share of the lognormal below `most`."""
        return _normal_cdf((math.log(self.most) - self.mu) / self.sigma)

    @property
    def mean(self) -> float:
        """Mean in tokens."""
        bound = (math.log(self.most) - self.mu) / self.sigma
        untruncated = math.exp(self.mu + self.sigma**2 / 2)
        return untruncated * _normal_cdf(bound - self.sigma) / _normal_cdf(bound)

    def quantile(self, share: float) -> float:
        """Return the length, in tokens, below which a share of all lengths lies, 0 < share < 1."""
        return math.exp(self.mu + self.sigma * NORMAL.inv_cdf(share * self.share))

    def sample(self, rng: random.Random) -> int:
        """Sample a length, at least 1."""
        # The share is never 0 or 1, whose quantiles are infinite.
        return max(1, round(self.quantile((rng.getrandbits(52) + 0.5) / 2**52)))


def _fixed(rng: random.Random, values: list[float]) -> int:
    return round(values[0])


def _uniform(rng: random.Random, values: list[float]) -> int:
    return rng.randint(round(values[0]), round(values[1]))


def _lognormal(rng: random.Random, values: list[float]) -> int:
    """By median and 90th percentile, cut off at the third value."""
    median, p90, most = values
    sigma = math.log(p90 / median) / 1.2816
    while (draw := round(rng.lognormvariate(math.log(median), sigma))) > round(most):
        pass
    return max(1, draw)


@cache
def _zipf_weights(exponent: float, most: int) -> list[float]:
    return list(accumulate(rank**-exponent for rank in range(1, most + 1)))


def _zipf(rng: random.Random, values: list[float]) -> int:
    """Lengths 1 .. second value, the k-th with weight k ** -first value."""
    weights = _zipf_weights(values[0], round(values[1]))
    return bisect_left(weights, rng.random() * weights[-1]) + 1


class LengthDistribution(NamedTuple):
    """A distribution of one length."""

    values: tuple[str, ...]
    """Names of the numbers that describe it."""
    sound: Callable[[list[float]], bool]
    """Return True if the numbers describe lengths of at least 1."""
    draw: Callable[[random.Random, list[float]], int]


LENGTH_DISTRIBUTIONS = {
    "fixed": LengthDistribution(("LENGTH",), lambda v: v[0] >= 1, _fixed),
    "uniform": LengthDistribution(("LOW", "HIGH"), lambda v: 1 <= v[0] <= v[1], _uniform),
    "lognormal": LengthDistribution(
        ("MEDIAN", "P90", "MOST"), lambda v: 1 <= v[0] <= min(v[1:]), _lognormal
    ),
    "zipf": LengthDistribution(("EXPONENT", "MOST"), lambda v: v[0] > 0 and v[1] >= 1, _zipf),
}
"""By name; `fixed:512,128` describes two lengths."""


def parse_numbers(text: str) -> list[float]:
    """Return the finite numbers between commas; empty if a part is not a finite number."""
    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        return []
    return values if all(map(math.isfinite, values)) else []
