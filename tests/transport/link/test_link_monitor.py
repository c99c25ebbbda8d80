"""Measurements of a connection, the limits that follow, and the prediction of decode steps."""

import socket
from concurrent.futures import ThreadPoolExecutor
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.pacing.link_estimator import DRAIN_SHARE, MIN_UNSENT_BYTES, PACING_SHARE, TRIAL_SHARE
from gllm.transport.link.connection import (
    SO_MAX_PACING_RATE,
    TCP_NOTSENT_LOWAT,
    FrameConnection,
    TcpInfo,
)
from gllm.transport.link.link_monitor import (
    PROBE_SECONDS,
    SAMPLE_SECONDS,
    WARM_SECONDS,
    LinkMonitor,
)
from gllm.transport.link.sender import MAX_GAP_SECONDS, DecodeClock
from tests.support.network.records import replaced
from tests.support.network.simulated_tcp import BusyMachines, Lateness, SimulatedTcp

SEGMENT = 1448
RATE = 5e6
"""Bytes per second that the scripted link carries."""


class ScriptedConnection(FrameConnection):
    """Connection whose measurements are scripted, and which keeps the limits that are set."""

    def __init__(self) -> None:
        self.info = TcpInfo(0.0, True, 0.06, SEGMENT, 10 * SEGMENT, 0, 0, 0, 0, 0)
        self.pacings: list[float] = []
        self.unsent_limits: list[int] = []

    def read_tcp_info(self) -> TcpInfo:
        return self.info

    def set_pacing(self, bytes_per_second: float) -> None:
        self.pacings.append(bytes_per_second)

    def set_unsent_limit(self, num_bytes: int) -> None:
        self.unsent_limits.append(num_bytes)


class Course:
    """A monitor and the time of its connection."""

    def __init__(self, is_shaped: bool = True, min_bytes_per_second: float = 0.0) -> None:
        self.monitor = LinkMonitor(is_shaped, min_bytes_per_second)
        self.connection = ScriptedConnection()
        self.now = 100.0
        self.monitor.begin(self.connection, self.now)

    def send(
        self,
        seconds: float,
        rate: float = RATE,
        round_trip: float = 0.06,
        is_busy: bool = True,
        kernel_rate: float = 0.0,
        unsent_bytes: int = SEGMENT,
    ) -> None:
        """Deliver segments for a time."""
        end, num_delivered = self.now + seconds, float(self.connection.info.num_delivered)
        while self.now < end:
            self.now += 1.01 * SAMPLE_SECONDS
            num_delivered += rate * 1.01 * SAMPLE_SECONDS / SEGMENT
            self.connection.info = replaced(
                self.connection.info,
                bytes_per_second=kernel_rate,
                round_trip_seconds=round_trip,
                num_delivered=round(num_delivered),
                busy_seconds=self.connection.info.busy_seconds + 1.01 * SAMPLE_SECONDS,
                unacknowledged_bytes=SEGMENT,
                unsent_bytes=unsent_bytes,
            )
            self.monitor.check_supply()
            self.monitor.observe(self.now, is_busy, has_prefill=is_busy)

    def fall_silent(self) -> None:
        """Deliver all that was sent, and send no more."""
        info = self.connection.info
        self.connection.info = replaced(info, unacknowledged_bytes=0, unsent_bytes=0)


def test_prefills_are_paced_once_the_link_is_known() -> None:
    course = Course()
    course.send(0.5, is_busy=False, kernel_rate=2000.0)
    assert course.monitor.estimator.bytes_per_second is None
    # The window is all that is known.
    assert course.monitor.send_bytes_per_second() == pytest.approx(10 * SEGMENT / 0.06)
    course.send(2, round_trip=0.1)
    rate = course.monitor.estimator.bytes_per_second
    assert rate == pytest.approx(RATE, rel=0.05)
    assert course.connection.pacings[0] == pytest.approx(DRAIN_SHARE * RATE, rel=0.1)
    course.send(2, rate=PACING_SHARE * RATE)
    assert course.connection.pacings[-1] == pytest.approx(PACING_SHARE * RATE, rel=0.1)
    course.send(1, rate=1000.0, is_busy=False)
    assert course.connection.pacings[-1] == inf
    assert course.monitor.estimator.bytes_per_second == pytest.approx(RATE, rel=0.1)
    shares = {pacing / RATE for pacing in course.connection.pacings if pacing != inf}
    assert 0.9 * DRAIN_SHARE < min(shares) < max(shares) < 1.1 * TRIAL_SHARE


