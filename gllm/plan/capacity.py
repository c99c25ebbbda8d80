"""Capacity of a configuration within latency limits, by simulation."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from typing import NamedTuple

from gllm.options.slo import NO_SLO, Slo
from gllm.plan.best_first import SearchBudget
from gllm.sim.capacity import (
    CAPACITY_RULES,
    CapacityRule,
    RateTrial,
    SearchEndedError,
    TrialObserver,
    find_capacity,
)
from gllm.sim.configured import RunLatencies, SimulationAtRate
from gllm.sim.costs.base import CostRangeError
from gllm.sim.options import SimulationConfig

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
    """Lengthen the simulations of a capacity search to at least several durations of a request.

    The minimum is REQUESTS_PER_RUN times the duration of a request.

    Args:
        rule: Criteria by which a simulated request rate counts as sustained, with the length of
            simulations.
        request_seconds: Duration of a long request near the capacity, in seconds; 0 if unknown.

    Returns:
        The rule with longer simulations; the same rule if they are long enough.

    Raises:
        ValueError: The duration is negative or not finite.
    """
    if not 0 <= request_seconds < inf:
        raise ValueError(f"request_seconds is {request_seconds}: give a time of at least 0 s")
    least = REQUESTS_PER_RUN * request_seconds
    return rule if least <= rule.min_seconds else replace(rule, min_seconds=least)


class ConfigurationCapacity(NamedTuple):
    """Highest request rate of a configuration within its limits, and the simulations that found it.

    Result of `measure_capacity`.
    """

    rate: float
    """Highest request rate per second; 0: no rate is within the limits."""
    figures: RunLatencies | None
    """Statistics of the simulation at that rate; None if no rate is within the limits."""
    trials: tuple[tuple[float, RateTrial], ...] = ()
    """(request rate, result) of all simulations; P99 is infinite where a limit is missed."""
    note: str = ""
    """Reason why the rate is 0 or the search ended early; empty otherwise."""


def measure_capacity(
    config: SimulationConfig,
    start_rate: float,
    rule: CapacityRule = PLAN_RULES["sustained"],
    limits: Slo = NO_SLO,
    jobs: int = 1,
    on_trial: TrialObserver = lambda rate, trial: None,
    budget: SearchBudget | None = None,
    on_tick: Callable[[], None] | None = None,
) -> ConfigurationCapacity:
    """Search by simulation for the highest request rate within delay and latency limits.

    Args:
        config: Deployment, number of engines and workload; its request rate is ignored.
        start_rate: Request rate of the first simulation, in requests per second.
        rule: Limit of the scheduling delay, length of the simulations and precision of the search.
        limits: Latency limits (SLO).
        jobs: Number of processes that simulate in parallel.
        on_trial: Called with request rate and result after each simulation of the search.
        budget: Time and evaluation limit; when it is spent, a running simulation ends, and the
            highest rate so far is returned.
        on_tick: Called now and then during simulations of this process.

    Raises:
        ValueError: The options are invalid.
        OSError: The file of measured step times cannot be read.
    """
    budget = budget or SearchBudget()
    deadline = budget.deadline

    def check() -> None:
        if deadline is not None:
            deadline()
        if on_tick is not None:
            on_tick()

    # Other processes get the deadline alone.
    run = SimulationAtRate(config, rule, limits, check=deadline if jobs > 1 else check)
    trials: list[tuple[float, RateTrial]] = []

    def observe(rate: float, trial: RateTrial) -> None:
        trials.append((rate, trial))
        budget.end_evaluation()
        on_trial(rate, trial)

    try:
        found = find_capacity(run, start_rate, rule, jobs, observe, budget.refusal)
    except CostRangeError as error:
        return ConfigurationCapacity(0.0, None, tuple(trials), f"outside of the profile: {error}")
    except SearchEndedError as error:
        return ConfigurationCapacity(0.0, None, tuple(trials), str(error))
    except ValueError as error:
        if not trials and not budget.refusal():
            raise
        return ConfigurationCapacity(0.0, None, tuple(trials), str(error))
    rate, note = found.rate, found.note
    if rate not in run.figures:
        try:
            run(rate)
        except SearchEndedError as error:
            note = str(error)
    return ConfigurationCapacity(rate, run.figures.get(rate), tuple(trials), note)
