"""Runs that end early: the verdict of the whole run, from fewer steps."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.plan.capacity import LimitedRun, measure_capacity
from gllm.plan.latency_limits import NO_LIMITS, parse_limits
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.capacity import CAPACITY_RULES, CapacityRule
from gllm.sim.configured import build_simulation, simulate_requests, simulate_trial
from gllm.sim.deployment import simulate
from gllm.sim.metrics.delays import MAX_CHECKS, LongDelays, measure_rate_trial
from gllm.sim.options import SimulationConfig
from tests.support.examples import num_examples

CONFIG = SimulationConfig(
    model="qwen2.5-14b",
    device="L20",
    pipeline_parallel_size=1,
    workload="uniform:100,900,1,8",
    requests=200,
    max_model_len=1024,
)
"""Serves about 5 requests per second."""
RULE = CapacityRule(min_requests=100, usual_requests=200, min_seconds=20.0)


@settings(max_examples=num_examples(6, 200), deadline=None)
@given(
    st.floats(2.0, 12.0),
    st.sampled_from((0.05, 0.5, 2.0)),
    st.integers(0, 1000),
    st.sampled_from(("sarathi", "vllm", "throttle")),
)
def test_the_verdict_is_that_of_the_whole_run(
    rate: float, limit: float, seed: int, policy: str
) -> None:
    config = replace(CONFIG, rate=rate, seed=seed, scheduler=SchedulerConfig(policy=policy))
    rule = replace(RULE, max_p99_delay_seconds=limit)
    deployment, jobs = build_simulation(config)
    whole = measure_rate_trial(simulate(deployment, jobs))
    trial, requests = simulate_trial(config, deployment, jobs, rule)
    assert rule.is_bounded(trial) == rule.is_bounded(whole)
    assert rule.is_sustained(trial) == rule.is_sustained(whole)
    assert trial.num_requests == whole.num_requests
    if rule.is_bounded(whole):
        assert trial == whole
        assert len(requests) == len(jobs)


def test_an_overload_takes_fewer_steps() -> None:
    config = replace(CONFIG, rate=20.0, requests=2000)
    deployment, jobs = build_simulation(config)
    stop = LongDelays([job.arrival_seconds for job in jobs], 1.0)
    stopped = simulate(deployment, jobs, stop=stop)
    assert stop.has_stopped
    whole = simulate(deployment, jobs)
    assert len(stopped.micro_batches) < len(whole.micro_batches) / 10
    assert len(stopped.requests) < len(jobs) / 10


def test_a_run_at_a_low_rate_has_few_decisions() -> None:
    stop = LongDelays([0.0, 1e9], 1.0)
    assert stop.interval_seconds == 1e9 / MAX_CHECKS
    assert LongDelays([0.0, 10.0], 1.0).interval_seconds == 1.0


def test_a_bounded_run_is_not_changed() -> None:
    config = replace(CONFIG, rate=4.0)
    deployment, jobs = build_simulation(config)
    stop = LongDelays([job.arrival_seconds for job in jobs], 5.0)
    stopped, whole = simulate(deployment, jobs, stop=stop), simulate(deployment, jobs)
    assert not stop.has_stopped
    assert stopped.requests == whole.requests
    assert list(stopped.micro_batches) == list(whole.micro_batches)


@pytest.mark.parametrize("text", [pytest.param("", marks=pytest.mark.full), "ttft:p90=0.6"])
def test_the_capacity_is_that_of_whole_runs(text: str) -> None:
    limits = parse_limits(text) if text else NO_LIMITS
    rule = replace(
        CAPACITY_RULES["vidur"], min_seconds=20.0, max_p99_delay_seconds=1.0, rate_step=1.1
    )
    capacity = measure_capacity(CONFIG, 5.0, rule, limits)
    whole = LimitedRun(CONFIG, rule, limits)
    for rate, trial in capacity.trials:
        assert rule.is_sustained(trial) == rule.is_sustained(whole(rate))
    assert capacity.figures == whole.figures[capacity.rate]


def test_several_engines_run_to_their_end() -> None:
    config = replace(CONFIG, rate=80.0, engines=2)
    deployment, jobs = build_simulation(config)
    trial, requests = simulate_trial(
        config, deployment, jobs, replace(RULE, max_p99_delay_seconds=0.5)
    )
    assert requests == simulate_requests(config, deployment, jobs)
    assert 0.5 < trial.p99_delay_seconds < 60
