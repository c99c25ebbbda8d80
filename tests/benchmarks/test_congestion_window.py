"""Congestion windows of simulated connections against hand calculations of slow start."""

from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.weak_links.congestion_window import INITIAL_BYTES, SEGMENT_BYTES, CongestionWindow
from gllm.pacing.traffic import TrafficClass
from gllm.sim.costs.base import TransferCost
from gllm.sim.event_loop import PIPELINE, EventLoop
from gllm.sim.link import make_link
from tests.support.examples import num_examples

RATE, ROUND_TRIP = 12.5e6, 0.06
"""100 Mbit/s in bytes per second, and 30 ms each way."""
SEGMENT_SECONDS = SEGMENT_BYTES / RATE


def make_window(timeout_seconds: float = inf, warm_seconds: float = 0.0) -> CongestionWindow:
    """Return a new window."""
    return CongestionWindow(RATE, ROUND_TRIP, timeout_seconds, warm_seconds)


@pytest.mark.parametrize(
    ("num_segments", "num_rounds", "num_in_last"),
    [(10, 0, 10), (11, 1, 1), (30, 1, 20), (31, 2, 1), (70, 2, 40), (150, 3, 80), (310, 4, 160)],
)
def test_window_doubles_per_round_trip(
    num_segments: int, num_rounds: int, num_in_last: int
) -> None:
    """10, 20, 40 ... segments; a round begins when the first segment of the last one is known."""
    seconds = make_window().sending_seconds(3.0, num_segments * SEGMENT_BYTES, RATE)
    begin = num_rounds * (SEGMENT_SECONDS + ROUND_TRIP)
    assert seconds == pytest.approx(begin + num_in_last * SEGMENT_SECONDS)


def test_window_grows_until_it_carries_the_link() -> None:
    """A prompt of 300 tokens on a new connection takes 6 round trips more than its first bytes.

    RATE * ROUND_TRIP is 518 segments. Rounds of 10 to 320 segments take 6 round trips and send 630
    segments; the window of the next one, 640, is no limit.
    """
    window = make_window()
    num_bytes = 300 * 14_336
    seconds = window.sending_seconds(0.0, num_bytes, RATE)
    rest = num_bytes - 630 * SEGMENT_BYTES
    assert seconds == pytest.approx(6 * (ROUND_TRIP + SEGMENT_SECONDS) + rest / RATE, rel=1e-3)
    assert window.is_open
    assert window.in_flight_bytes == 0
    assert window.sending_seconds(seconds, num_bytes, RATE) == pytest.approx(num_bytes / RATE)


def test_unused_window_does_not_grow() -> None:
    """Single tokens of 14,336 bytes let it grow to twice what is on its way, once."""
    window = make_window()
    for step in range(50):
        seconds = window.sending_seconds(0.1 * step, 14_336, RATE)
        assert seconds == pytest.approx(14_336 / RATE)
    assert 2 * 14_336 <= window.window_bytes <= 2 * 14_336 + SEGMENT_BYTES


