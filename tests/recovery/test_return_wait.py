"""Wait for a lost node: as long as going on without it is predicted to take."""

from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.recovery.actions import ChangeShape
from gllm.recovery.placement import LOCAL_NODE
from gllm.recovery.records import RecoveryLimits
from gllm.recovery.stages import (
    MIN_RETURN_SECONDS,
    choose_return_seconds,
    predict_reload_seconds,
)
from tests.support.recovery.node_world import NodeWorld

SECONDS = st.floats(0, 1000)


@given(SECONDS, SECONDS)
def test_requests_that_the_other_nodes_can_answer_are_not_rejected(
    predicted: float, left: float
) -> None:
    wait = choose_return_seconds(predicted, left)
    assert 0 <= wait <= max(predicted, MIN_RETURN_SECONDS)
    if predicted <= left:
        assert wait + predicted <= left + 1e-9


@given(SECONDS, SECONDS)
def test_a_wait_is_at_most_twice_as_long_as_the_best_decision(
    predicted: float, returns_after: float
) -> None:
    """Without a deadline: against one who knows when the node returns."""
    wait = choose_return_seconds(predicted, inf)
    pause = returns_after if returns_after <= wait else wait + predicted
    best = min(returns_after, predicted)
    assert pause <= max(2 * best, best + MIN_RETURN_SECONDS)


@given(SECONDS, SECONDS)
def test_a_longer_recovery_is_awaited_longer(first: float, second: float) -> None:
    low, high = sorted((first, second))
    assert choose_return_seconds(low, inf) <= choose_return_seconds(high, inf)


def test_what_cannot_be_answered_in_time_waits_for_the_node() -> None:
    assert choose_return_seconds(25, 60) == 25
    assert choose_return_seconds(45, 60) == 15
    assert choose_return_seconds(60, 60) == 0
    assert choose_return_seconds(61, 60) == 61, "only the node's return saves the requests"


def test_stages_load_the_lost_layers_together() -> None:
    assert predict_reload_seconds(2.0, 8, 2) == 8
    assert predict_reload_seconds(2.0, 9, 2) == 10


@pytest.mark.parametrize(
    ("load_seconds", "recompute_seconds", "timeout", "wait"),
    [
        (2.0, 0.5, 60.0, MIN_RETURN_SECONDS),
        (10.0, 15.0, 60.0, 20.0),
        (10.0, 25.0, 600.0, 30.0),
        (10.0, 25.0, 50.0, 20.0),
    ],
)
def test_the_engine_waits_by_its_load_time_and_its_requests(
    load_seconds: float, recompute_seconds: float, timeout: float, wait: float
) -> None:
    """Stages of two layers: the other three load those of the lost one in half of the time."""
    nodes = [LOCAL_NODE, LOCAL_NODE, "b", "c"]
    world = NodeWorld([1] * 4, nodes, RecoveryLimits(recovery_timeout=timeout))
    world.recovery.predict_recompute = lambda: recompute_seconds
    world.start()
    world.wait(load_seconds)
    world.settle()
    world.log.clear()
    world.lose_node("b", is_death=False)
    world.close_all()
    begin = world.now
    changes: list[float] = []
    while not changes:
        assert world.recovery.next_deadline > world.now
        world.wait(world.recovery.next_deadline - world.now)
        changes = [world.now for _, action in world.log if isinstance(action, ChangeShape)]
    assert changes[0] - begin == pytest.approx(wait)


def test_an_overdue_recovery_has_no_deadline() -> None:
    nodes = [LOCAL_NODE, "b", "c"]
    world = NodeWorld([1] * 3, nodes, RecoveryLimits(recovery_timeout=20.0), can_repartition=False)
    world.recovery.predict_recompute = lambda: 30.0
    world.start()
    world.settle()
    world.lose_node("b", is_death=False)
    world.wait(25.0)
    assert world.recovery.is_overdue
    world.lose_node("c", is_death=False)
    world.can_repartition = True
    assert world.recovery.return_until == pytest.approx(world.now + 30.0)
