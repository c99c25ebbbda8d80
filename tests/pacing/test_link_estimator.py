"""Estimates of a link from a model of TCP: steps of the rate, limits of the sender, round trips."""

import random
from collections import deque
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.pacing.link_estimator import (
    DRAIN_SHARE,
    FAST_BYTES_PER_SECOND,
    MAX_TRIAL_QUEUE_BYTES,
    MAX_UNSENT_BYTES,
    MIN_DROP_SECONDS,
    MIN_UNSENT_BYTES,
    NOTICE_ROUND_TRIPS,
    NOTICE_SECONDS,
    PACING_SHARE,
    ROUND_TRIP_WINDOW_SECONDS,
    TRIAL_SHARE,
    UNSENT_SECONDS,
    LinkEstimator,
    LinkSample,
    SendRate,
)
from tests.support.examples import num_examples

MBIT = 1e6 / 8
TICK = 0.005
SAMPLE_TICKS = 4
QUEUE_BYTES = 2**20
"""Bytes that wait at the bottleneck at most."""


class ModelLink:
    """Fluid model of a TCP connection over a bottleneck, and the estimator that watches it.

    The congestion window doubles per round trip until the queue overflows, then it falls to 0.7 and
    grows by 3 % per round trip. Measured rates
    are means over at most 0.1 s, with noise.
    """

    def __init__(self, capacity: float, base: float, seed: int = 0, is_paced: bool = True) -> None:
        self.capacity, self.base = capacity, base
        self.estimator = LinkEstimator()
        self.rate = SendRate(self.estimator)
        self.now = 0.0
        self.max_queue = 0.0
        self._random = random.Random(seed)
        self._is_paced = is_paced
        self._window, self._threshold = 14_480.0, inf
        self._queue = 0.0
        self._arrived: deque[tuple[float, float, bool]] = deque()
        """Ticks of the window: time, bytes that arrived, and whether the sender had too few."""

    def run(self, seconds: float, demand: float = inf, has_prefill: bool = True) -> None:
        """Send for a time.

        Args:
            seconds: the time.
            demand: bytes per second that the sender has.
            has_prefill: True if prefills wait.
        """
        for tick in range(round(seconds / TICK)):
            self.now += TICK
            pacing = inf
            if self._is_paced:
                pacing = self.rate.pacing_bytes_per_second(self.now, has_prefill)
            round_trip = self.base + self._queue / self.capacity
            able = min(pacing, self._window / round_trip)
            self._move(min(able, demand), demand < able, round_trip)
            if tick % SAMPLE_TICKS == 0:
                self._observe(pacing, round_trip)

    def _move(self, sent: float, is_app_limited: bool, round_trip: float) -> None:
        arrived = min(self.capacity, sent + self._queue / TICK)
        self._queue += (sent - arrived) * TICK
        if self._queue > QUEUE_BYTES:
            self._queue = QUEUE_BYTES
            self._window *= 0.7
            self._threshold = self._window
        elif not is_app_limited and sent > 0.9 * self._window / round_trip:
            growth = self._window * (1 if self._window < self._threshold else 0.03)
            self._window += growth * TICK / round_trip
        self.max_queue = max(self.max_queue, self._queue)
        self._arrived.append((self.now, arrived * TICK, is_app_limited))
        while self._arrived[0][0] <= self.now - min(max(round_trip, 0.05), 0.1):
            self._arrived.popleft()

    def _observe(self, pacing: float, round_trip: float) -> None:
        noise = self._random.uniform(0.96, 1.04)
        num_bytes = sum(each for _, each, _ in self._arrived)
        rate = num_bytes / (TICK * len(self._arrived))
        is_limited = any(each for _, _, each in self._arrived)
        sample = LinkSample(self.now, rate * noise, is_limited, pacing, round_trip)
        self.estimator.observe(sample)

    @property
    def error(self) -> float:
        """Relative difference of the estimate."""
        rate = self.estimator.bytes_per_second
        assert rate is not None
        return abs(rate / self.capacity - 1)


PATHS = st.tuples(
    st.floats(10, 400).map(lambda rate: rate * MBIT), st.floats(0.01, 0.1), st.integers(0, 999)
)
"""Rates, base round trips and seeds."""


