"""Estimates of a link's rate, round trip and loss, from what TCP measures as it sends.

A delivery rate is evidence of what the link carries only if the sender tried to send more.
Otherwise it is a lower bound: the sender had nothing to send, paced itself, or its congestion
window was still growing. A standing queue, which shows as a longer round trip, tells the
difference.
"""

from collections import deque
from statistics import median
from typing import NamedTuple

AGREEMENT = 0.1
"""Relative difference up to which a sample agrees with the estimate and moves it a little."""
GAIN = 0.25
"""Weight of a sample that agrees."""
NUM_DISAGREEING = 3
"""Samples that disagree in the same direction before the estimate jumps to them."""
MIN_DROP_SECONDS = 0.4
"""Time for which a queue has to stand before the estimate falls; shorter ones are jitter."""
UNEXPLAINED_DROP_SECONDS = 2.0
"""The same without a queue, as with random losses that keep the congestion window small."""
PACED_SHARE = 0.95
"""Share of the pacing rate from which on the pacing explains a delivery rate."""
QUEUE_SECONDS, QUEUE_SHARE = 0.005, 0.1
"""Time, plus share of the round trip, by which it is longer with a standing queue."""
ROUND_TRIP_WINDOW_SECONDS = 10.0
"""Time after which a route's earlier, shorter round trip is forgotten."""
MIN_PLATEAU_SECONDS, PLATEAU_ROUND_TRIPS, NUM_PLATEAU = 0.1, 3, 8
"""Seconds and round trips for which a rate without a queue has to stay, and samples of it, before
it counts as measured: a congestion window that still grows would have raised it."""
LOSS_GAIN = 0.1
"""Weight of a sample in the loss rate."""


class LinkSample(NamedTuple):
    """Measurements of one connection at one time."""

    now: float
    """Time in seconds."""
    bytes_per_second: float
    """Delivery rate; 0 if there is none since the last sample."""
    is_app_limited: bool
    """True if the sender had nothing to send meanwhile."""
    pacing_bytes_per_second: float
    """Rate to which the sender limited itself; infinite for none."""
    round_trip_seconds: float
    """Round trip, queues included; 0 for none since the last sample."""
    num_sent_bytes: int = 0
    """Bytes sent since the last sample."""
    num_retransmitted_bytes: int = 0
    """Bytes of these that were sent again."""


class LinkEstimator:
    """Rate, round trip and loss of a link, fed with samples in the order of their times."""

    def __init__(self) -> None:
        self.is_saturated = False
        """True if a queue stood at the estimated rate: the link carries no more."""
        self.queue_begin: float | None = None
        """Time since which a queue stands on the way; None for none at the latest sample."""
        self.loss_rate = 0.0
        """Share of bytes that are sent again, 0 to 1."""
        self._rate: float | None = None
        """Estimate, or a lower bound of the rate before `_is_measured`."""
        self._is_measured = False
        self._plateau: tuple[float, int] | None = None
        """Begin and number of the latest samples that agree, unless one has disagreed since."""
        self._round_trips: deque[tuple[float, float]] = deque()
        """Times and round trips, both rising: candidates for the least one of the window."""
        self._disagreeing: list[tuple[float, float, bool, bool]] = []
        """Latest samples that disagree: time, rate, whether a queue stood, and whether the sender
        had nothing to send."""
        self._is_rise = False
        """Direction of the samples that disagree."""

    @property
    def bytes_per_second(self) -> float | None:
        """Payload that the link carries; None as long as the sender has not filled it."""
        return self._rate if self._is_measured else None

    @property
    def has_queue(self) -> bool:
        """True if a queue stood on the way at the latest sample."""
        return self.queue_begin is not None

    @property
    def round_trip_seconds(self) -> float | None:
        """Least round trip of the last seconds; None before the first sample."""
        return self._round_trips[0][1] if self._round_trips else None

    def observe(self, sample: LinkSample) -> None:
        """Update the estimates with a sample."""
        if sample.round_trip_seconds > 0:
            self.observe_round_trip(sample.now, sample.round_trip_seconds)
            least = self._round_trips[0][1]
            limit = least * (1 + QUEUE_SHARE) + QUEUE_SECONDS
            if sample.round_trip_seconds <= limit:
                self.queue_begin = None
            elif self.queue_begin is None:
                self.queue_begin = sample.now
        if sample.num_sent_bytes > 0:
            share = min(1.0, sample.num_retransmitted_bytes / sample.num_sent_bytes)
            self.loss_rate += LOSS_GAIN * (share - self.loss_rate)
        if sample.bytes_per_second > 0:
            self._observe_rate(sample)

    def observe_round_trip(self, now: float, seconds: float) -> None:
        """Update the round trip alone, as after a probe."""
        while self._round_trips and self._round_trips[-1][1] >= seconds:
            self._round_trips.pop()
        self._round_trips.append((now, seconds))
        while self._round_trips[0][0] < now - ROUND_TRIP_WINDOW_SECONDS:
            self._round_trips.popleft()

    def _observe_rate(self, sample: LinkSample) -> None:
        value, rate = sample.bytes_per_second, self._rate
        if rate is None:
            self._rate = value
            return
        if self.has_queue and not self._is_measured and not sample.is_app_limited:
            # The first queue: what arrives now is what the link carries.
            self._rate, self._is_measured, self.is_saturated = value, True, True
        elif value > rate * (1 + AGREEMENT):
            self._disagree(sample, is_rise=True)
        elif rate >= value >= PACED_SHARE * sample.pacing_bytes_per_second:
            # As much arrived as was allowed to leave.
            self._disagreeing.clear()
        elif sample.is_app_limited:
            return
        elif value < rate * (1 - AGREEMENT):
            self._disagree(sample, is_rise=False)
        else:
            self._rate = rate + GAIN * (value - rate)
            self._agree(sample.now)

    def _agree(self, now: float) -> None:
        """Note a sample of the estimated rate, at which the sender was not the limit."""
        self._disagreeing.clear()
        begin, count = self._plateau or (now, 0)
        self._plateau = begin, count + 1
        least = max(MIN_PLATEAU_SECONDS, PLATEAU_ROUND_TRIPS * (self.round_trip_seconds or 0.0))
        is_plateau = count >= NUM_PLATEAU and now - begin >= least
        self.is_saturated |= self.has_queue
        self._is_measured |= self.has_queue or is_plateau

    def _disagree(self, sample: LinkSample, is_rise: bool) -> None:
        """Keep a sample that disagrees; jump to the latest of these once they are enough."""
        now = sample.now
        self._plateau = None
        if is_rise != self._is_rise:
            self._disagreeing.clear()
            self._is_rise = is_rise
        self._disagreeing.append(
            (now, sample.bytes_per_second, self.has_queue, sample.is_app_limited)
        )
        latest = self._disagreeing[-NUM_DISAGREEING:]
        if len(latest) < NUM_DISAGREEING:
            return
        values = [value for _, value, _, _ in latest]
        seconds = now - self._disagreeing[0][0]
        has_standing_queue = all(queue for _, _, queue, _ in latest)
        if not self._is_measured:
            # Late acknowledgements of a few bytes look like a queue, as on a busy machine.
            has_standing_queue &= not any(is_app_limited for *_, is_app_limited in latest)
        if is_rise:
            # Acknowledgements that arrive together make single samples too large.
            self._rate = min(values)
        elif seconds >= (MIN_DROP_SECONDS if has_standing_queue else UNEXPLAINED_DROP_SECONDS):
            self._rate = median(values)
        else:
            return
        self.is_saturated = has_standing_queue
        self._is_measured |= has_standing_queue
        self._disagreeing.clear()
