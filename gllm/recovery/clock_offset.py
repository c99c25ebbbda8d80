"""Offset between the clocks of two machines, estimated from their heartbeats as NTP does."""

import math
from collections import deque
from typing import NamedTuple

NUM_SAMPLES = 60
"""Samples that are kept; at one heartbeat per second those of a minute."""
MAX_DRIFT = 1e-4
"""Largest drift of two clocks against each other, in seconds per second: quartz has up to 1e-4."""
TOLERANCE_SECONDS = 1e-3
"""Contradiction between two samples that is no jump of a clock."""


class _Sample(NamedTuple):
    """One exchange of messages, in seconds."""

    time: float
    """Own clock at its end."""
    offset: float
    round_trip: float

    def error_at(self, now: float) -> float:
        """Return the largest error of the offset at a time.

        The two ways differ by at most the round trip, so the offset is off by half of it; from then
        on the clocks drift.
        """
        return self.round_trip / 2 + MAX_DRIFT * max(0.0, now - self.time)


class ClockOffset:
    """Estimates the difference between a peer's clock and the own one from heartbeats, as NTP does.

    The sample with the least possible error counts: the one with the least round trip, unless it is
    so old that the clocks may have drifted apart further.
    """

    def __init__(self) -> None:
        self._samples: deque[_Sample] = deque(maxlen=NUM_SAMPLES)
        self._best: _Sample | None = None

    def on_echo(self, sent: float, heard: float, peer_sent: float, received: float) -> None:
        """Add a sample; one that no clocks could have produced is ignored.

        Args:
            sent: own clock when the own message was sent.
            heard: peer's clock when that arrived.
            peer_sent: peer's clock when its next message was sent.
            received: own clock when that arrived.
        """
        round_trip = (received - sent) - (peer_sent - heard)
        offset = ((heard - sent) + (peer_sent - received)) / 2
        if not math.isfinite(offset) or round_trip < 0 or received < sent or peer_sent < heard:
            return
        sample = _Sample(received, offset, round_trip)
        best = self._best
        if best is not None:
            possible = sample.error_at(received) + best.error_at(received) + TOLERANCE_SECONDS
            if abs(sample.offset - best.offset) > possible:
                # A clock has jumped: a machine was suspended, for example.
                self._samples.clear()
        self._samples.append(sample)
        self._best = min(self._samples, key=lambda sample: sample.error_at(received))

    @property
    def seconds(self) -> float | None:
        """The peer's clock minus the own one; None before the first sample."""
        return None if self._best is None else self._best.offset

    @property
    def round_trip_seconds(self) -> float | None:
        """Least round trip of the samples; None before the first one."""
        return min((sample.round_trip for sample in self._samples), default=None)
