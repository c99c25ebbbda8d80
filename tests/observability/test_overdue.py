"""When a state that lasts too long is logged."""

from gllm.observability.overdue import OverdueWatch


def test_what_lasts_is_logged_after_a_while_and_then_seldom() -> None:
    watch = OverdueWatch()
    times = [now for now in range(1000) if watch.should_warn(False, float(now))]
    assert times == [30, 330, 630, 930]
    assert not watch.should_warn(True, 1000.0)
    assert not watch.should_warn(False, 1001.0)
    assert watch.should_warn(False, 1031.0)
