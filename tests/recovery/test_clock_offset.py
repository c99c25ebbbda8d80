"""Clock offsets from heartbeats: drifting clocks, asymmetric delays, jumps, old samples."""

import math
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.recovery.clock_offset import (
    MAX_DRIFT,
    NUM_SAMPLES,
    TOLERANCE_SECONDS,
    ClockOffset,
)
from tests.support.examples import num_examples


class Clocks:
    """Two machines; the peer's clock is ahead, and drifts."""

    def __init__(self, ahead: float, drift: float = 0.0) -> None:
        self.now = 1000.0
        self.ahead = ahead
        self.drift = drift
        self.offset = ClockOffset()

    @property
    def truth(self) -> float:
        return self.ahead + self.drift * (self.now - 1000.0)

    def exchange(self, there: float, back: float, rest: float = 0.01) -> None:
        """Send a message and receive the answer."""
        sent = self.now
        self.now += there
        heard = self.now + self.truth
        self.now += rest
        peer_sent = self.now + self.truth
        self.now += back
        self.offset.on_echo(sent, heard, peer_sent, self.now)

    @property
    def error(self) -> float:
        assert self.offset.seconds is not None
        return abs(self.offset.seconds - self.truth)


def test_nothing_is_known_before_the_first_echo() -> None:
    offset = ClockOffset()
    assert offset.seconds is None
    assert offset.round_trip_seconds is None


def test_symmetric_delays_give_the_offset() -> None:
    clocks = Clocks(ahead=-250.0)
    clocks.exchange(0.03, 0.03)
    assert clocks.error < 1e-9
    assert clocks.offset.round_trip_seconds == pytest.approx(0.06)


def test_the_least_round_trip_wins() -> None:
    clocks = Clocks(ahead=17.0)
    clocks.exchange(0.5, 0.001)
    assert clocks.error > 0.2
    clocks.exchange(0.001, 0.001)
    assert clocks.error < 1e-6
    clocks.exchange(0.001, 0.5)
    assert clocks.error < 1e-6, "a worse sample changes nothing"


@settings(max_examples=num_examples(50, 1000), deadline=None)
@given(
    st.floats(-1e6, 1e6),
    st.floats(-MAX_DRIFT / 2, MAX_DRIFT / 2),
    st.lists(
        st.tuples(st.floats(1e-4, 0.5), st.floats(1e-4, 0.5), st.floats(0, 2)),
        min_size=1,
        max_size=3 * NUM_SAMPLES,
    ),
)
def test_the_error_is_at_most_half_a_round_trip_and_the_drift(
    ahead: float, drift: float, exchanges: list[tuple[float, float, float]]
) -> None:
    clocks = Clocks(ahead, drift)
    for there, back, pause in exchanges:
        clocks.now += pause
        clocks.exchange(there, back)
        bound = (there + back) / 2 + TOLERANCE_SECONDS
        assert clocks.error <= bound, "never worse than the latest sample alone"
    least = clocks.offset.round_trip_seconds
    assert least is not None
    latest = exchanges[-NUM_SAMPLES:]
    assert least <= min(there + back for there, back, _ in latest) + TOLERANCE_SECONDS


def test_drifting_clocks_outdate_the_best_sample() -> None:
    clocks = Clocks(ahead=3.0, drift=MAX_DRIFT / 2)
    random = Random(7)
    clocks.exchange(1e-5, 1e-5)
    for _ in range(600):
        clocks.now += 1.0
        clocks.exchange(random.uniform(0.001, 0.002), random.uniform(0.001, 0.002))
    # The first sample is off by 30 ms by now.
    assert clocks.error < 0.003


def test_samples_expire() -> None:
    clocks = Clocks(ahead=1.0)
    clocks.exchange(0.001, 0.001)
    for _ in range(NUM_SAMPLES):
        clocks.exchange(0.1, 0.1)
    assert clocks.offset.round_trip_seconds == pytest.approx(0.2)


def test_a_jump_of_a_clock_discards_earlier_samples() -> None:
    clocks = Clocks(ahead=1.0)
    for _ in range(10):
        clocks.exchange(0.001, 0.001)
    clocks.ahead += 30.0
    clocks.exchange(0.05, 0.03)
    assert clocks.error <= 0.04
    assert clocks.offset.round_trip_seconds == pytest.approx(0.08)


@pytest.mark.parametrize(
    "times",
    [
        (5.0, 1.0, 2.0, 4.0),
        (1.0, 6.0, 5.0, 2.0),
        (1.0, 5.0, 9.0, 2.0),
        (math.nan, 5.0, 5.0, 2.0),
        (0.0, math.inf, math.inf, 2.0),
    ],
)
def test_impossible_times_are_ignored(times: tuple[float, float, float, float]) -> None:
    offset = ClockOffset()
    offset.on_echo(*times)
    assert offset.seconds is None
    offset.on_echo(1.0, 6.0, 6.0, 1.5)
    offset.on_echo(*times)
    assert offset.seconds == pytest.approx(4.75)
