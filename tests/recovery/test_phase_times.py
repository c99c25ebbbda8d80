"""Durations of the phases of a recovery."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.recovery.phase_times import PhaseTimes, RecoveryPhase

PHASES = st.sampled_from(RecoveryPhase)


@given(st.lists(st.tuples(PHASES, st.floats(0, 100)), max_size=8), st.floats(0, 100))
def test_each_phase_has_the_time_until_the_next_one(
    phases: list[tuple[RecoveryPhase, float]], last_seconds: float
) -> None:
    times = PhaseTimes()
    times.begin(7.0)
    now, moments = 7.0, [(RecoveryPhase.CLOSE, 7.0)]
    for phase, seconds in phases:
        now += seconds
        times.enter(phase, now)
        moments.append((phase, now))
    now += last_seconds
    times.end(now)
    expected = dict.fromkeys([phase for phase, _ in moments], 0.0)
    for (phase, begin), (_, end) in pairwise([*moments, (RecoveryPhase.CLOSE, now)]):
        expected[phase] += end - begin
    assert times.seconds == pytest.approx(expected)
    assert sum(times.seconds.values()) == pytest.approx(now - 7.0)


def test_a_start_has_no_times_and_the_next_recovery_begins_anew() -> None:
    times = PhaseTimes()
    times.enter(RecoveryPhase.LOAD, 1.0)
    times.end(2.0)
    assert times.seconds == {}
    times.begin(3.0)
    times.enter(RecoveryPhase.WARM_UP, 3.25)
    times.end(4.0)
    times.enter(RecoveryPhase.LOAD, 9.0)
    assert str(times) == "close 0.25 s, warm up 0.75 s"
    times.begin(10.0)
    times.end(10.5)
    assert times.seconds == {RecoveryPhase.CLOSE: 0.5}
