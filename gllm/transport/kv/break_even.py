"""Decision whether KV blocks are fetched or computed again, and the deadline of a fetch.

All functions are pure; time is an argument.
"""

from dataclasses import dataclass, field
from math import inf

from gllm.transport.kv.transfer_estimate import TransferEstimate, size_class

DEADLINE_FACTOR = 3.0
"""Predicted durations after which a fetch without progress is late."""
DEADLINE_SECONDS = 2.0
"""Added to that; also the time for which arrived bytes extend the deadline."""
RETRY_SECONDS = 30.0
"""Time after which a measured rate is no longer a reason to fetch nothing."""
TRUSTED_FACTOR = 2.0
"""Transfers of more than so many times the largest measured one are not predicted."""
UNSURE_FACTOR = 2.0
"""A prediction of up to so many times the prefill is verified if no transfer of its size is recent:
a size that is not fetched would otherwise keep a prediction that is too high."""


@dataclass
class FetchDecision:
    """Decides by measured transfer times whether to fetch KV blocks from an engine or compute them.

    Only fetches are measured. The estimate is therefore used only for sizes up to twice the largest
    measured one and for 30 s after the last transfer; otherwise the blocks are fetched. This keeps
    a few slow or small transfers from disabling all fetches.
    """

    estimate: TransferEstimate = field(default_factory=TransferEstimate)
    _largest: int = 0
    """Bytes of the largest transfer."""
    _time: float = -inf
    """Time of the last transfer."""
    _times: dict[int, float] = field(default_factory=dict)
    """Times of the last transfers by size class."""

    def observe(self, num_bytes: int, seconds: float, now: float) -> None:
        """Add a measured transfer: size in bytes, duration and end time `now` in seconds."""
        self.estimate.observe(num_bytes, seconds, now)
        self._largest, self._time = max(self._largest, num_bytes), now
        self._times[size_class(num_bytes)] = now

    def is_worth(self, num_bytes: int, compute_seconds: float | None, now: float) -> bool:
        """Return True if a fetch is predicted to be faster than the prefill of its tokens.

        Args:
            num_bytes: Size of the keys and values.
            compute_seconds: Predicted time of the prefill; None if unknown.
            now: Time in seconds.
        """
        if num_bytes > TRUSTED_FACTOR * self._largest or now - self._time > RETRY_SECONDS:
            return True
        predicted = self.estimate.predict(num_bytes)
        if predicted is None or compute_seconds is None or predicted < compute_seconds:
            return True
        last = self._times.get(size_class(num_bytes), -inf)
        return now - last > RETRY_SECONDS and predicted < UNSURE_FACTOR * compute_seconds


@dataclass
class FetchDeadline:
    """Deadline of one KV fetch: three times the predicted duration plus 2 s after its start.

    If bytes have arrived, the deadline is at least 2 s after the latest ones.
    """

    begin: float
    predicted_seconds: float
    last_arrival: float | None = None
    """Time of the last bytes; None before the first ones."""

    def is_late(self, now: float) -> bool:
        """Return True if the deadline has passed, so that the fetch has to be cancelled."""
        seconds = DEADLINE_FACTOR * self.predicted_seconds + DEADLINE_SECONDS
        deadline = self.begin + seconds
        if self.last_arrival is not None:
            deadline = max(deadline, self.last_arrival + DEADLINE_SECONDS)
        return now > deadline
