"""Failures in a row: another cause is a warning at once, the same one now and then."""

from hypothesis import given
from hypothesis import strategies as st

from gllm.recovery.backoff import FailureLog


@given(st.lists(st.tuples(st.floats(0.0, 40.0), st.sampled_from("abc")), max_size=30))
def test_each_cause_is_logged_at_once_and_once_per_interval(steps: list[tuple[float, str]]) -> None:
    log = FailureLog(60.0)
    now, last = 0.0, dict[str, float]()
    for gap, cause in steps:
        now += gap
        expected = cause not in last or now - last[cause] >= 60.0
        assert log.is_due(cause, now) == expected
        if expected:
            last[cause] = now


def test_a_success_makes_every_cause_a_new_one() -> None:
    log = FailureLog(60.0)
    assert log.is_due("a", 0.0)
    assert not log.is_due("a", 1.0)
    log.reset()
    assert log.is_due("a", 2.0)
