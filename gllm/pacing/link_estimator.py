"""Estimates of a link's rate, round trip and loss, from what TCP measures as it sends.

A delivery rate is evidence of what the link carries only if the sender tried to send more.
Otherwise it is a lower bound: the sender had nothing to send, paced itself, or its congestion
window was still growing. A standing queue, which shows as a longer round trip, tells the
difference.
"""

from collections import deque
from math import inf
from statistics import median
from typing import NamedTuple

PACING_SHARE = 0.94
"""Share of the measured rate to which a link is paced while prefills wait, so that queues on the
way stay empty. The rate is that of payload: 0.9 of a line's rate, with headers, is 0.93 of it."""
TRIAL_SHARE = 1.25
"""Share of the measured rate in a trial, which finds out if the link carries more."""
TRIAL_INTERVAL_SECONDS = 3.0
"""Least time between two trials."""
FIRST_TRIAL_SECONDS = 1.0
"""Time from the first prefill to the first trial: the first estimate may be low."""
MIN_TRIAL_SECONDS, TRIAL_ROUND_TRIPS = 0.1, 10
"""Longest duration of a trial, the larger of both: bbr sends more only in one of eight round trips.
A queue ends a trial before."""
MAX_TRIAL_QUEUE_BYTES = 400_000
"""Bytes by which a trial may overfill a link until the queue is noticed, less than routers hold:
at 400 Mbit/s and 30 ms a quarter more would be 1.2 MB by then."""
NOTICE_ROUND_TRIPS, NOTICE_SECONDS = 1.5, 0.03
"""Time until a queue is noticed: round trips, and the interval of the samples."""
DRAIN_SHARE = 0.5
"""Share while a queue stands on the way, so that it becomes empty."""
MIN_QUEUE_SECONDS = 0.15
"""Time for which a queue has stood before it is drained: a short one vanishes without that, and
delivery rates show what the link carries as long as there is one."""
MAX_DRAIN_SECONDS, MIN_DRAIN_INTERVAL_SECONDS = 0.5, 1.0
"""Longest drain, and least time from its end to the next one: others may have made the queue."""
FAST_BYTES_PER_SECOND = 125e6
"""Rate from which on nothing is paced: a chunk takes no longer than the timers are precise."""
MIN_UNSENT_BYTES = 16_384
"""Least limit of the kernel's buffer: smaller ones leave gaps between packets."""
MAX_UNSENT_BYTES = 4_194_304
"""Largest limit on fast links; Linux's default limit of a send buffer."""
UNSENT_SECONDS = 3e-3
"""Time of the link that the kernel's buffer may hold, but at least MIN_UNSENT_BYTES: the link is
idle if the writing thread wakes up later."""

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
"""Growth of the round trip that counts as a standing queue: seconds, plus a share of it."""
ROUND_TRIP_WINDOW_SECONDS = 10.0
"""Time after which a route's earlier, shorter round trip is forgotten."""
MIN_PLATEAU_SECONDS, PLATEAU_ROUND_TRIPS, NUM_PLATEAU = 0.1, 3, 8
"""Seconds and round trips for which a rate without a queue has to stay, and samples of it, before
it counts as measured: a congestion window that still grows would have raised it."""
LOSS_GAIN = 0.1
"""Weight of a sample in the loss rate."""


class LinkSample(NamedTuple):
    """TCP statistics of one connection: delivery rate, pacing rate, round trip and sent bytes."""

    now: float
    """Time in seconds."""
    bytes_per_second: float
    """Delivery rate; 0 if there is none since the last sample."""
    is_app_limited: bool
    """True if the sender had nothing to send for some of the time since the last sample."""
    pacing_bytes_per_second: float
    """Rate to which the sender limited itself; infinite for none."""
    round_trip_seconds: float
    """Round trip, queues included; 0 for none since the last sample."""
    num_sent_bytes: int = 0
    """Bytes sent since the last sample."""
    num_retransmitted_bytes: int = 0
    """Bytes of these that were sent again."""


