"""Signals that end a process: drain, repetition, end at once."""

from signal import SIGINT, SIGTERM

import pytest

from gllm.observability.stop_signals import REPEAT_SECONDS, StopAction, StopSignals

LATER = REPEAT_SECONDS + 0.5


@pytest.mark.parametrize(
    ("signals", "reactions"),
    [
        ([(SIGTERM, 0.0)], ["drain"]),
        ([(SIGTERM, 0.0), (SIGTERM, 0.1), (SIGTERM, LATER)], ["drain", "ignore", "kill"]),
        ([(SIGINT, 0.0), (SIGTERM, 0.1)], ["drain", "ignore"]),
        ([(SIGINT, 0.0), (SIGINT, 0.1)], ["drain", "kill"]),
        ([(SIGTERM, 0.0), (SIGINT, 0.1)], ["drain", "kill"]),
        ([(SIGTERM, 7.0), (SIGTERM, 7.0 + REPEAT_SECONDS)], ["drain", "kill"]),
    ],
)
def test_a_signal_on_two_ways_is_one(
    signals: list[tuple[int, float]], reactions: list[str]
) -> None:
    state = StopSignals()
    actions = [state.on_signal(number, now) for number, now in signals]
    assert actions == [StopAction(name) for name in reactions]
