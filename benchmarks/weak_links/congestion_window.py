"""Congestion window of a simulated TCP connection: slow start, and its decay while idle.

Sources: RFC 6928 (initial window of ten segments), RFC 5681 (slow start in section 3.1), RFC 7661
(a window that is not used does not grow), RFC 2861 (an idle window halves per retransmission
timeout, as in Linux; RFC 5681 permits its restart at once). The window grows until it carries the
rate of the link over a round trip. Losses, and so the congestion avoidance of CUBIC (RFC 9438), are
left out: once the window carries the link, the link alone limits the sender.
"""

from collections import deque
from math import inf

SEGMENT_BYTES = 1448
"""Payload of a packet of 1,500 bytes with timestamps."""
INITIAL_BYTES = 10 * SEGMENT_BYTES
"""Congestion window of a new connection, and lower bound of that of an idle one, in bytes."""
MIN_TIMEOUT_SECONDS = 0.2
"""Smallest difference of Linux's retransmission timeout and the round trip, in seconds."""


class CongestionWindow:
    """Bytes that one connection may have on their way, over simulated time.

    Args:
        bytes_per_second: Rate of the link.
        round_trip_seconds: Time from the end of a segment's transmission to its acknowledgement.
        timeout_seconds: Retransmission timeout: each such time of silence halves the window;
            infinite: none does.
        warm_seconds: Silence that does not count, because the sender keeps the connection warm.
        initial_bytes: Window of a new connection, and the least of an idle one.

    Raises:
        ValueError: An argument is out of its range.
    """

    __slots__ = (
        "_flights",
        "_in_flight_bytes",
        "_initial_bytes",
        "_last_time",
        "_limit_bytes",
        "_most_in_flight_bytes",
        "_round_trip_seconds",
        "_timeout_seconds",
        "_warm_seconds",
        "window_bytes",
    )

    def __init__(
        self,
        bytes_per_second: float,
        round_trip_seconds: float,
        timeout_seconds: float = inf,
        warm_seconds: float = 0.0,
        initial_bytes: int = INITIAL_BYTES,
    ) -> None:
        if not 0 < bytes_per_second < inf:
            raise ValueError(f"bytes_per_second is {bytes_per_second}: give a positive rate")
        if not 0 <= round_trip_seconds < inf:
            raise ValueError(f"round_trip_seconds is {round_trip_seconds}: give 0 or more")
        if timeout_seconds <= 0 or timeout_seconds < round_trip_seconds:
            raise ValueError(
                f"timeout_seconds is {timeout_seconds}, the round trip {round_trip_seconds}: give "
                "more than 0, and at least the round trip"
            )
        if warm_seconds < 0:
            raise ValueError(f"warm_seconds is {warm_seconds}: give 0 or more")
        if initial_bytes < SEGMENT_BYTES:
            raise ValueError(f"initial_bytes is {initial_bytes}: give at least {SEGMENT_BYTES}")
        self._round_trip_seconds = round_trip_seconds
        self._timeout_seconds = timeout_seconds
        self._warm_seconds = warm_seconds
        self._initial_bytes = initial_bytes
        self._limit_bytes = bytes_per_second * round_trip_seconds + SEGMENT_BYTES
        """Window from which on the link is the limit."""
        self.window_bytes = initial_bytes
        self._flights: deque[tuple[float, int]] = deque()
        """Time of the acknowledgement and bytes of each segment on its way. Empty once the window
        is no limit, because nothing depends on it any more."""
        self._in_flight_bytes = self._most_in_flight_bytes = 0
        """Bytes on their way, and the most of them since the connection was last empty."""
        self._last_time: float | None = None
        """Time at which the last byte left; None before the first one."""

    @property
    def is_open(self) -> bool:
        """True if the window carries the rate of the link."""
        return self.window_bytes >= self._limit_bytes

    @property
    def in_flight_bytes(self) -> int:
        """Bytes that were sent and not acknowledged; 0 once the window is open."""
        return self._in_flight_bytes

    @property
    def bytes_per_second(self) -> float:
        """Rate that the window permits."""
        if self.is_open:
            return inf
        return self.window_bytes / self._round_trip_seconds

    def sending_seconds(self, now: float, num_bytes: int, bytes_per_second: float) -> float:
        """Send bytes; return the seconds until the last one has left.

        Args:
            now: Time in seconds, not before the end of the bytes before.
            num_bytes: At least 1.
            bytes_per_second: Rate of these bytes, at most that of the link.
        """
        self._acknowledge(now)
        self._decay(now)
        time, left_bytes = now, num_bytes
        while left_bytes:
            self._acknowledge(time)
            part_bytes = left_bytes if self.is_open else min(left_bytes, SEGMENT_BYTES)
            if not self.is_open:
                if self.window_bytes - self._in_flight_bytes < part_bytes:
                    time = self._flights[0][0]
                    continue
                self._in_flight_bytes += part_bytes
                self._most_in_flight_bytes = max(self._most_in_flight_bytes, self._in_flight_bytes)
                arrival = time + part_bytes / bytes_per_second + self._round_trip_seconds
                self._flights.append((arrival, part_bytes))
            time += part_bytes / bytes_per_second
            left_bytes -= part_bytes
        self._last_time = time
        return time - now

    def _decay(self, now: float) -> None:
        """Halve the window for each timeout of silence that was not kept warm."""
        if self._last_time is None:
            return
        idle_seconds = now - self._last_time - self._warm_seconds
        while idle_seconds > self._timeout_seconds and self.window_bytes > self._initial_bytes:
            idle_seconds -= self._timeout_seconds
            self.window_bytes = max(self.window_bytes // 2, self._initial_bytes)

    def _acknowledge(self, now: float) -> None:
        """Grow the window by the bytes that were acknowledged until a time."""
        while self._flights and self._flights[0][0] <= now:
            _, num_bytes = self._flights.popleft()
            self._in_flight_bytes -= num_bytes
            if self.window_bytes < 2 * self._most_in_flight_bytes:
                self.window_bytes += num_bytes
        if self.is_open:
            self._flights.clear()
            self._in_flight_bytes = 0
        if not self._flights:
            self._most_in_flight_bytes = 0