@pytest.mark.parametrize(
    ("idle_seconds", "warm_seconds", "num_halvings"),
    [(0.25, 0, 0), (0.27, 0, 1), (0.51, 0, 1), (0.53, 0, 2), (9, 0, 6), (9, 60, 0), (60.3, 60, 1)],
)
def test_idle_window_halves_per_timeout(
    idle_seconds: float, warm_seconds: float, num_halvings: int
) -> None:
    """A window of 640 segments that carries the link, and a timeout of 0.26 s."""
    window = make_window(0.26, warm_seconds)
    end = window.sending_seconds(0.0, 3000 * SEGMENT_BYTES, RATE)
    assert window.is_open
    before = window.window_bytes
    window.sending_seconds(end + idle_seconds, 1, RATE)
    assert window.window_bytes == max(INITIAL_BYTES, before // 2**num_halvings)
    assert window.is_open == (num_halvings == 0)


@settings(max_examples=num_examples(25, 300), deadline=None)
@given(
    st.floats(1e5, 1e8),
    st.floats(0, 0.2),
    st.lists(st.tuples(st.floats(0, 1), st.integers(1, 400_000)), min_size=1, max_size=20),
)
def test_window_bounds_the_bytes_on_their_way(
    rate: float, round_trip: float, sends: list[tuple[float, int]]
) -> None:
    """No byte leaves faster than the link, and no round trip passes without a window of bytes."""
    window = CongestionWindow(rate, round_trip, timeout_seconds=0.2 + round_trip)
    now = 0.0
    for pause, num_bytes in sends:
        now += pause
        seconds = window.sending_seconds(now, num_bytes, rate)
        assert seconds >= num_bytes / rate - 1e-9
        num_rounds = num_bytes / INITIAL_BYTES + 2
        assert seconds <= num_bytes / rate + num_rounds * (round_trip + SEGMENT_BYTES / rate) + 1e-9
        assert 0 <= window.in_flight_bytes <= window.window_bytes
        assert window.window_bytes >= INITIAL_BYTES
        now += seconds


@pytest.mark.parametrize("policy", ["serial", "molink"])
def test_link_delivers_what_its_window_lets_leave(policy: str) -> None:
    """30 segments and then, once the window is idle but warm, 20 more."""
    loop = EventLoop()
    link = make_link(loop, policy, make_window())
    arrivals: list[float] = []

    def send(now: float, num_segments: int) -> None:
        num_bytes = num_segments * SEGMENT_BYTES
        cost = TransferCost(num_bytes / RATE, ROUND_TRIP / 2, num_bytes)
        link.send(TrafficClass.PREFILL, cost, lambda now, _: arrivals.append(now), None)

    loop.push(0.0, PIPELINE, send, 30)
    loop.push(1.0, PIPELINE, send, 20)
    loop.run()
    assert arrivals == pytest.approx(
        [
            ROUND_TRIP + 21 * SEGMENT_SECONDS + ROUND_TRIP / 2,
            1 + 20 * SEGMENT_SECONDS + ROUND_TRIP / 2,
        ]
    )


def serve_mixed_messages(window: CongestionWindow | None) -> tuple[list[float], list[int]]:
    """Send 40 messages of two classes over a link; return times and numbers of the arrivals."""
    loop = EventLoop()
    link = make_link(loop, "molink", window)
    times: list[float] = []
    numbers: list[int] = []

    def deliver(now: float, number: int) -> None:
        times.append(now)
        numbers.append(number)

    def send(now: float, number: int) -> None:
        num_bytes = 14_336 * (1 + 17 * (number % 2))
        cost = TransferCost(num_bytes / RATE, 0.03, num_bytes)
        link.send(TrafficClass(number % 2), cost, deliver, number)

    for number in range(40):
        loop.push(0.004 * number, PIPELINE, send, number)
    loop.run()
    return times, numbers


def test_open_window_changes_nothing() -> None:
    """The same messages over a link with and without a window that carries it."""
    times, numbers = serve_mixed_messages(None)
    windowed_times, windowed_numbers = serve_mixed_messages(CongestionWindow(RATE, 0.0))
    assert windowed_times == pytest.approx(times)
    assert windowed_numbers == numbers
    assert sorted(numbers) == list(range(40))
    slow_times, _ = serve_mixed_messages(make_window())
    assert slow_times[-1] > times[-1] + ROUND_TRIP


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        ((0.0, 0.06), "bytes_per_second"),
        ((inf, 0.06), "bytes_per_second"),
        ((1e6, -1.0), "round_trip_seconds"),
        ((1e6, 0.3, 0.2), "timeout_seconds"),
        ((1e6, 0.0, 0.0), "timeout_seconds"),
        ((1e6, 0.06, inf, -1.0), "warm_seconds"),
        ((1e6, 0.06, inf, 0.0, 100), "initial_bytes"),
    ],
)
def test_bad_arguments_are_named(arguments: tuple[float, ...], name: str) -> None:
    with pytest.raises(ValueError, match=name):
        CongestionWindow(*arguments)  # type: ignore[arg-type]