class LinkEstimator:
    """Estimates a link's bandwidth, round trip and loss rate from samples of TCP statistics."""

    def __init__(self, min_bytes_per_second: float = 0.0) -> None:
        """Create without samples.

        min_bytes_per_second: rate that the link carries at least, as the operator states.
        """
        self._min_rate = min_bytes_per_second
        self.is_saturated = False
        """True if packets queued at the estimated rate: the link cannot send faster."""
        self.queue_begin: float | None = None
        """Time since which packets queue in the network; None if none did at the latest sample."""
        self.loss_rate = 0.0
        """Share of bytes that are retransmitted, 0 to 1."""
        self._rate: float | None = None
        """Estimate, or a lower bound of the rate before `_is_measured`."""
        self._is_measured = False
        self._plateau: tuple[float, int] | None = None
        """Begin and number of the latest samples that agree, unless one has disagreed since."""
        self._round_trips: deque[tuple[float, float]] = deque()
        """Times and round trips, both rising: candidates for the minimum of the window."""
        self._disagreeing: list[tuple[float, float, bool, bool]] = []
        """Latest samples that disagree: time, rate, whether a queue stood, and whether the sender
        had nothing to send."""
        self._is_rise = False
        """Direction of the samples that disagree."""

    @property
    def bytes_per_second(self) -> float | None:
        """Bandwidth of the link for payload; None until the sender has used all of it."""
        if self._rate is None or not self._is_measured:
            return None
        return max(self._rate, self._min_rate)

    @property
    def min_bytes_per_second(self) -> float | None:
        """Bandwidth of the link for payload, or a lower bound of it until it is measured.

        None before the first sample. The bandwidth of a fast link is never measured, because the
        sender does not fill it for long enough.
        """
        return None if self._rate is None else max(self._rate, self._min_rate)

    @property
    def has_queue(self) -> bool:
        """True if packets were queued in the network at the latest sample."""
        return self.queue_begin is not None

    @property
    def round_trip_seconds(self) -> float | None:
        """Smallest round trip of the last seconds; None before the first sample."""
        return self._round_trips[0][1] if self._round_trips else None

    def observe(self, sample: LinkSample) -> None:
        """Update bandwidth, round trip and loss rate with a sample."""
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
        """Update only the round trip, such as with the result of a probe."""
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


class SendRate:
    """Pacing rate and send buffer limit of a TCP connection, which avoid queues in the network.

    A short queue lets a decode overtake prefill data that is not sent yet.
    """

    def __init__(self, estimator: LinkEstimator) -> None:
        """Create the limits for a link whose estimates change."""
        self._estimator = estimator
        self._next_trial: float | None = None
        """Earliest time of the next trial; None before the first prefill."""
        self._trial_end = -inf
        self._drain_begin = -inf
        self._fast_unsent_bytes = MIN_UNSENT_BYTES
        """Limit of the kernel's buffer while no low rate is measured."""

    def pacing_bytes_per_second(self, now: float, has_prefill: bool) -> float:
        """Return the pacing rate of the connection in bytes per second; infinite for no limit.

        Args:
            now: time in seconds.
            has_prefill: True if prefill activations wait to be sent.
        """
        estimator = self._estimator
        rate = estimator.bytes_per_second
        if not has_prefill or not estimator.is_saturated or not rate:
            return inf
        if rate >= FAST_BYTES_PER_SECOND:
            return inf
        return rate * self._share(now)

    def unsent_bytes(self) -> int:
        """Return the maximum number of unsent bytes in the kernel's send buffer."""
        rate = self._estimator.bytes_per_second
        if rate is None or rate >= FAST_BYTES_PER_SECOND:
            return max(self._fast_unsent_bytes, int((rate or 0.0) * UNSENT_SECONDS))
        return max(MIN_UNSENT_BYTES, int(rate * UNSENT_SECONDS))

    def on_starved(self) -> None:
        """Record that the kernel's buffer ran empty within a message.

        Then the link is faster than the writing thread wakes up: the buffer holds more from now on,
        unless the link's rate is known to be low.
        """
        self._fast_unsent_bytes = min(2 * self._fast_unsent_bytes, MAX_UNSENT_BYTES)

    def _share(self, now: float) -> float:
        """Return the share of the estimated rate at which prefills are sent now."""
        estimator, has_queue = self._estimator, self._estimator.has_queue
        if has_queue:
            self._trial_end = min(self._trial_end, now)
            begin = estimator.queue_begin
            if begin is not None and now - begin >= MIN_QUEUE_SECONDS:
                if now - self._drain_begin > MAX_DRAIN_SECONDS + MIN_DRAIN_INTERVAL_SECONDS:
                    self._drain_begin = now
                if now - self._drain_begin <= MAX_DRAIN_SECONDS:
                    return DRAIN_SHARE
        if self._next_trial is None:
            self._next_trial = now + FIRST_TRIAL_SECONDS
        elif now >= self._next_trial and not has_queue:
            round_trips = TRIAL_ROUND_TRIPS * (estimator.round_trip_seconds or 0.0)
            self._trial_end = now + max(MIN_TRIAL_SECONDS, round_trips)
            self._next_trial = self._trial_end + TRIAL_INTERVAL_SECONDS
        return self._trial_share() if now < self._trial_end else PACING_SHARE

    def _trial_share(self) -> float:
        """Return the share of a trial, as large as the queues on the way permit."""
        estimator = self._estimator
        rate, round_trip = estimator.bytes_per_second, estimator.round_trip_seconds
        if not rate:
            return TRIAL_SHARE
        seconds = NOTICE_ROUND_TRIPS * (round_trip or 0.0) + NOTICE_SECONDS
        return min(TRIAL_SHARE, 1 + MAX_TRIAL_QUEUE_BYTES / (rate * seconds))
