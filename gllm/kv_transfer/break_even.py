"""Decision whether KV blocks are fetched or computed again, and the deadline of a fetch.

A transfer of B bytes takes a + B / r seconds. Both coefficients are fitted to the transfers so
far. All functions are pure; time is an argument.
"""

from dataclasses import dataclass, field
from math import inf

DEADLINE_FACTOR = 3.0
"""Predicted durations after which a fetch without progress is late."""
DEADLINE_SECONDS = 2.0
"""Added to that; also the time for which arrived bytes extend the deadline."""
RETRY_SECONDS = 30.0
"""Time after which a measured rate is no longer a reason to fetch nothing."""
TRUSTED_FACTOR = 2.0
"""Transfers of more than so many times the largest measured one are not predicted."""
_DECAY = 0.9
"""Weight of the transfers so far against the next one."""
_MIN_SPREAD = 0.05
"""Least coefficient of variation of the sizes for which the fixed part is fitted."""


@dataclass
class TransferEstimate:
    """Duration of transfers from one engine by their sizes: a decaying least-squares line."""

    bytes_per_second: float | None = None
    """Rate before the first measurement, for example a link's; None if it is unknown."""
    fixed_seconds: float = 0.0
    """Duration of a transfer of no bytes, for example a round trip."""
    _sums: list[float] = field(default_factory=lambda: [0.0] * 5)
    """Weighted sums of 1, x, y, x * x and x * y for x bytes in y seconds."""

    def observe(self, num_bytes: int, seconds: float) -> None:
        """Note a complete transfer; transfers of no bytes are ignored."""
        if num_bytes <= 0 or seconds <= 0:
            return
        x, y = float(num_bytes), seconds
        new = (1.0, x, y, x * x, x * y)
        self._sums = [_DECAY * old + each for old, each in zip(self._sums, new, strict=True)]
        n, sum_x, sum_y, sum_xx, sum_xy = self._sums
        mean_x, mean_y = sum_x / n, sum_y / n
        variance = max(sum_xx / n - mean_x**2, 0.0)
        if variance > (_MIN_SPREAD * mean_x) ** 2:
            slope = (sum_xy / n - mean_x * mean_y) / variance
            fixed = mean_y - slope * mean_x
            if slope > 0 and fixed >= 0:
                self.bytes_per_second, self.fixed_seconds = 1 / slope, fixed
                return
        self.fixed_seconds = min(self.fixed_seconds, mean_y / 2)
        self.bytes_per_second = mean_x / (mean_y - self.fixed_seconds)

    def predict(self, num_bytes: int) -> float | None:
        """Return the seconds of a transfer; None before the rate is known."""
        if self.bytes_per_second is None:
            return None
        return self.fixed_seconds + num_bytes / self.bytes_per_second


def should_fetch(transfer_seconds: float | None, compute_seconds: float | None) -> bool:
    """Return whether a transfer is cheaper than a prefill of the same tokens.

    Args:
        transfer_seconds: predicted; None if unknown: fetching it measures the rate.
        compute_seconds: predicted for the prefill; None if unknown.
    """
    if transfer_seconds is None or compute_seconds is None:
        return True
    return transfer_seconds < compute_seconds


@dataclass
class FetchDecision:
    """Decides about fetches from one engine, and learns from them.

    What is not fetched is not measured, so the estimate is trusted only for sizes like the measured
    ones, and for a limited time: otherwise one slow or small transfer could end all fetches.
    """

    estimate: TransferEstimate = field(default_factory=TransferEstimate)
    _largest: int = 0
    """Bytes of the largest transfer."""
    _time: float = -inf
    """Time of the last transfer."""

    def observe(self, num_bytes: int, seconds: float, now: float) -> None:
        """Note a complete transfer."""
        self.estimate.observe(num_bytes, seconds)
        self._largest, self._time = max(self._largest, num_bytes), now

    def is_worth(self, num_bytes: int, compute_seconds: float | None, now: float) -> bool:
        """Return whether to fetch so many bytes.

        Args:
            num_bytes: of the keys and values.
            compute_seconds: predicted for the prefill of their tokens; None if unknown.
            now: Time in seconds.
        """
        if num_bytes > TRUSTED_FACTOR * self._largest or now - self._time > RETRY_SECONDS:
            return True
        return should_fetch(self.estimate.predict(num_bytes), compute_seconds)


def find_crossing_tokens(
    estimate: TransferEstimate, bytes_per_token: int, prefill_tokens_per_second: float
) -> float | None:
    """Return the number of tokens from which on a transfer is cheaper than a prefill.

    Solves a + n * kappa / r = n / p for n, with kappa the bytes per token, r the link rate and p
    the prefill speed.

    Returns:
        The number of tokens; None if a prefill is always cheaper, or the rate is unknown.
    """
    if estimate.bytes_per_second is None:
        return None
    gain = 1 / prefill_tokens_per_second - bytes_per_token / estimate.bytes_per_second
    return estimate.fixed_seconds / gain if gain > 0 else None


@dataclass
class FetchDeadline:
    """Time at which a fetch is given up: 3 x predicted + 2 s, later while bytes arrive."""

    begin: float
    predicted_seconds: float
    last_arrival: float | None = None
    """Time of the last bytes; None before the first ones."""

    def on_bytes(self, now: float) -> None:
        """Note that bytes have arrived."""
        self.last_arrival = now

    @property
    def time(self) -> float:
        """Deadline as known now."""
        deadline = self.begin + DEADLINE_FACTOR * self.predicted_seconds + DEADLINE_SECONDS
        if self.last_arrival is None:
            return deadline
        return max(deadline, self.last_arrival + DEADLINE_SECONDS)

    def is_late(self, now: float) -> bool:
        """Return whether the fetch has to be cancelled."""
        return now > self.time
