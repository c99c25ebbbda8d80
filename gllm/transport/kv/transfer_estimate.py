"""Duration of transfers from one engine, predicted from those so far.

A transfer of B bytes takes a + B / r seconds. Both coefficients are fitted to the medians of the
latest transfers of each size, those of sizes near B with more weight. A mean would follow the few
transfers that waited for a busy core or a lost packet, and would so mostly be too high. All
functions are pure; time is an argument.
"""

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import inf
from statistics import median
from typing import NamedTuple

SAMPLES_PER_SIZE = 7
"""Transfers of one size class that count: four of another duration change their median."""
CHANGE_FACTOR = 2.0
"""A transfer in less than its predicted duration by this factor shows that the link has changed."""
NUM_LATE = 3
"""So many transfers in a row that take CHANGE_FACTOR times as long as predicted show it too."""
LOCALITY = 4.0
"""Factor by which the weight of a size class decreases with each doubling or halving of the size:
links with a token bucket, for example, let small transfers pass without a delay."""
FORGET_SECONDS = 120.0
"""Age at which transfers no longer count beside later ones of other size classes."""
MIN_SIZE_RATIO = 1.2
"""Least ratio of the largest to the smallest median size for which the fixed part is fitted."""


class MeasuredTransfer(NamedTuple):
    """Size in bytes, measured duration in seconds and end time of one finished KV transfer."""

    num_bytes: int
    seconds: float
    time: float
    """Time in seconds at which the transfer ended."""


def size_class(num_bytes: int) -> int:
    """Return the class of a transfer size for statistics: the bit length of its number of bytes."""
    return num_bytes.bit_length()


def fit_line(points: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Fit a + b * x by weighted least squares with a, b >= 0; return a and b.

    points: tuples (x, y, weight), at least one.
    """
    n = sum_x = sum_y = sum_xx = sum_xy = 0.0
    for x, y, weight in points:
        n, sum_x, sum_y = n + weight, sum_x + weight * x, sum_y + weight * y
        sum_xx, sum_xy = sum_xx + weight * x * x, sum_xy + weight * x * y
    variance = sum_xx / n - (sum_x / n) ** 2
    if variance <= 0 or (slope := (sum_xy / n - sum_x / n * sum_y / n) / variance) < 0:
        return sum_y / n, 0.0
    fixed = (sum_y - slope * sum_x) / n
    return (fixed, slope) if fixed >= 0 else (0.0, sum_xy / sum_xx)


@dataclass
class TransferEstimate:
    """Predicts the duration of KV transfers from one engine, by size and measured transfers."""

    bytes_per_second: float | None = None
    """Rate before the first measurement, for example a link's; None if it is unknown. Infinite if
    small transfers take as long as large ones."""
    fixed_seconds: float = 0.0
    """Duration of a transfer of no bytes, for example a round trip."""
    _samples: dict[int, deque[MeasuredTransfer]] = field(default_factory=dict)
    """Latest transfers by size class."""
    _medians: dict[int, tuple[float, float, int]] = field(default_factory=dict)
    """Median size, median duration and number of these; empty while all have about one size."""
    _late: list[MeasuredTransfer] = field(default_factory=list)
    """Latest consecutive transfers that took far longer than predicted."""

    def observe(self, num_bytes: int, seconds: float, now: float) -> None:
        """Add a complete transfer; transfers of no bytes are ignored.

        Args:
            num_bytes: Its size.
            seconds: Its duration.
            now: Time of its end in seconds.
        """
        if num_bytes <= 0 or seconds <= 0:
            return
        transfer = MeasuredTransfer(num_bytes, seconds, now)
        self._forget_before_change(transfer)
        self._append(transfer)
        for size, kept in list(self._samples.items()):
            if now - kept[-1].time > FORGET_SECONDS:
                del self._samples[size]
        self._fit()

    def _fit(self) -> None:
        medians = {
            size: (
                median(transfer.num_bytes for transfer in kept),
                median(transfer.seconds for transfer in kept),
                len(kept),
            )
            for size, kept in self._samples.items()
        }
        sizes = [x for x, *_ in medians.values()]
        if max(sizes) > MIN_SIZE_RATIO * min(sizes):
            self._medians = medians
            points = ((x, y, count / y**2) for x, y, count in medians.values())
            self.fixed_seconds, slope = fit_line(points)
            self.bytes_per_second = 1 / slope if slope else inf
        else:
            # One size says nothing about the fixed part, which is kept as far as it is possible.
            self._medians = {}
            x, y, _ = max(medians.values(), key=lambda median: median[2])
            self.fixed_seconds = min(self.fixed_seconds, y / 2)
            self.bytes_per_second = x / (y - self.fixed_seconds)

    def predict(self, num_bytes: int) -> float | None:
        """Return the predicted duration of a transfer in seconds; None before the rate is known.

        The prediction is a line fitted to the median durations, weighted by how near their size is.
        """
        if self.bytes_per_second is None:
            return None
        if not self._medians:
            return self.fixed_seconds + num_bytes / self.bytes_per_second
        own = size_class(num_bytes)
        nearest = min(self._medians, key=lambda size: abs(size - own))
        typical = self._medians[nearest][1]
        fixed, slope = fit_line(
            (x, y, count * LOCALITY ** -abs(size - own) / max(y, typical) ** 2)
            for size, (x, y, count) in self._medians.items()
        )
        return fixed + slope * num_bytes

    def _forget_before_change(self, transfer: MeasuredTransfer) -> None:
        """Forget the transfers from before a change of the rate.

        Nothing is faster than its link, so one fast transfer shows a change; a slow one may have
        been delayed. The first transfer of a size shows nothing.
        """
        predicted = self.predict(transfer.num_bytes)
        if predicted is None or size_class(transfer.num_bytes) not in self._samples:
            return
        if transfer.seconds < predicted / CHANGE_FACTOR:
            self._samples.clear()
        if transfer.seconds <= CHANGE_FACTOR * predicted:
            self._late.clear()
            return
        self._late.append(transfer)
        if len(self._late) == NUM_LATE:
            self._samples.clear()
            for late in self._late[:-1]:
                self._append(late)
            self._late.clear()

    def _append(self, transfer: MeasuredTransfer) -> None:
        size = size_class(transfer.num_bytes)
        self._samples.setdefault(size, deque(maxlen=SAMPLES_PER_SIZE)).append(transfer)