def test_a_prefill_is_paced_before_its_first_bytes() -> None:
    """It may begin soon after a sample, between decodes that are not paced."""
    course = Course()
    course.send(0.5, is_busy=False)
    course.send(2, round_trip=0.1)
    course.send(2, rate=PACING_SHARE * RATE)
    course.send(1, rate=1000.0, is_busy=False)
    assert course.connection.pacings[-1] == inf
    course.monitor.observe(course.now + 0.1 * SAMPLE_SECONDS, is_busy=True, has_prefill=False)
    assert course.connection.pacings[-1] == inf
    course.monitor.observe(course.now + 0.2 * SAMPLE_SECONDS, is_busy=True, has_prefill=True)
    assert course.connection.pacings[-1] < inf


def test_a_thread_that_is_late_does_not_lower_the_rate() -> None:
    """Its machine computes, so the kernel runs out of bytes; the queues are those of others."""
    course = Course()
    course.send(0.5, is_busy=False)
    course.send(2, round_trip=0.1)
    before = course.monitor.estimator.bytes_per_second
    course.send(3, rate=0.2 * RATE, round_trip=0.1, unsent_bytes=0)
    assert course.monitor.estimator.bytes_per_second == before
    course.send(2, rate=0.2 * RATE, round_trip=0.1)
    assert course.monitor.estimator.bytes_per_second == pytest.approx(0.2 * RATE, rel=0.1)


LATE = [
    # Punctual, and late only at the receiver, which leaves no window.
    (Lateness(), 0.0, 6.0),
    (Lateness(read=0.05), 0.0, 1.2),
    # Between the clock and the counters.
    (Lateness(clock=0.02), 0.4, 6.0),
    (Lateness(clock=0.05), 0.4, 6.0),
    # With bytes, so that the kernel runs out of them; and everywhere.
    (Lateness(write=0.005), 0.0, 6.0),
    (Lateness(write=0.01, clock=0.01, read=0.03), 0.1, 2.0),
]
"""Where machines are late, seconds for which the kernel has bytes, and the receiver's buffer in
products of rate and round trip."""


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("lateness", "unsent_seconds", "buffer_share"), LATE)
@pytest.mark.parametrize(("rate", "round_trip_seconds"), [(12.5e6, 0.03), (2.5e6, 0.02)])
def test_busy_neighbours_do_not_lower_the_rate(
    rate: float,
    round_trip_seconds: float,
    lateness: Lateness,
    unsent_seconds: float,
    buffer_share: float,
    seed: int,
) -> None:
    """No estimate is better than one of how the machines schedule their processes."""
    tcp = SimulatedTcp(rate, round_trip_seconds, int(buffer_share * rate * round_trip_seconds))
    machines = BusyMachines(tcp, lateness, seed, unsent_seconds)
    machines.run(6.0)
    assert all(0.9 * rate < estimate < 1.1 * rate for estimate in machines.estimates)
    if not (lateness.write or lateness.read):
        assert machines.estimates, "a late clock alone is no reason to measure nothing"


def test_a_lower_measurement_than_the_stated_rate_does_not_count() -> None:
    course = Course(min_bytes_per_second=2 * RATE)
    course.send(0.5, is_busy=False)
    course.send(2, round_trip=0.1)
    assert course.monitor.estimator.bytes_per_second == 2 * RATE
    assert min(course.connection.pacings) >= DRAIN_SHARE * 2 * RATE
    course.send(2, rate=5 * RATE, round_trip=0.1)
    assert course.monitor.estimator.bytes_per_second == pytest.approx(5 * RATE, rel=0.1)


