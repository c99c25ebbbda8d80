"""TCP connection over a slow link, whose sender and receiver a busy machine schedules late."""

from collections import deque
from random import Random
from typing import NamedTuple

from gllm.transport.link.connection import FrameConnection, TcpInfo
from gllm.transport.link.link_monitor import SAMPLE_SECONDS, LinkMonitor

SEGMENT = 1448
STEP_SECONDS = 1e-3
MIN_UNSENT = 16_384
MAX_DELAY_SECONDS = 0.15


class SimulatedTcp(FrameConnection):
    """Kernel's side of a connection: a link of a rate, its queue, both windows and the counters."""

    def __init__(self, bytes_per_second: float, round_trip_seconds: float, receive_buffer: int):
        self.rate, self._round_trip, self._receive_buffer = (
            bytes_per_second,
            round_trip_seconds,
            receive_buffer,
        )
        self.now = 100.0
        self.unsent = 0.0
        self.unsent_limit = MIN_UNSENT
        self._window = 1.5 * bytes_per_second * round_trip_seconds
        """Congestion window: half a window queues at the link."""
        self._pacing = float("inf")
        self._queued = self._unread = self._delivered = self._in_flight = 0.0
        self._acknowledged: deque[tuple[float, float]] = deque()
        """Times of acknowledgements and their bytes."""
        self._busy = self._limited = 0.0

    def advance(self, seconds: float) -> None:
        """Let time pass, in which the kernel sends what it has."""
        end = self.now + seconds
        while self.now < end:
            self._step()

    def read_unread(self) -> None:
        """Let the receiving process read all that has arrived."""
        self._unread = 0.0

    def write(self, num_bytes: float) -> None:
        """Give the kernel bytes until it has that many or as many as it accepts, if more."""
        self.unsent = max(self.unsent, num_bytes, self.unsent_limit)

    def read_tcp_info(self) -> TcpInfo:
        """Return the counters as of this moment."""
        return TcpInfo(
            0.0,
            True,
            self._round_trip + self._queued / self.rate,
            SEGMENT,
            int(self._window),
            int(self._in_flight),
            int(self.unsent),
            int(self._delivered / SEGMENT),
            0,
            0,
            self._busy,
            self._limited,
        )

    def set_pacing(self, bytes_per_second: float) -> None:
        """Limit the rate at which bytes leave."""
        self._pacing = bytes_per_second

    def set_unsent_limit(self, num_bytes: int) -> None:
        """Limit the unsent bytes."""
        self.unsent_limit = num_bytes

    def _step(self) -> None:
        self.now += STEP_SECONDS
        while self._acknowledged and self._acknowledged[0][0] <= self.now:
            _, num_bytes = self._acknowledged.popleft()
            self._delivered += num_bytes
            self._in_flight -= num_bytes
        is_busy = self.unsent > 0 or self._in_flight > 1
        receive_window = self._receive_buffer - self._unread - self._in_flight
        free = max(0.0, min(self._window - self._in_flight, receive_window))
        sent = min(self.unsent, free, self._pacing * STEP_SECONDS)
        if is_busy:
            self._busy += STEP_SECONDS
            if self.unsent > 0 and receive_window <= 0:
                self._limited += STEP_SECONDS
        self.unsent -= sent
        self._in_flight += sent
        self._queued += sent
        carried = min(self._queued, self.rate * STEP_SECONDS)
        self._queued -= carried
        if carried:
            self._unread += carried
            self._acknowledged.append((self.now + self._round_trip, carried))


class Lateness(NamedTuple):
    """Mean times in seconds for which busy machines let a process wait for a core."""

    write: float = 0.0
    """Of the sender, before it gives the kernel more bytes."""
    clock: float = 0.0
    """Of the sender, between reading its clock and the kernel's counters."""
    read: float = 0.0
    """Of the receiver, between two reads."""


class BusyMachines:
    """A prefill that is always sent, by a thread that is scheduled late, to such a receiver."""

    def __init__(
        self, tcp: SimulatedTcp, lateness: Lateness, seed: int, unsent_seconds: float = 0.0
    ) -> None:
        """Create without traffic.

        `unsent_seconds`: time of the link for which the kernel has bytes after each write.
        """
        self.tcp, self._lateness, self._rng = tcp, lateness, Random(seed)
        self._unsent_bytes = unsent_seconds * tcp.rate
        self.monitor = LinkMonitor(is_shaped=True)
        self.monitor.begin(tcp, tcp.now)
        self.estimates: list[float] = []
        """Measured rates after each sample."""
        self._next_read = tcp.now

    def run(self, seconds: float) -> None:
        """Send for a time."""
        tcp, monitor = self.tcp, self.monitor
        end = tcp.now + seconds
        while tcp.now < end:
            # The kernel wakes the thread up for more bytes or for the next sample.
            wake = tcp.now + SAMPLE_SECONDS
            while tcp.now < wake and tcp.unsent > tcp.unsent_limit / 2:
                self._pass(STEP_SECONDS)
            self._wait_for_a_core(self._lateness.write)
            now = tcp.now
            self._wait_for_a_core(self._lateness.clock)
            monitor.observe(now, is_busy=True, has_prefill=True)
            monitor.check_supply()
            tcp.write(self._unsent_bytes)
            if rate := monitor.estimator.bytes_per_second:
                self.estimates.append(rate)

    def _wait_for_a_core(self, mean_seconds: float) -> None:
        if mean_seconds:
            self._pass(min(MAX_DELAY_SECONDS, self._rng.expovariate(1 / mean_seconds)))

    def _pass(self, seconds: float) -> None:
        end, mean_seconds = self.tcp.now + seconds, self._lateness.read
        while self.tcp.now < end:
            self.tcp.advance(STEP_SECONDS)
            if self.tcp.now >= self._next_read:
                self.tcp.read_unread()
                delay = self._rng.expovariate(1 / mean_seconds) if mean_seconds else 0.0
                self._next_read = self.tcp.now + min(MAX_DELAY_SECONDS, delay)
