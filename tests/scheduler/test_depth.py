"""Depth of a scheduler: plans in flight, shares of the decodes and the prefill cap."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.observability.logged_scheduler import LoggedScheduler, replay_event
from gllm.observability.step_log import (
    DepthEvent,
    StepLogEvent,
)
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.lanes import DECODE_LANE, PREFILL_LANE
from gllm.scheduler.plan import SampledToken, StepPlan, StepResult
from gllm.scheduler.policy_registry import POLICIES
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from tests.scheduler.test_policy import load, resolved
from tests.support.examples import num_examples
from tests.support.scheduler.pipeline import EVERY_POLICY


def make_config(stages: int = 2, **options: Any) -> SchedulerConfig:
    return SchedulerConfig(**options).resolve(stages, 1000, 1000)


def submit(scheduler: Scheduler, count: int, prompt: int = 4) -> None:
    for seq in range(count):
        tokens = [seq] * prompt
        scheduler.add(SchedulerRequest(seq, tokens, 100, frozenset()), 0.0)


def fill(scheduler: Scheduler) -> list[StepPlan]:
    plans = []
    while (plan := scheduler.schedule(0.0)) is not None:
        plans.append(plan)
    return plans


def commit(scheduler: Scheduler, plan: StepPlan) -> None:
    tokens = [
        SampledToken(row.seq, row.num_preemptions, 7) for row in plan.rows if row.should_sample
    ]
    scheduler.commit(StepResult(plan.step, tokens))


def test_the_depth_limits_plans_in_flight_and_divides_the_decodes() -> None:
    scheduler = Scheduler(make_config(max_in_flight=8))
    submit(scheduler, 24)
    for plan in fill(scheduler):
        commit(scheduler, plan)
    assert len(fill(scheduler)) == 2, "12 of 24 each, over 2 stages"
    scheduler = Scheduler(make_config(max_in_flight=8))
    scheduler.set_depth(6)
    submit(scheduler, 24)
    for plan in fill(scheduler):
        commit(scheduler, plan)
    assert [len(plan.rows) for plan in fill(scheduler)] == [4] * 6
    assert (scheduler.stats().depth, scheduler.stats().decoding) == (6, 24)


def test_max_in_flight_is_the_upper_limit() -> None:
    scheduler = Scheduler(make_config(max_in_flight=3))
    assert scheduler.stats().depth == 2
    scheduler.set_depth(9)
    assert scheduler.stats().depth == 3
    submit(scheduler, 30, prompt=900)
    assert len(fill(scheduler)) == 3
    for depth, cap in ((0, None), (1, 0)):
        with pytest.raises(ValueError, match="at least 1"):
            scheduler.set_depth(depth, cap)


def test_a_smaller_depth_waits_for_commits() -> None:
    scheduler = Scheduler(make_config(max_in_flight=4))
    scheduler.set_depth(4)
    submit(scheduler, 30, prompt=900)
    plans = fill(scheduler)
    scheduler.set_depth(2)
    for plan in plans[:2]:
        commit(scheduler, plan)
        assert not fill(scheduler)
    commit(scheduler, plans[2])
    assert len(fill(scheduler)) == 1


def test_the_depth_is_that_of_each_lane() -> None:
    scheduler = Scheduler(make_config(max_in_flight=9, lanes="2"))
    scheduler.set_depth(3)
    submit(scheduler, 12)
    while scheduler.stats().decoding < 12:
        for plan in fill(scheduler):
            commit(scheduler, plan)
    scheduler.add(SchedulerRequest(12, [12] * 900, 100, frozenset()), 0.0)
    plans = fill(scheduler)
    assert [len(plan.rows) for plan in plans if plan.lane == DECODE_LANE] == [4] * 3
    assert 1 <= sum(plan.lane == PREFILL_LANE for plan in plans) <= 3
    assert scheduler.stats().depth == 3


@pytest.mark.parametrize("policy", [name for name in EVERY_POLICY if name != "auto"])
def test_prefill_obeys_the_cap(policy: str) -> None:
    scheduler = Scheduler(make_config(policy=policy, max_in_flight=4))
    scheduler.set_depth(4, 40)
    submit(scheduler, 3, prompt=300)
    num_prefilled = 0
    while num_prefilled < 900:
        plans = fill(scheduler)
        assert plans
        for plan in plans:
            sizes = [row.num_tokens for row in plan.rows if row.start + row.num_tokens <= 300]
            assert sum(sizes) <= 40
            num_prefilled += sum(sizes)
            commit(scheduler, plan)


@pytest.mark.parametrize("name", ["throttle", "throttle-paper", "balance"])
def test_policies_divide_by_the_depth(name: str) -> None:
    """As a pipeline with as many stages would: the number of stages is a size for prefill only."""
    for depth in (1, 2, 5, 16):
        policy, deep = POLICIES[name](resolved(stages=2)), POLICIES[name](resolved(stages=depth))
        for plans in range(depth):
            share = policy.decode_budget(load(decoding=33, plans=plans, depth=depth))
            assert share == deep.decode_budget(load(decoding=33, plans=plans, depth=depth))


arrivals = st.lists(st.tuples(st.integers(1, 200), st.integers(1, 20)), min_size=1, max_size=12)


@given(arrivals, st.sampled_from(EVERY_POLICY), st.integers(2, 5), st.data())
@settings(max_examples=num_examples(20, 500))
def test_a_depth_of_the_stages_changes_nothing(
    requests: list[tuple[int, int]], policy: str, stages: int, data: st.DataObject
) -> None:
    """And a log with changes of the depth is replayed bit by bit."""
    config = make_config(stages, policy=policy)
    plain = Scheduler(config)
    set_once = Scheduler(config)
    set_once.set_depth(stages)
    assert drive(plain, requests) == drive(set_once, requests)

    events: list[StepLogEvent] = []
    lanes = data.draw(st.sampled_from(["1", "2"]))
    deep = make_config(stages, policy=policy, max_in_flight=4 * stages, lanes=lanes)
    logged = LoggedScheduler(deep, events.append, lambda: 0.0)
    depths = st.integers(1, 20)
    changes = {
        step: (
            data.draw(depths),
            data.draw(st.none() | st.integers(1, 50)),
            data.draw(st.booleans()),
        )
        for step in data.draw(st.sets(st.integers(0, 60), max_size=5))
    }
    num_changes = len(changes)
    plans = drive(logged, requests, changes)
    num_events = sum(isinstance(event, DepthEvent) for event in events)
    assert num_events + len(changes) == num_changes
    again = Scheduler(deep)
    replayed = [replay_event(again, event) for event in events]
    assert [plan for plan in replayed if plan is not None] == plans


def drive(
    scheduler: Scheduler,
    requests: list[tuple[int, int]],
    changes: dict[int, tuple[int, int | None, bool]] | None = None,
) -> list[StepPlan]:
    """Run all requests to their end; the depth changes before the steps of `changes`."""
    plans: list[StepPlan] = []
    in_flight: list[StepPlan] = []
    for seq, (prompt, output) in enumerate(requests):
        scheduler.add(SchedulerRequest(seq, [seq] * prompt, output, frozenset()), float(seq))
    while True:
        if changes is not None and (change := changes.pop(len(plans), None)):
            scheduler.set_depth(*change)
        if (plan := scheduler.schedule(100.0)) is not None:
            plans.append(plan)
            in_flight.append(plan)
        elif in_flight:
            commit(scheduler, in_flight.pop(0))
        else:
            return plans