@pytest.mark.parametrize("num_bytes", [0, 10, 300_000])
def test_a_sender_looks_each_time_before_the_kernel_gets_more(num_bytes: int) -> None:
    """Not once before a write that waits: the kernel may have run out of bytes meanwhile."""
    data, resumed = bytes(range(256)) * (num_bytes // 256 + 1), list[int]()
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()[:2]
        with socket.create_connection(address) as own, listening.accept()[0] as other:
            own.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            connection = FrameConnection(own)
            with ThreadPoolExecutor(1) as threads:
                received = threads.submit(other.recv, 4 + num_bytes, socket.MSG_WAITALL)
                connection.send_watched(lambda: resumed.append(1), b"head", data[:num_bytes])
                assert received.result(20) == b"head" + data[:num_bytes]
    assert connection.num_bytes == 4 + num_bytes
    assert len(resumed) > num_bytes // 2**17


def test_limits_are_set_again_only_for_large_changes() -> None:
    course = Course()
    assert course.connection.unsent_limits == [MIN_UNSENT_BYTES]
    for _ in range(20):
        course.send(0.5, rate=40 * RATE, round_trip=0.1)
        course.send(0.5, rate=40.4 * RATE, round_trip=0.1)
    assert len(course.connection.unsent_limits) <= 3
    assert len(course.connection.pacings) == 0


def test_a_buffer_that_runs_empty_within_a_message_gets_larger() -> None:
    """The link is faster than the writing thread: it may not have to wake up for each 16 KiB."""
    course = Course()
    for _ in range(3):
        course.fall_silent()
        course.send(0.1, is_busy=False, unsent_bytes=0)
        assert course.connection.unsent_limits == [MIN_UNSENT_BYTES], "nothing was sent before"
    for factor in (2, 4):
        course.send(0.1)
        course.send(0.03, unsent_bytes=0)
        assert course.connection.unsent_limits[-1] == factor * MIN_UNSENT_BYTES


def test_an_edge_without_a_choice_is_measured_but_not_limited() -> None:
    course = Course(is_shaped=False)
    course.send(1, round_trip=0.1)
    assert course.monitor.estimator.bytes_per_second is not None
    assert course.connection.pacings == course.connection.unsent_limits == []


def test_only_silence_is_probed_and_once_until_the_answer() -> None:
    course = Course(is_shaped=False)
    monitor = course.monitor
    course.send(2)
    assert not monitor.should_probe(course.now)
    assert 0 <= monitor.seconds_to_sample(course.now) <= SAMPLE_SECONDS
    course.connection.info = replaced(
        course.connection.info, unacknowledged_bytes=0, unsent_bytes=0
    )
    begin = course.now
    monitor.observe(begin + 2 * SAMPLE_SECONDS, is_busy=False, has_prefill=False)
    wait = monitor.seconds_to_sample(begin + 2 * SAMPLE_SECONDS)
    assert wait == pytest.approx(PROBE_SECONDS - 2 * SAMPLE_SECONDS)
    sent = begin + PROBE_SECONDS + 0.01
    assert monitor.should_probe(sent)
    assert not any(monitor.should_probe(sent + pause) for pause in (0.0, 0.5, 1.1, 3.0))
    monitor.on_echo(sent + 0.02)
    assert monitor.estimator.round_trip_seconds == pytest.approx(0.02)
    assert monitor.should_probe(sent + 5)


def test_a_connection_that_carries_steps_stays_warm() -> None:
    """TCP forgets its window after a silence of 0.2 s and a round trip; probes come before."""
    course = Course()
    course.send(2)
    course.send(2, round_trip=0.1)
    course.connection.info = replaced(
        course.connection.info, unacknowledged_bytes=0, unsent_bytes=0
    )
    monitor, begin = course.monitor, course.now

    def probes(since: float, until: float) -> int:
        """Return the probes of some seconds, all of them answered."""
        count, now = 0, begin + since
        while now < begin + until:
            now += 0.01
            monitor.observe(now, is_busy=False, has_prefill=False)
            if monitor.should_probe(now):
                monitor.on_echo(now)
                count += 1
        return count

    assert probes(0, 2) in (9, 10)
    # No more than once per second after a long silence.
    probes(2, WARM_SECONDS + 1)
    assert probes(WARM_SECONDS + 1, WARM_SECONDS + 5) in (3, 4)


@pytest.mark.parametrize(("is_shaped", "rate"), [(False, RATE), (True, 1e5)])
def test_slow_links_and_plain_connections_are_probed_seldom(is_shaped: bool, rate: float) -> None:
    course = Course(is_shaped)
    course.send(2, rate)
    course.send(2, rate, round_trip=0.1)
    assert course.monitor.estimator.bytes_per_second == pytest.approx(rate, rel=0.05)
    course.connection.info = replaced(
        course.connection.info, unacknowledged_bytes=0, unsent_bytes=0
    )
    course.monitor.observe(course.now + 0.05, is_busy=False, has_prefill=False)
    assert not course.monitor.should_probe(course.now + 0.9)
    assert course.monitor.should_probe(course.now + 1.1)


def test_measurements_and_limits_of_a_real_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        address = listening.getsockname()[:2]
        with socket.create_connection(address) as client, listening.accept()[0] as server:
            client.sendall(bytes(100_000))
            left = 100_000
            while left:
                left -= len(server.recv(left))
            connection = FrameConnection(client)
            info = connection.read_tcp_info()
            assert info is not None
            assert info.num_sent_bytes == 100_000
            assert info.num_retransmitted_bytes == 0
            assert info.num_delivered > 0
            assert info.window_bytes >= info.segment_bytes > 500
            assert 0 < info.round_trip_seconds < 60
            connection.set_pacing(1e6)
            connection.set_unsent_limit(20_000)
            rate = client.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE)
            assert rate == 1_000_000
            assert client.getsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT) == 20_000
            connection.set_pacing(inf)
            assert client.getsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE) == -1


