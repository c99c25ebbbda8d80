"""Monitor of an edge's connection: reads TCP's measurements, and sets the limits that follow."""

from collections import deque
from math import inf, isinf

from gllm.pacing.link_estimator import LinkEstimator, LinkSample, SendRate
from gllm.transport.link.connection import FrameConnection, TcpInfo

SAMPLE_SECONDS = 0.02
"""Smallest interval between two samples of TCP's state, in seconds."""
PROBE_SECONDS = 1.0
"""Silence after which the round trip is probed. A probe and its echo take 200 bytes with all
headers: 1 % of the capacity of a link of 0.2 Mbit/s."""
WARM_PROBE_SECONDS = 0.2
"""Silence after which a shaped connection is probed that carries steps now and then. TCP's
retransmission timeout is at least as long, and after a longer silence cubic restarts from its
initial window: the next step would leave at the pace of that, 10 ms later at 100 Mbit/s, 30 ms."""
WARM_SECONDS = 60.0
"""Time since the last step for which a connection is kept so."""
MIN_WARM_BYTES_PER_SECOND = 125e3
"""Smallest rate of a link that probes keep warm; they use less than 1 % of it."""
FULL_WINDOW_SHARE = 0.9
"""Used share of the congestion window from which on the window limits the rate."""
MIN_WINDOW_SECONDS, MAX_WINDOW_SECONDS = 0.05, 0.1
"""Bounds of the time over which the rate of arrivals is measured: the round trip, clamped."""
MAX_LIMITED_SHARE = 0.05
"""Share of a window for which the receiver or the send buffer may have limited the rate."""
LIMIT_TOLERANCE = 0.05
"""Relative change of a limit that is worth a system call."""


