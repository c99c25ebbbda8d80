"""Departure: machines that got SIGTERM with their head stay until it has drained."""

import math

from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.recovery.departure import SETTLE_SECONDS, Departure
from tests.support.examples import num_examples

TICK = 0.125


def leave_time(agent_at: float, head_at: float, drain_seconds: float, lost_at: float) -> float:
    """Return the time at which an agent leaves an engine that ends.

    Args:
        agent_at: time of the agent's signal.
        head_at: time of the head's signal; infinity for none.
        drain_seconds: time for which the head drains, after which it ends all memberships.
        lost_at: time at which the session with the head ends; infinity for never.
    """
    departure, now = Departure(), 0.0
    while True:
        drained_at = head_at + drain_seconds
        if now >= agent_at:
            departure.request(agent_at)
        is_member = now < min(lost_at, drained_at)
        state = "draining" if head_at <= now < drained_at else "ready"
        if now >= agent_at and (not is_member or departure.may_leave(now, is_member, state)):
            return now
        now += TICK


times = st.integers(0, 200).map(lambda count: count * TICK)


@settings(max_examples=num_examples(60, 600))
@given(times, times, times, st.one_of(st.just(math.inf), times))
def test_requests_of_a_head_that_drains_keep_their_layers(
    agent_at: float, head_at: float, drain_seconds: float, lost_at: float
) -> None:
    left_at = leave_time(agent_at, head_at, drain_seconds, lost_at)
    assert left_at >= agent_at
    if agent_at < head_at + drain_seconds and head_at <= agent_at + SETTLE_SECONDS - TICK:
        assert left_at == max(agent_at, min(lost_at, head_at + drain_seconds))
    # Whatever the head does, the departure is bounded.
    assert left_at <= max(agent_at + SETTLE_SECONDS, head_at + drain_seconds, agent_at) + TICK


def test_a_machine_leaves_alone_after_the_others_had_time_for_their_signal() -> None:
    departure = Departure()
    assert not departure.may_leave(5.0, True, "ready"), "nobody has requested it"
    departure.request(10.0)
    departure.request(11.0)
    assert not departure.may_leave(10.0, True, "ready")
    assert departure.settles_at == 10.0 + SETTLE_SECONDS
    assert departure.may_leave(departure.settles_at, True, "ready")
    assert not departure.may_leave(departure.settles_at, True, "draining")
    assert departure.may_leave(10.0, False, "draining"), "no request needs it"
