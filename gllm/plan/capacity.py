"""Capacity of a configuration within latency limits, by simulation."""

from dataclasses import replace
from math import inf
from typing import NamedTuple

from gllm.observability.latency import RequestTimeline, collect_latencies, percentile
from gllm.plan.budget import SearchBudget
from gllm.plan.latency_limits import NO_LIMITS, LatencyLimits
from gllm.sim.capacity import (
    CAPACITY_RULES,
    CapacityRule,
    RateTrial,
    TrialObserver,
    find_capacity,
    make_rate_trial,
)
from gllm.sim.configured import simulate_requests, simulate_trial
from gllm.sim.costs.base import CostRangeError
from gllm.sim.deployment import Deployment
from gllm.sim.metrics.delays import scheduling_delays
from gllm.sim.options import SimulationConfig, build_deployment, build_workload

PLAN_RULES = {
    "sustained": CAPACITY_RULES["sustained"],
    "vidur": replace(CAPACITY_RULES["vidur"], min_seconds=60.0),
}
"""Rules by name. Vidur's has runs of 60 s at least: at an overload of 10 %, the last requests wait
longer than its limit. `extend_rule` makes them longer where requests are."""
REQUESTS_PER_RUN = 8.0
"""Least length of a run in durations of a long request. Requests in progress when the last one
arrives cost the run nothing: by Little's law they raise the capacity by at most an eighth."""


def extend_rule(rule: CapacityRule, request_seconds: float) -> CapacityRule:
    """Return a rule whose runs outlast their requests several times.

    Args:
        rule: The rule; runs that it has already long enough keep their length.
        request_seconds: Duration of a long request at about the capacity, 0 if unknown.

    Raises:
        ValueError: The duration is negative or not finite.
    """
    if not 0 <= request_seconds < inf:
        raise ValueError(f"request_seconds is {request_seconds}: give a time of at least 0 s")
    least = REQUESTS_PER_RUN * request_seconds
    return rule if least <= rule.min_seconds else replace(rule, min_seconds=least)


class RunFigures(NamedTuple):
    """Latencies of a run in seconds; None without a value."""

    ttft_p50: float | None
    ttft_p90: float | None
    tpot_p50: float | None
    itl_p99: float | None
    attainment: float
    """Share of the requests that keep the limits of each request, 0..1."""
    is_within: bool
    """True if the run keeps all limits."""


class ConfigurationCapacity(NamedTuple):
    """Result of a search."""

    rate: float
    """Highest request rate per second; 0: no rate is within the limits."""
    figures: RunFigures | None
    """Figures at that rate; None without one."""
    trials: tuple[tuple[float, RateTrial], ...] = ()
    """(request rate, its figures) of all simulations; P99 is infinite where a limit is missed."""
    note: str = ""
    """Reason of a rate of 0, or of an early end of the search."""


def measure_figures(timelines: list[RequestTimeline], limits: LatencyLimits) -> RunFigures:
    """Return the figures of a run."""
    latencies = collect_latencies(timelines)

    def at(name: str, percent: float) -> float | None:
        return percentile(latencies[name], percent) if latencies[name] else None

    return RunFigures(
        at("ttft", 50),
        at("ttft", 90),
        at("tpot", 50),
        at("itl", 99),
        limits.attained(timelines),
        limits.are_kept(timelines),
    )


class LimitedRun:
    """Simulation of a configuration at any rate. A run beyond a limit has infinite delays.

    Args:
        config: Deployment, number of engines and workload.
        rule: States the number of requests that a rate needs.
        limits: Latency limits.
        stops_early: End runs whose scheduling delays can no longer be within the rule's limit; they
            have no figures.
    """

    def __init__(
        self,
        config: SimulationConfig,
        rule: CapacityRule,
        limits: LatencyLimits,
        stops_early: bool = False,
    ) -> None:
        self._config, self._rule, self._limits = config, rule, limits
        self._stops_early = stops_early
        self._deployment: Deployment | None = None
        self.figures: dict[float, RunFigures] = {}
        """Figures of the runs in this process, by rate."""

    def __call__(self, rate: float) -> RateTrial:
        """Return the scheduling delays at a rate in requests per second."""
        num_requests = self._rule.num_requests(rate, self._config.requests)
        config = replace(self._config, rate=rate, requests=num_requests)
        jobs = build_workload(config)
        longest = max(job.num_prompt_tokens + job.num_output_tokens for job in jobs)
        deployment = self._deployment
        if deployment is None or longest > deployment.scheduler.max_model_len:
            # Profiles take seconds to be fitted.
            deployment = self._deployment = build_deployment(config, longest)
        if self._stops_early:
            trial, requests = simulate_trial(config, deployment, jobs, self._rule)
            if not self._rule.is_bounded(trial):
                return trial
        else:
            requests = simulate_requests(config, deployment, jobs)
            trial = make_rate_trial(scheduling_delays(requests.values()))
        figures = measure_figures([each.line for each in requests.values()], self._limits)
        self.figures[rate] = figures
        return trial if figures.is_within else trial._replace(p99_delay_seconds=inf)


def measure_capacity(
    config: SimulationConfig,
    start_rate: float,
    rule: CapacityRule = PLAN_RULES["sustained"],
    limits: LatencyLimits = NO_LIMITS,
    jobs: int = 1,
    on_trial: TrialObserver = lambda rate, trial: None,
    budget: SearchBudget | None = None,
) -> ConfigurationCapacity:
    """Return the highest rate that a rule calls sustained and that keeps all limits.

    Args:
        config: Deployment, number of engines and workload; its rate does not matter.
        start_rate: First rate in requests per second.
        rule: Conditions of scheduling delays.
        limits: Latency limits.
        jobs: Number of processes.
        on_trial: Called after each simulation that the search looks at.
        budget: Ends the search with the highest rate so far; None: no limit.

    Raises:
        ValueError: The options are invalid.
        OSError: The profile cannot be read.
    """
    run = LimitedRun(config, rule, limits, stops_early=True)
    trials: list[tuple[float, RateTrial]] = []

    def observe(rate: float, trial: RateTrial) -> None:
        trials.append((rate, trial))
        if budget:
            budget.end_evaluation()
        on_trial(rate, trial)

    try:
        refusal = budget.refusal if budget else lambda: ""
        found = find_capacity(run, start_rate, rule, jobs, observe, refusal)
    except CostRangeError as error:
        return ConfigurationCapacity(0.0, None, tuple(trials), f"outside of the profile: {error}")
    except ValueError as error:
        if not trials:
            raise
        return ConfigurationCapacity(0.0, None, tuple(trials), str(error))
    rate = found.rate
    if rate not in run.figures:
        run(rate)
    return ConfigurationCapacity(rate, run.figures[rate], tuple(trials), found.note)