@given(st.floats(0.001, 0.5), st.floats(0, 1), st.integers(2, 30), st.floats(0, 1))
def test_next_decode_step_is_predicted(
    stage_seconds: float, gap_seconds: float, num_steps: int, share: float
) -> None:
    clock, now = DecodeClock(), 50.0
    for turn in range(num_steps):
        clock.on_begin(turn, now)
        if turn:
            # Case 2: what is left of the step that is computed.
            passed = share * stage_seconds
            assert clock.slack_seconds(now + passed) == pytest.approx(stage_seconds - passed)
        now += stage_seconds
        clock.on_end(now)
        if turn:
            # Case 3: the pause, then a whole step.
            expected = (1 - share) * gap_seconds + stage_seconds
            assert clock.slack_seconds(now + share * gap_seconds) == pytest.approx(expected)
        now += gap_seconds
    assert clock.slack_seconds(now + 3 * (gap_seconds + stage_seconds)) is None


def test_begins_that_were_missed_or_late() -> None:
    clock = DecodeClock()
    assert clock.slack_seconds(0.0) is None
    clock.on_end(1.0)
    clock.on_begin(1, 1.2)
    clock.on_end(1.3)
    assert clock.slack_seconds(1.3) == pytest.approx(0.3)
    # A begin is seen again after the end of its step, which is no news.
    clock.on_begin(1, 1.2)
    assert clock.slack_seconds(1.4) == pytest.approx(0.2)
    # Much later another request comes.
    clock.on_begin(2, 1.3 + 2 * MAX_GAP_SECONDS)
    clock.on_end(1.4 + 2 * MAX_GAP_SECONDS)
    assert clock.slack_seconds(1.4 + 2 * MAX_GAP_SECONDS) == pytest.approx(0.3)
