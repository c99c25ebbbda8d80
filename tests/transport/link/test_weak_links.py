"""Data movers of two machines over a shaped link: measurements, delays, losses."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from benchmarks.net.rig import NamespaceRig, unsupported_reason
from benchmarks.net.shaper import ShapedHop
from gllm.messages.nodes import LinkState
from gllm.transport.base import EdgeLayout
from gllm.transport.ring import Ring
from tests.support.network.mover_processes import (
    WAIT_SECONDS,
    Mover,
    connect,
    payload_of,
    read_step,
    write_step,
)

pytestmark = pytest.mark.skipif(unsupported_reason() is not None, reason=str(unsupported_reason()))
MBIT = 1e6 / 8
DELAY_SECONDS = 0.03
PAYLOAD_SHARE = 1448 / 1500
"""Share of packets that is no header of TCP and IP."""
DECODES = EdgeLayout(slots=8, max_tokens=4, hidden_size=64, itemsize=4)
PREFILLS = EdgeLayout(slots=2, max_tokens=256, hidden_size=3584, itemsize=4)
LONG = pytest.mark.long
SOAK_SECONDS = float(os.environ.get("SOAK_SECONDS", "1800"))
STEP_SECONDS, MAX_ATTEMPTS = 4.0, 3
"""Seconds in which the estimate follows a step: 3, and a report comes once per second."""
LOSSY_END_SECONDS = 150.0
"""Losses of 1 % leave TCP about 0.3 MB/s at 60 ms (Mathis et al., 1997): two prefills of 3.7 MB
take 25 s, and more with jitter."""


class WeakLink:
    """An edge of two lanes over a shaped hop, and the stages at both of its ends."""

    def __init__(self, hop: ShapedHop, source: Mover, target: Mover) -> None:
        self.hop, self.source = hop, source
        files = connect(source, target, num_lanes=2)
        self._rings = [
            (files[0].ring(layout, lane), files[1].ring(layout, lane))
            for lane, layout in enumerate((DECODES, PREFILLS))
        ]
        self._turns = [0, 0]
        self._first_turn = 0
        self._should_stop = threading.Event()
        self._errors: list[BaseException] = []

    @property
    def state(self) -> LinkState:
        return self.source.report.links[0]

    def move(self, lane: int, tokens: int) -> float:
        """Move a step, compare its bytes, and return the seconds that it took."""
        (source, target), turn = self._rings[lane], self._turns[lane]
        self._turns[lane] += 1
        # Before the step is written: this process may be stopped after that.
        begin = time.monotonic()
        write_step(source, turn, tokens, 1000 * lane + turn)
        data = read_step(target, turn, tokens)
        seconds = time.monotonic() - begin
        assert data == payload_of(1000 * lane + turn, len(data))
        return seconds

    @contextmanager
    def prefills(self, end_seconds: float = WAIT_SECONDS) -> Iterator[None]:
        """Move prefills one after another, as many in flight as fit.

        end_seconds: longest time that those in flight at the end take.
        """
        # The receiver begins with this turn, even if its thread starts after the first sends.
        self._first_turn = self._turns[1]
        threads = [threading.Thread(target=self._run, args=(end,)) for end in ("send", "receive")]
        self._slots = threading.Semaphore(PREFILLS.slots)
        self._sent = threading.Semaphore(0)
        self._should_stop.clear()
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._should_stop.set()
            for thread in threads:
                thread.join(end_seconds)
        assert not self._errors
        assert not any(thread.is_alive() for thread in threads)

    def wait_until(self, is_true: Callable[[LinkState], bool]) -> LinkState:
        end = time.monotonic() + WAIT_SECONDS
        while not is_true(self.state):
            assert time.monotonic() < end, self.state
            time.sleep(0.05)
        return self.state

    def change_rate(self, before: float, after: float) -> float:
        """Return the seconds after which the estimate has followed a change within 10 %."""
        self.hop.set_rate(before)
        self.wait_until(lambda state: error_of(state, before) < 0.1)
        self.hop.set_rate(after)
        begin = time.monotonic()
        self.wait_until(lambda state: error_of(state, after) < 0.1)
        return time.monotonic() - begin

    def _run(self, end: str) -> None:
        source, target = self._rings[1]
        try:
            if end == "send":
                self._send(source)
            else:
                self._receive(target)
        except BaseException as error:
            self._errors.append(error)

    def _send(self, ring: Ring) -> None:
        while not self._should_stop.is_set():
            if self._slots.acquire(timeout=0.1):
                write_step(ring, self._turns[1], PREFILLS.max_tokens, self._turns[1])
                self._turns[1] += 1
                self._sent.release()

    def _receive(self, ring: Ring) -> None:
        turn = self._first_turn
        while True:
            if not self._sent.acquire(timeout=0.1):
                if self._should_stop.is_set():
                    return
                continue
            data = read_step(ring, turn, PREFILLS.max_tokens)
            assert data == payload_of(turn, len(data))
            turn += 1
            self._slots.release()


@contextmanager
def weak_link(rate: float = 100e6, congestion: str | None = None) -> Iterator[WeakLink]:
    with NamespaceRig(2, shaped=[1]) as rig:
        hop = rig.hop(1)
        hop.set_rate(rate)
        hop.set_delay(DELAY_SECONDS)

        def start(machine: int, name: str) -> Mover:
            address = rig.addresses[machine]
            command = ["ip", "netns", "exec", rig.namespaces[machine]]
            return Mover(
                name, False, f"{address}:0", congestion=congestion, host=address, command=command
            )

        with start(0, "head") as source, start(1, "other") as target:
            yield WeakLink(hop, source, target)


def error_of(link: LinkState, rate: float) -> float:
    """Return the relative difference of an estimate."""
    if link.bytes_per_second is None:
        return 1.0
    return abs(link.bytes_per_second / (rate / 8 * PAYLOAD_SHARE) - 1)


def has_true_round_trip(link: LinkState) -> bool:
    """Return whether the round trip is that of the hop and the wake-ups at both ends."""
    return 0.95 <= (link.round_trip_seconds or 0.0) / (2 * DELAY_SECONDS) <= 1.2


@pytest.mark.full
def test_nothing_waits_for_a_round_trip_and_silence_costs_little() -> None:
    """A step of an idle pipeline arrives after one delay; probes measure the round trip."""
    with weak_link() as link:
        for delay_seconds in (0.05, DELAY_SECONDS):
            link.hop.set_delay(delay_seconds)
            # Other processes of this machine may delay some of them.
            seconds = min(link.move(0, 1) for _ in range(20))
            assert delay_seconds < seconds <= 1.2 * delay_seconds
        state = link.wait_until(lambda state: state.round_trip_seconds is not None)
        assert state.round_trip_seconds is not None
        before, begin = link.hop.counters(), time.monotonic()
        time.sleep(1.2)
        after, pause = link.hop.counters(), time.monotonic() - begin
        num_bytes = sum(after[way]["bytes"] - before[way]["bytes"] for way in ("ab", "ba"))
        # At most 1 % of the capacity, in fact far less; and probes there are.
        assert 100 < num_bytes < 0.0005 * 100 * MBIT * pause
        # The least of several probes: a busy machine answers some of them late.
        link.wait_until(has_true_round_trip)


@LONG
@pytest.mark.parametrize("congestion", ["cubic", "bbr"])
def test_rate_and_round_trip_follow_the_link(congestion: str) -> None:
    with weak_link(congestion=congestion) as link, link.prefills():
        # The best of some attempts, because a busy machine may stop any of the processes.
        seconds = [link.change_rate(100e6, 40e6)]
        while min(seconds) >= STEP_SECONDS and len(seconds) < MAX_ATTEMPTS:
            seconds.append(link.change_rate(100e6, 40e6))
        assert min(seconds) < STEP_SECONDS
        link.wait_until(has_true_round_trip)
        time.sleep(2)
        before = link.hop.counters()
        time.sleep(6)
        after = link.hop.counters()
        for way in ("ab", "ba"):
            num_dropped = after[way]["overflown"] - before[way]["overflown"]
            assert num_dropped <= 0.001 * (after[way]["packets"] - before[way]["packets"])
        link.hop.set_rate(100e6)
        link.wait_until(lambda state: error_of(state, 100e6) < 0.15)


@LONG
@pytest.mark.timeout(SOAK_SECONDS + 300)
def test_losses_and_jitter_for_long_stop_nothing() -> None:
    """Random losses of 1 % and 20 ms of jitter for 30 minutes: no hang, and no growing memory."""
    with weak_link() as link:
        link.hop.set_loss(0.01)
        link.hop.set_jitter(0.02)
        with link.prefills(LOSSY_END_SECONDS):
            sizes, end = [], time.monotonic() + SOAK_SECONDS
            begin = time.monotonic()
            while time.monotonic() < end:
                link.move(0, 1)
                if time.monotonic() - begin > 0.1 * SOAK_SECONDS:
                    sizes.append(link.source.rss_bytes())
        assert max(sizes[-10:]) <= 1.02 * sizes[0]
        assert link.state.loss_rate > 0
        assert link.source.report.num_malformed == 0