class LinkMonitor:
    """Estimates bandwidth and latency of a connection between stages, and sets its pacing limits.

    Estimates are kept across reconnections.
    """

    def __init__(self, is_shaped: bool, min_bytes_per_second: float = 0.0) -> None:
        """Create without a connection.

        Args:
            is_shaped: True to keep the kernel's send buffer short and to pace prefills.
            min_bytes_per_second: Rate that the link carries at least, as the operator states.
        """
        self.estimator = LinkEstimator(min_bytes_per_second)
        self._is_shaped = is_shaped
        self._rate = SendRate(self.estimator)
        self._connection: FrameConnection | None = None
        self._last: TcpInfo | None = None
        """Last sample of this connection."""
        self._samples: deque[TcpInfo] = deque()
        """Samples of the last window. Their times are the kernel's: this process may be scheduled
        long after it has read a clock."""
        self._supplied_since = inf
        """Busy time (TcpInfo.busy_seconds) since which the kernel has always had bytes to send."""
        self._sample_time = self._active_time = 0.0
        """Times of the last sample and of the last traffic."""
        self._step_time = -inf
        """Time at which a step last waited for this connection."""
        self._probe_time: float | None = None
        """Time of the probe that was not answered yet."""
        self._has_prefill = False
        """True if a prefill waited at the last call of `observe`."""
        self._pacing = inf
        self._unsent_bytes = 0
        """Limits of this connection; 0 for none."""

    def begin(self, connection: FrameConnection, now: float) -> None:
        """Start to measure a new connection. Raises OSError."""
        self._connection, self._last, self._supplied_since = connection, None, inf
        self._samples.clear()
        self._sample_time, self._active_time, self._probe_time = 0.0, now, None
        self._has_prefill, self._pacing, self._unsent_bytes = False, inf, 0
        self.observe(now, is_busy=False, has_prefill=False)

    def observe(self, now: float, is_busy: bool, has_prefill: bool) -> None:
        """Read the TCP statistics if the last sample is old enough, and adjust the pacing limits.

        Args:
            now: time in seconds.
            is_busy: True if a step waits to be sent.
            has_prefill: True if one of the waiting steps has prefills.

        Raises:
            OSError: the connection is closed.
        """
        if is_busy:
            self._step_time = now
        else:
            self._supplied_since = inf
        begins_prefill = has_prefill and not self._has_prefill
        self._has_prefill = has_prefill
        if self._connection is None:
            return
        if begins_prefill and self._is_shaped:
            # A whole window would leave before the next sample, and the decodes after it wait.
            self._adapt(now, has_prefill)
        if now - self._sample_time < SAMPLE_SECONDS:
            return
        self._sample_time = now
        info = self._connection.read_tcp_info()
        if info is None:
            return
        if is_busy:
            self._note_supply(info)
        last, self._last = self._last, info
        has_arrived = last is not None and info.num_delivered != last.num_delivered
        if last is not None and has_arrived:
            self.estimator.observe(self._compare(now, last, info))
        if info.unacknowledged_bytes or info.unsent_bytes:
            self._active_time = now
        if self._is_shaped:
            self._adapt(now, has_prefill)

    def check_supply(self) -> None:
        """Detect an empty send buffer: the sender then limits the rate, not the network.

        Called before bytes are written. Raises OSError.
        """
        info = self._connection.read_tcp_info() if self._connection else None
        if info is not None:
            self._note_supply(info)

    def _note_supply(self, info: TcpInfo) -> None:
        """Note whether the kernel has bytes to send, or a full window of them under way."""
        is_full = info.unacknowledged_bytes >= FULL_WINDOW_SHARE * info.window_bytes
        if info.unsent_bytes or is_full:
            self._supplied_since = min(self._supplied_since, info.busy_seconds)
            return
        if self._is_shaped and not isinf(self._supplied_since):
            self._rate.on_starved()
            self._limit_unsent()
        self._supplied_since = inf

    def send_bytes_per_second(self) -> float:
        """Return the rate in bytes per second at which data can be sent now; 0 if it is unknown."""
        rate = self.estimator.bytes_per_second or inf
        info = self._last
        if info is not None and info.round_trip_seconds > 0:
            rate = min(rate, info.window_bytes / info.round_trip_seconds)
        return 0.0 if rate == inf else rate

    def seconds_to_sample(self, now: float) -> float:
        """Return the time until `observe` or a probe is due."""
        if self._active_time == self._sample_time:
            # Bytes are on their way.
            return max(0.0, self._sample_time + SAMPLE_SECONDS - now)
        return max(0.0, self._active_time + self._probe_seconds(now) - now)

    def should_probe(self, now: float) -> bool:
        """Return True if the round trip of an idle connection should be probed."""
        if now - self._active_time < self._probe_seconds(now):
            return False
        self._active_time = now
        if self._probe_time is not None:
            # TCP still tries to get the last probe through.
            return False
        self._probe_time = now
        return True

    def on_echo(self, now: float) -> None:
        """Record the answer to a probe."""
        if self._probe_time is not None:
            self.estimator.observe_round_trip(now, now - self._probe_time)
        self._probe_time = None

    def _probe_seconds(self, now: float) -> float:
        """Return the silence after which a probe is due."""
        rate = self.estimator.bytes_per_second
        is_fast = rate is not None and rate >= MIN_WARM_BYTES_PER_SECOND
        is_warm = self._is_shaped and is_fast and now - self._step_time < WARM_SECONDS
        return WARM_PROBE_SECONDS if is_warm else PROBE_SECONDS

    def _compare(self, now: float, last: TcpInfo, info: TcpInfo) -> LinkSample:
        """Return what has happened since the last sample."""
        rate = self._arrival_rate(info)
        is_app_limited = rate is None
        if rate is None:
            # The kernel keeps an older rate where a later one says less.
            rate = 0.0
            if info.bytes_per_second != last.bytes_per_second:
                rate = info.bytes_per_second
        return LinkSample(
            now,
            rate,
            is_app_limited,
            self._pacing,
            info.round_trip_seconds,
            info.num_sent_bytes - last.num_sent_bytes,
            info.num_retransmitted_bytes - last.num_retransmitted_bytes,
        )

    def _arrival_rate(self, info: TcpInfo) -> float | None:
        """Return the rate of arrivals over a window; None if the network was not the limit.

        The kernel's own rate does not tell: with few unsent bytes it takes each pause of the
        writing thread for a lack of bytes, and keeps an older rate.
        """
        window = min(max(info.round_trip_seconds, MIN_WINDOW_SECONDS), MAX_WINDOW_SECONDS)
        samples = self._samples
        samples.append(info)
        while len(samples) > 1 and info.busy_seconds - samples[1].busy_seconds >= window:
            samples.popleft()
        first = samples[0]
        seconds = info.busy_seconds - first.busy_seconds
        # What arrived in the window was sent a round trip earlier.
        is_supplied = self._supplied_since <= first.busy_seconds - info.round_trip_seconds
        limited_seconds = info.limited_seconds - first.limited_seconds
        is_limited = limited_seconds > MAX_LIMITED_SHARE * seconds
        if seconds < window or not is_supplied or is_limited:
            return None
        return (info.num_delivered - first.num_delivered) * info.segment_bytes / seconds

    def _adapt(self, now: float, has_prefill: bool) -> None:
        assert self._connection is not None
        pacing = self._rate.pacing_bytes_per_second(now, has_prefill)
        if _differs(pacing, self._pacing):
            self._connection.set_pacing(pacing)
            self._pacing = pacing
        self._limit_unsent()

    def _limit_unsent(self) -> None:
        assert self._connection is not None
        unsent_bytes = self._rate.unsent_bytes()
        if _differs(unsent_bytes, self._unsent_bytes):
            self._connection.set_unsent_limit(unsent_bytes)
            self._unsent_bytes = unsent_bytes


def _differs(value: float, present: float) -> bool:
    """Return whether a limit has to be set again."""
    if isinf(value) or isinf(present):
        return value != present
    return abs(value - present) > LIMIT_TOLERANCE * present