@settings(max_examples=num_examples(15, 200), deadline=None)
@given(PATHS, st.booleans())
def test_a_link_that_carries_less_is_noticed(
    path: tuple[float, float, int], is_paced: bool
) -> None:
    capacity, base, seed = path
    link = ModelLink(capacity, base, seed, is_paced)
    link.run(6)
    assert link.error < 0.1
    link.capacity *= 0.4
    link.run(3)
    assert link.error < 0.1
    assert link.estimator.is_saturated


@settings(max_examples=num_examples(10, 100), deadline=None)
@given(PATHS)
def test_a_link_that_carries_more_is_noticed(path: tuple[float, float, int]) -> None:
    capacity, base, seed = path
    link = ModelLink(0.4 * capacity, base, seed)
    link.run(6)
    link.capacity = capacity
    link.run(15)
    assert link.error < 0.2


@settings(max_examples=num_examples(10, 100), deadline=None)
@given(PATHS, st.floats(0.001, 0.8))
def test_a_sender_with_little_to_send_changes_nothing(
    path: tuple[float, float, int], share: float
) -> None:
    capacity, base, seed = path
    link = ModelLink(capacity, base, seed)
    link.run(6)
    before = link.estimator.bytes_per_second
    assert before is not None
    link.run(10, demand=share * capacity, has_prefill=False)
    after = link.estimator.bytes_per_second
    assert after == pytest.approx(before, rel=0.01)


def test_nothing_is_known_before_the_link_was_filled() -> None:
    """A first guess from a few decodes would make prefills too small to correct it."""
    link = ModelLink(100 * MBIT, 0.06)
    link.run(5, demand=1 * MBIT, has_prefill=False)
    assert link.estimator.bytes_per_second is None
    assert link.rate.pacing_bytes_per_second(link.now, has_prefill=True) == inf
    link.run(2)
    assert link.error < 0.1


def test_late_acknowledgements_of_a_few_bytes_are_no_queue() -> None:
    """A machine that starts answers probes late, and a first step of 14 KB does not fill a link.

    Prefills paced to its rate would take minutes: at 0.8 Mbit/s instead of 200 Mbit/s.
    """
    estimator = LinkEstimator()
    for second, round_trip in enumerate((0.1, 0.064, 0.121, 0.126, 0.125, 0.119)):
        estimator.observe(LinkSample(float(second), 0.0, True, inf, round_trip))
    assert estimator.has_queue
    for tick, rate in enumerate((46e3, 102e3, 132e3, 120e3)):
        estimator.observe(LinkSample(6 + 0.02 * tick, rate, True, inf, 0.1))
    assert estimator.bytes_per_second is None
    assert SendRate(estimator).pacing_bytes_per_second(6.1, has_prefill=True) == inf
    for tick in range(10):
        estimator.observe(LinkSample(7 + 0.02 * tick, 24e6, False, inf, 0.09))
    assert estimator.bytes_per_second == pytest.approx(24e6)


def test_pacing_keeps_the_queue_short() -> None:
    """After the first overflow; without pacing the window fills the queue again and again."""
    queues = {}
    for is_paced in (True, False):
        link = ModelLink(100 * MBIT, 0.06, is_paced=is_paced)
        link.run(6)
        link.max_queue = 0.0
        link.run(10)
        queues[is_paced] = link.max_queue
    assert queues[True] < 0.4 * queues[False]


def test_outages_of_a_moment_are_ignored() -> None:
    estimator = LinkEstimator()
    for tick in range(100):
        estimator.observe(LinkSample(0.02 * tick, 100.0, False, inf, 0.06 + 0.04 * (tick > 3)))
    begin = 2.0
    while begin < 2.0 + 0.8 * MIN_DROP_SECONDS:
        estimator.observe(LinkSample(begin, 20.0, False, inf, 0.5))
        begin += 0.02
    estimator.observe(LinkSample(begin, 100.0, False, inf, 0.1))
    assert estimator.bytes_per_second == pytest.approx(100.0)


@pytest.mark.parametrize("sent", [(0, 0), (1000, 10), (1000, 1000), (1000, 2000)])
def test_loss_is_a_share(sent: tuple[int, int]) -> None:
    estimator = LinkEstimator()
    for tick in range(200):
        estimator.observe(LinkSample(0.1 * tick, 0, False, inf, 0, *sent))
    expected = min(1.0, sent[1] / sent[0]) if sent[0] else 0.0
    assert estimator.loss_rate == pytest.approx(expected)


