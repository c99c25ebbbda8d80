"""Capacities within latency limits: those of a fine grid of rates (V12), whatever the processes."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gllm.options.slo import NO_SLO, Slo, parse_slo
from gllm.plan.attainment import EXTENSION
from gllm.plan.best_first import SearchBudget
from gllm.plan.capacity import (
    MIN_JUDGED,
    PLAN_RULES,
    REQUESTS_PER_RUN,
    JudgedSimulation,
    extend_rule,
    measure_capacity,
)
from gllm.sim.capacity import INTERRUPTED, SearchEndedError
from gllm.sim.configured import (
    SimulationAtRate,
    build_simulation,
    simulate_requests,
    simulate_trial,
)
from gllm.sim.options import SimulationConfig
from tests.support.full_cases import full_but

CONFIG = SimulationConfig(
    model="qwen2.5-32b",
    device="H100",
    pipeline_parallel_size=1,
    workload="fixed:3000,2",
    requests=40,
    max_model_len=4096,
)
RULE = replace(PLAN_RULES["vidur"], min_seconds=10.0, max_p99_delay_seconds=1.0)


@pytest.mark.parametrize(
    "limits", [pytest.param(NO_SLO, marks=pytest.mark.full), parse_slo("ttft:p90=0.6")]
)
def test_the_capacity_within_limits_is_that_of_a_fine_grid(limits: Slo) -> None:
    capacity = measure_capacity(CONFIG, 2.0, RULE, limits)
    assert len(capacity.trials) <= RULE.max_trials
    assert capacity.figures
    assert capacity.figures.is_within
    run = SimulationAtRate(CONFIG, RULE, limits, stops_early=False)
    grid = [capacity.rate * (1 + step / 100) for step in range(6)]
    sustained = [RULE.is_sustained(run(rate)) for rate in grid]
    assert sustained[0]
    # Chance lets a rate pass or fail, so one of those up to 5 % above is enough.
    assert not all(sustained[1:])


@pytest.mark.full
def test_limits_lower_the_capacity() -> None:
    rates = [
        measure_capacity(CONFIG, 2.0, RULE, parse_slo(text)).rate
        for text in ("", "ttft:p90=0.6", "ttft:p90=0.01")
    ]
    assert rates[0] > rates[1] > rates[2] == 0


@pytest.mark.parametrize("name", full_but(["vidur"], sorted(PLAN_RULES)))
def test_a_spent_budget_leaves_the_highest_rate_so_far(name: str) -> None:
    rule = replace(
        PLAN_RULES[name], min_seconds=10.0, usual_requests=40, min_requests=40, permits_growth=True
    )
    whole = measure_capacity(CONFIG, 1.0, rule)
    budget = SearchBudget(max_evaluations=3)
    capacity = measure_capacity(CONFIG, 1.0, rule, budget=budget)
    assert capacity.trials == whole.trials[:3]
    sustained = [rate for rate, trial in capacity.trials if rule.is_sustained(trial)]
    assert 0 < capacity.rate == max(sustained) < whole.rate
    assert capacity.figures is not None
    assert capacity.note == budget.refusal() != ""
    assert whole.note == ""
    # No rate below an overload is known yet.
    none = measure_capacity(CONFIG, 50.0, rule, budget=SearchBudget(max_evaluations=1))
    assert (none.rate, none.figures, len(none.trials)) == (0.0, None, 1)
    assert none.note


def test_a_budget_counts_from_the_begin_of_the_command() -> None:
    now = 7.0
    budget = SearchBudget(10.0, clock=lambda: now, begin=0.0)
    budget.end_evaluation()
    now = 10.0
    assert not budget.refusal()
    now = 10.1
    assert budget.refusal() == "the budget of 10 s is spent"
    assert budget.elapsed_seconds == 10.1
    assert budget.num_evaluations == 1


def test_processes_do_not_change_the_capacity() -> None:
    rule = replace(PLAN_RULES["sustained"], min_seconds=0.0, usual_requests=60, min_requests=60)
    limits = parse_slo("ttft=0.8", 0.8)
    one, two = (measure_capacity(CONFIG, 2.0, rule, limits, jobs) for jobs in (1, 2))
    assert one.rate == two.rate > 0
    assert one.figures == two.figures
    assert one.trials == two.trials


@pytest.mark.full
def test_a_judged_capacity_is_below_saturation() -> None:
    """M/D/1: an engine that computes one prompt at a time serves 1 / its seconds per prompt."""
    config = replace(CONFIG, workload="fixed:2000,1")
    rule = replace(PLAN_RULES["sustained"], min_seconds=10.0)
    saturation = measure_saturation(config)
    capacity = measure_capacity(config, saturation, rule, is_judged=True)
    assert 0.8 * saturation < capacity.rate <= saturation
    assert capacity.figures is not None


def test_a_rate_near_the_capacity_is_given_up_before_others_are_tried(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """At saturation, where only long runs decide, a first answer does not wait for them."""
    config = replace(CONFIG, workload="fixed:2000,1")
    num_requests = 0

    def count(*arguments: Any) -> Any:
        nonlocal num_requests
        num_requests += len(arguments[2])
        return simulate_trial(*arguments)

    monkeypatch.setattr("gllm.plan.capacity.simulate_trial", count)
    rule = replace(PLAN_RULES["sustained"], min_seconds=10.0)
    start = 0.99 * measure_saturation(config)
    budget = SearchBudget(max_evaluations=1)
    measure_capacity(config, start, rule, is_judged=True, budget=budget)
    assert num_requests == MIN_JUDGED * (1 + EXTENSION)


def test_a_confirmation_has_other_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def record(config: SimulationConfig) -> None:
        seeds.append(config.seed)
        raise SearchEndedError("the workload is known")

    monkeypatch.setattr("gllm.plan.capacity.build_workload", record)
    for is_confirmation in (False, True):
        with pytest.raises(SearchEndedError):
            JudgedSimulation(CONFIG, RULE, is_confirmation=is_confirmation)(1.0)
    assert seeds[0] == CONFIG.seed != seeds[1]


def measure_saturation(config: SimulationConfig) -> float:
    """Return requests per second of an engine that always has requests."""
    offline = replace(config, requests=400, arrivals="static")
    deployment, jobs = build_simulation(offline)
    served = simulate_requests(offline, deployment, jobs)
    return 400 / max(request.line.times[-1] for request in served.values())


def test_an_interrupt_ends_a_search_for_the_capacity(monkeypatch: pytest.MonkeyPatch) -> None:
    num_runs = num_whole = 0

    def interrupt(*arguments: Any) -> Any:
        nonlocal num_runs
        num_runs += 1
        if num_runs > num_whole:
            raise KeyboardInterrupt
        return simulate_trial(*arguments)

    monkeypatch.setattr("gllm.sim.configured.simulate_trial", interrupt)
    rule = replace(RULE, usual_requests=40, min_requests=40)
    for allowed, has_rate in ((0, False), (2, True)):
        num_whole, num_runs, budget = allowed, 0, SearchBudget()
        capacity = measure_capacity(CONFIG, 1.0, rule, budget=budget)
        assert (capacity.rate > 0) == has_rate
        assert capacity.note == budget.refusal() == INTERRUPTED


@given(st.floats(0, 1e4), st.sampled_from(sorted(PLAN_RULES)), st.floats(0.01, 100))
def test_runs_outlast_their_requests(seconds: float, name: str, rate: float) -> None:
    rule = PLAN_RULES[name]
    extended = extend_rule(rule, seconds)
    assert extended.min_seconds == max(rule.min_seconds, REQUESTS_PER_RUN * seconds)
    assert replace(extended, min_seconds=rule.min_seconds) == rule
    assert extended.num_requests(rate, 1) / rate >= REQUESTS_PER_RUN * seconds * (1 - 1e-9)


@pytest.mark.parametrize("seconds", [-1.0, float("inf"), float("nan")])
def test_a_request_has_a_duration(seconds: float) -> None:
    with pytest.raises(ValueError, match="request_seconds is"):
        extend_rule(PLAN_RULES["vidur"], seconds)


class TickingClock:
    """Clock that advances by a step each time it is read."""

    def __init__(self, step: float) -> None:
        self.now, self._step = 0.0, step

    def __call__(self) -> float:
        self.now += self._step
        return self.now


@pytest.mark.parametrize("limits", [NO_SLO, parse_slo("ttft:p90=0.6")])
@pytest.mark.parametrize("step", [1.0, 0.3])
def test_a_running_simulation_is_cut_off_at_the_budget(limits: Slo, step: float) -> None:
    """The note names the budget, with and without a rate that was sustained before."""
    rule = replace(RULE, usual_requests=2000)
    clock = TickingClock(step)
    ticks: list[float] = []
    budget = SearchBudget(10.0, clock=clock)
    capacity = measure_capacity(
        CONFIG, 1.0, rule, limits, budget=budget, on_tick=lambda: ticks.append(clock.now)
    )
    assert clock.now <= 10.0 + 5 * step
    assert ticks
    assert capacity.note == "the budget of 10 s is spent"
    sustained = [rate for rate, trial in capacity.trials if rule.is_sustained(trial)]
    assert capacity.rate == max(sustained, default=0.0)


def test_a_reserve_is_left_for_work_after_the_search() -> None:
    now = 100.0
    budget = SearchBudget(10.0, clock=lambda: now, reserve=0.2)
    assert budget.deadline is not None
    assert budget.final_deadline is not None
    now = 107.9
    assert not budget.refusal()
    budget.deadline()
    now = 108.1
    assert budget.refusal() == budget.for_one_evaluation().refusal() != ""
    with pytest.raises(SearchEndedError, match="the budget of 10 s is spent"):
        budget.deadline()
    budget.final_deadline()
    assert SearchBudget().deadline is SearchBudget().final_deadline is None
