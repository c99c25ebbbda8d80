"""Rate of arrivals since its last lasting change, found by cumulative sums.

Arrivals are counted in bins. A cumulative sum (CUSUM) of log-likelihood ratios tests the present
rate against higher and lower ones; a sum above a threshold is a change point, and only the bins
after the sum was last zero count from then on.

Sources: Page, "Continuous inspection schemes" (Biometrika, 1954); "Aladdin" (arXiv 2405.06856)
refits its rule for the number of workers after change points, and uses the rule at rates from
which the relative error of the mean is small.
"""

from collections import deque
from math import log, sqrt
from typing import NamedTuple

BIN_SECONDS = 1.0
"""Least time that the arrivals of one test cover."""
RATIOS = (2.0, 8.0, 0.5)
"""Alternative rates per present rate."""
THRESHOLD = 12.0
"""Log-likelihood ratio of a change point: one is true by chance less than once per hour."""
MAX_RELATIVE_ERROR = 0.05
"""Relative standard error of the mean rate that is aimed at: more arrivals are not kept."""
ENOUGH_ARRIVALS = 1.0 / MAX_RELATIVE_ERROR**2
"""Poisson arrivals that give the mean rate this error."""
MAX_SECONDS = 900.0
"""Longest time over which a rate is averaged."""


def least_stable_rate(heartbeat_seconds: float) -> float:
    """Return the least arrival rate per second whose mean over a time is accurate enough.

    It is R in the paper: at this rate the relative standard error sigma / (mu sqrt(n)) of n Poisson
    arrivals is MAX_RELATIVE_ERROR.

    Args:
        heartbeat_seconds: time over which arrivals are counted.
    """
    return ENOUGH_ARRIVALS / heartbeat_seconds


class _Bin(NamedTuple):
    """Arrivals of a short time."""

    seconds: float
    num_arrivals: int


class _Sum:
    """Cumulative sum of the test against one alternative."""

    def __init__(self, ratio: float) -> None:
        self.ratio = ratio
        self.value = 0.0
        self.num_bins = 0
        """Bins since the sum was zero."""

    def add(self, arrivals: _Bin, rate: float) -> bool:
        """Add a bin; return True at a change point."""
        ratio = arrivals.num_arrivals * log(self.ratio)
        self.value += ratio - (self.ratio - 1) * rate * arrivals.seconds
        self.num_bins += 1
        if self.value <= 0:
            self.value, self.num_bins = 0.0, 0
        return self.value > THRESHOLD


class ArrivalRate:
    """Estimates the rate of request arrivals since its last lasting change (CUSUM test).

    Reads no clock: time is an argument.

    Args:
        now: time in seconds from which arrivals are counted.
    """

    def __init__(self, now: float) -> None:
        self.num_changes = 0
        """Change points so far."""
        self._bins: deque[_Bin] = deque()
        self._seconds = 0.0
        self._count = 0
        """Arrivals of the bins."""
        self._open_since = now
        self._open_count = 0
        self._sums = [_Sum(ratio) for ratio in RATIOS]

    @property
    def num_arrivals(self) -> int:
        """Number of arrivals in the estimate."""
        return self._count

    @property
    def rate(self) -> float:
        """Mean arrivals per second since the last change point; 0 before the first bin ends."""
        return self._count / self._seconds if self._seconds else 0.0

    def bound(self, z: float) -> float:
        """Return the rate plus `z` standard errors; at least 0."""
        if not self._seconds:
            return 0.0
        margin = z * sqrt(self._count + (1 if z > 0 else 0))
        return max(0.0, (self._count + margin) / self._seconds)

    def slope(self, z: float = 3.0) -> float:
        """Return the growth of the rate per second, from the first to the second half.

        0 unless the halves differ by `z` standard errors; never negative.
        """
        seconds, count, bins = 0.0, 0, iter(self._bins)
        while seconds < self._seconds / 2:
            bin_ = next(bins)
            seconds, count = seconds + bin_.seconds, count + bin_.num_arrivals
        later_seconds, later = self._seconds - seconds, self._count - count
        if seconds <= 0 or later_seconds <= 0:
            return 0.0
        difference = later / later_seconds - count / seconds
        error = sqrt((count + 1) / seconds**2 + (later + 1) / later_seconds**2)
        return difference / (self._seconds / 2) if difference > z * error else 0.0

    def observe(self, num_arrivals: int, now: float) -> bool:
        """Count the arrivals since the last call; return True at a change point."""
        self._open_count += num_arrivals
        seconds = now - self._open_since
        if seconds < BIN_SECONDS:
            return False
        arrivals = _Bin(seconds, self._open_count)
        self._open_since, self._open_count = now, 0
        is_change = self._test(arrivals)
        self._append(arrivals)
        if is_change:
            self.num_changes += 1
        return is_change

    def _test(self, arrivals: _Bin) -> bool:
        """Test a bin against the earlier ones; forget those before a change point."""
        if not self._seconds:
            return False
        for sum_ in self._sums:
            # Of a short history the true rate may be higher or lower by chance.
            rate = self.bound(2.0 if sum_.ratio > 1 else -2.0)
            if sum_.add(arrivals, rate):
                self._forget(max(0, len(self._bins) - sum_.num_bins + 1))
                self._sums = [_Sum(ratio) for ratio in RATIOS]
                return True
        return False

    def _append(self, arrivals: _Bin) -> None:
        self._bins.append(arrivals)
        self._seconds += arrivals.seconds
        self._count += arrivals.num_arrivals
        while len(self._bins) > 1:
            oldest = self._bins[0]
            has_enough = self._count - oldest.num_arrivals >= ENOUGH_ARRIVALS
            if not has_enough and self._seconds - oldest.seconds < MAX_SECONDS:
                return
            self._forget(1)

    def _forget(self, num_bins: int) -> None:
        """Forget the oldest bins."""
        for _ in range(num_bins):
            oldest = self._bins.popleft()
            self._seconds -= oldest.seconds
            self._count -= oldest.num_arrivals
