"""Limits of a connection that keep its kernel's buffer empty, so that decodes find a free link."""

from math import inf

from gllm.pacing.link_estimator import LinkEstimator

PACING_SHARE = 0.94
"""Share of the measured rate to which a link is paced while prefills wait, so that queues on the
way stay empty. The rate is that of payload: 0.9 of a line's rate, with headers, is 0.93 of it."""
TRIAL_SHARE = 1.25
"""Share for a short time, by which a link that carries more is noticed."""
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
UNSENT_SECONDS = 3e-3
"""Time of the link that the kernel's buffer may hold, but at least MIN_UNSENT_BYTES: the link is
idle if the writing thread wakes up later."""


class SendRate:
    """Rate of a connection's packets, and bytes that may wait in the kernel."""

    def __init__(self, estimator: LinkEstimator) -> None:
        """Create the limits for a link whose estimates change."""
        self._estimator = estimator
        self._next_trial: float | None = None
        """Earliest time of the next trial; None before the first prefill."""
        self._trial_end = -inf
        self._drain_begin = -inf

    def pacing_bytes_per_second(self, now: float, has_prefill: bool) -> float:
        """Return the rate to which the connection is limited; infinite for no limit.

        Args:
            now: time in seconds.
            has_prefill: True if prefills wait for the connection.
        """
        estimator = self._estimator
        rate = estimator.bytes_per_second
        if not has_prefill or not estimator.is_saturated or not rate:
            return inf
        if rate >= FAST_BYTES_PER_SECOND:
            return inf
        return rate * self._share(now)

    def unsent_bytes(self) -> int:
        """Return the limit of the bytes that wait in the kernel's buffer."""
        rate = self._estimator.bytes_per_second or 0.0
        return max(MIN_UNSENT_BYTES, int(rate * UNSENT_SECONDS))

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
