"""Duration of transfers from one engine, predicted from those so far.

A transfer of B bytes takes a + B / r seconds. Both coefficients are fitted to the medians of the
latest transfers of each size: a mean would follow the few transfers that waited for a busy core or
a lost packet, and would so mostly be too high. All functions are pure; time is an argument.
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
CURVE_FACTOR = 1.5
"""Sizes whose durations differ from the line by this factor are predicted without it: links with a
token bucket let small transfers pass without a delay."""
MIN_SAMPLES = 5
"""Transfers of a size class that show such a difference."""
FORGET_SECONDS = 120.0
"""Age at which transfers no longer count beside later ones of other size classes."""
MIN_SIZE_RATIO = 1.2
"""Least ratio of the largest to the smallest median size for which the fixed part is fitted."""


class MeasuredTransfer(NamedTuple):
    """Duration of a complete transfer."""

    num_bytes: int
    seconds: float
    time: float
    """Time of its end in seconds."""


def size_class(num_bytes: int) -> int:
    """Return the size class of a transfer: those of one class differ by less than a factor of 2."""
    return num_bytes.bit_length()


def fit_line(points: Iterable[tuple[float, float, float]]) -> tuple[float, float]:
    """Return the a, b >= 0 of the line a + b * x with the least squared relative errors.

    points: x, y > 0 and the weight of each, at least one.
    """
    n = sum_x = sum_y = sum_xx = sum_xy = 0.0
    for x, y, count in points:
        weight = count / y**2
        n, sum_x, sum_y = n + weight, sum_x + weight * x, sum_y + weight * y
        sum_xx, sum_xy = sum_xx + weight * x * x, sum_xy + weight * x * y
    variance = sum_xx / n - (sum_x / n) ** 2
    if variance <= 0 or (slope := (sum_xy / n - sum_x / n * sum_y / n) / variance) < 0:
        return sum_y / n, 0.0
    fixed = (sum_y - slope * sum_x) / n
    return (fixed, slope) if fixed >= 0 else (0.0, sum_xy / sum_xx)


@dataclass
class TransferEstimate:
    """Duration of transfers from one engine by their sizes."""

    bytes_per_second: float | None = None
    """Rate before the first measurement, for example a link's; None if it is unknown. Infinite if
    small transfers take as long as large ones."""
    fixed_seconds: float = 0.0
    """Duration of a transfer of no bytes, for example a round trip."""
    _samples: dict[int, deque[MeasuredTransfer]] = field(default_factory=dict)
    """Latest transfers by size class."""
    _factors: dict[int, float] = field(default_factory=dict)
    """Durations of the size classes that are far from the line, in those of the line."""
    _late: list[MeasuredTransfer] = field(default_factory=list)
    """Last transfers, if all took far longer than predicted."""

    def observe(self, num_bytes: int, seconds: float, now: float) -> None:
        """Note a complete transfer; transfers of no bytes are ignored.

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
        points = [
            (
                median(each.num_bytes for each in kept),
                median(each.seconds for each in kept),
                len(kept),
            )
            for kept in self._samples.values()
        ]
        sizes = [x for x, *_ in points]
        if max(sizes) > MIN_SIZE_RATIO * min(sizes):
            self.fixed_seconds, slope = fit_line(points)
            self.bytes_per_second = 1 / slope if slope else inf
        else:
            # One size says nothing about the fixed part, which is kept as far as it is possible.
            x, y, _ = max(points, key=lambda point: point[2])
            self.fixed_seconds = min(self.fixed_seconds, y / 2)
            self.bytes_per_second = x / (y - self.fixed_seconds)
        self._factors = {}
        for size, (x, y, count) in zip(self._samples, points, strict=True):
            factor = y / (self.fixed_seconds + x / self.bytes_per_second)
            if count >= MIN_SAMPLES and not 1 / CURVE_FACTOR <= factor <= CURVE_FACTOR:
                self._factors[size] = factor

    def predict(self, num_bytes: int) -> float | None:
        """Return the seconds of a transfer; None before the rate is known."""
        if self.bytes_per_second is None:
            return None
        line = self.fixed_seconds + num_bytes / self.bytes_per_second
        return line * self._factors.get(size_class(num_bytes), 1.0)

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