@given(st.lists(st.tuples(st.floats(0, 3), st.floats(0.001, 1)), min_size=1, max_size=60))
def test_round_trip_is_the_least_of_the_window(steps: list[tuple[float, float]]) -> None:
    estimator, now, seen = LinkEstimator(), 0.0, []
    assert estimator.round_trip_seconds is None
    for pause, seconds in steps:
        now += pause
        seen.append((now, seconds))
        estimator.observe_round_trip(now, seconds)
        window = [each for time, each in seen if time >= now - ROUND_TRIP_WINDOW_SECONDS]
        assert estimator.round_trip_seconds == min(window)


class FixedEstimator(LinkEstimator):
    """Estimator of a link that was measured."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self._rate, self._is_measured, self.is_saturated = rate, True, True
        self.observe_round_trip(0.0, 0.06)


def test_prefills_are_paced_and_decodes_are_not() -> None:
    rate = SendRate(FixedEstimator(1e6))
    assert rate.pacing_bytes_per_second(0, has_prefill=False) == inf
    assert rate.pacing_bytes_per_second(0, has_prefill=True) == PACING_SHARE * 1e6
    shares = [
        rate.pacing_bytes_per_second(0.02 * tick, has_prefill=True) / 1e6 for tick in range(1000)
    ]
    assert set(shares) == {PACING_SHARE, TRIAL_SHARE}
    assert shares.count(TRIAL_SHARE) < 0.2 * len(shares)
    assert rate.pacing_bytes_per_second(30, has_prefill=False) == inf


@given(st.floats(1e4, 1e8), st.floats(0.001, 0.3))
def test_a_trial_overfills_a_link_by_no_more_than_a_short_queue(
    rate: float, round_trip: float
) -> None:
    estimator = FixedEstimator(rate)
    estimator.observe_round_trip(0.1, round_trip)
    limits = SendRate(estimator)
    shares = {
        limits.pacing_bytes_per_second(0.02 * tick, has_prefill=True) / rate for tick in range(200)
    }
    trial = max(shares)
    assert min(shares) == pytest.approx(PACING_SHARE)
    assert 1 < trial <= TRIAL_SHARE * (1 + 1e-9)
    # Until the queue shows in the round trips.
    least = min(round_trip, 0.06)
    noticed = NOTICE_ROUND_TRIPS * least + NOTICE_SECONDS
    assert (trial - 1) * rate * noticed <= MAX_TRIAL_QUEUE_BYTES * (1 + 1e-6)


def test_a_queue_ends_a_trial_and_is_drained() -> None:
    estimator = FixedEstimator(1e6)
    limits = SendRate(estimator)

    def share(now: float) -> float:
        return limits.pacing_bytes_per_second(now, has_prefill=True) / 1e6

    trial = next(0.02 * tick for tick in range(500) if share(0.02 * tick) == TRIAL_SHARE)
    assert share(trial + 0.1) == TRIAL_SHARE
    estimator.queue_begin = trial + 0.12
    assert share(trial + 0.12) == share(trial + 0.2) == PACING_SHARE
    # A queue that stands is drained, but not for long: others may make it.
    assert share(trial + 0.3) == share(trial + 0.7) == DRAIN_SHARE
    assert share(trial + 0.9) == share(trial + 1.5) == PACING_SHARE
    assert share(trial + 2) == DRAIN_SHARE
    estimator.queue_begin = None
    assert share(trial + 2.1) == PACING_SHARE


@pytest.mark.parametrize("rate", [1e3, 1e6, FAST_BYTES_PER_SECOND, 1e10])
def test_fast_links_are_not_paced_and_may_buffer_more(rate: float) -> None:
    limits = SendRate(FixedEstimator(rate))
    pacing = limits.pacing_bytes_per_second(0, has_prefill=True)
    assert (pacing == inf) == (rate >= FAST_BYTES_PER_SECOND)
    assert limits.unsent_bytes() == max(MIN_UNSENT_BYTES, int(rate * UNSENT_SECONDS))
    for _ in range(20):
        limits.on_starved()
    # An empty buffer means that the writing thread is too slow, but for links known to be slow.
    least = MAX_UNSENT_BYTES if rate >= FAST_BYTES_PER_SECOND else MIN_UNSENT_BYTES
    assert limits.unsent_bytes() == max(least, int(rate * UNSENT_SECONDS))
