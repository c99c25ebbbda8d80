"""Capacity of a configuration within latency limits, by simulation."""

from collections.abc import Callable
from dataclasses import replace
from math import ceil, inf
from typing import NamedTuple

from gllm.observability.latency import RequestTimeline
from gllm.options.slo import NO_SLO, Slo
from gllm.plan.attainment import (
    EXTENSION,
    AttainmentTest,
    JudgedRequest,
    goals_of,
    judge_line,
)
from gllm.plan.best_first import SearchBudget
from gllm.sim.capacity import (
    CAPACITY_RULES,
    INTERRUPTED,
    RATE_STEP,
    CapacityRule,
    RateTrial,
    RunAtRate,
    SearchEndedError,
    TrialObserver,
    find_capacity,
    stopped_trial,
)
from gllm.sim.configured import (
    RunLatencies,
    SimulationAtRate,
    simulate_trial,
    summarize_latencies,
)
from gllm.sim.costs.base import CostRangeError
from gllm.sim.deployment import Deployment
from gllm.sim.options import SimulationConfig, build_deployment, build_workload
from gllm.sim.workloads.requests import longest_job

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


MIN_JUDGED, USUAL_JUDGED, MAX_JUDGED = 250, 1000, 4000
"""Least number of requests of a test's first run, the same for shares above 95 %, and of its
longest run."""
FIRST_SECONDS = 20.0
"""Least time in which the requests of a first run arrive."""
MAX_EXTENSIONS = 2
"""Doublings of a run of the rule's length; a rate that the longest does not decide is too high."""
QUICK_EXTENSIONS = 1
"""Doublings of a first run in the search for a first rate."""


class JudgedSimulation:
    """Callable that tests if a configuration sustains a request rate, by simulation.

    The sequential test of `gllm.plan.attainment` doubles the length of a run until it decides
    whether the queue stays bounded and the latency limits are kept. A rate is not sustained if its
    P99 scheduling delay exceeds the limit of `rule`, or if the longest run decides nothing.

    Args:
        config: Deployment, number of engines and workload; its request rate is ignored.
        rule: Length of a usual run in seconds, and limit of the P99 scheduling delay.
        limits: Latency limits (SLO).
        check: Called regularly during a run; an error that it raises ends the run. It must be
            picklable to run in other processes.
        is_confirmation: Start with a run of the usual length and another seed, to confirm the
            result of shorter runs.
        is_quick: Count a rate that a short run does not decide as not sustained.
    """

    def __init__(
        self,
        config: SimulationConfig,
        rule: CapacityRule,
        limits: Slo = NO_SLO,
        check: Callable[[], None] | None = None,
        is_confirmation: bool = False,
        is_quick: bool = False,
    ) -> None:
        self._is_confirmation, self._is_quick = is_confirmation, is_quick
        if is_confirmation:
            config = replace(config, seed=config.seed + 1)
        self._config, self._rule, self._limits, self._check = config, rule, limits, check
        self._deployment: Deployment | None = None

    def __call__(self, rate: float) -> RateTrial:
        """Simulate a rate in requests per second and return its scheduling delays.

        The P99 delay is infinite if the rate is not sustained. The figures are a RunLatencies.
        """
        # A run that decides nothing is extended, so the first one is short.
        # Fewer requests cannot show an attainment above 95 %.
        least = USUAL_JUDGED if max(goals_of(self._limits), default=0.0) > 0.95 else MIN_JUDGED
        first = max(ceil(rate * FIRST_SECONDS), least)
        usual = max(ceil(rate * self._rule.min_seconds), least)
        last = max(usual * EXTENSION**MAX_EXTENSIONS, MAX_JUDGED, self._config.requests)
        if self._is_confirmation:
            first = max(usual, MAX_JUDGED)
        elif self._is_quick:
            last = min(last, first * EXTENSION**QUICK_EXTENSIONS)
        test = AttainmentTest(goals_of(self._limits), min(first, last), last)
        # The lengths depend on the number of requests: shorter runs take the first ones of these.
        config = replace(self._config, rate=rate, requests=test.max_requests)
        jobs = build_workload(config)
        longest = longest_job(jobs)
        deployment = self._deployment
        if deployment is None or longest > deployment.scheduler.max_model_len:
            # Profiles take seconds to be fitted.
            deployment = self._deployment = build_deployment(config, longest)
        lines: list[RequestTimeline] = []
        trial = stopped_trial(first)

        def simulate(count: int) -> list[JudgedRequest]:
            nonlocal lines, trial
            run = simulate_trial(config, deployment, jobs[:count], self._rule, self._check)
            trial, requests = run
            if not self._rule.is_bounded(trial):
                raise _DelaysExceededError
            lines = [requests[index].line for index in range(count)]
            return [judge_line(line, self._limits) for line in lines]

        try:
            result = test.run(simulate)
        except _DelaysExceededError:
            return trial._replace(p99_delay_seconds=inf)
        mean = trial.second_half_delay_seconds
        p99 = trial.p99_delay_seconds if result.is_met else inf
        figures = summarize_latencies(lines, self._limits)
        return RateTrial(trial.num_requests, p99, mean, mean, figures=figures)


class _DelaysExceededError(Exception):
    """Raised when the scheduling delays of a run are beyond the rule."""


def measure_capacity(
    config: SimulationConfig,
    start_rate: float,
    rule: CapacityRule = PLAN_RULES["sustained"],
    limits: Slo = NO_SLO,
    jobs: int = 1,
    is_judged: bool = False,
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
        is_judged: Test each rate with runs that are extended until they decide, and confirm the
            highest by a long run with another seed: JudgedSimulation. Otherwise runs have the
            length of the rule, and limits hold for their requests.
        on_trial: Called with request rate and result after each simulation of the search.
        budget: Time and evaluation limit; when it is spent, a running simulation ends, and the
            highest rate so far is returned.
        on_tick: Called now and then during simulations of this process.

    Raises:
        ValueError: The options are invalid.
        OSError: The file of measured step times cannot be read.
    """
    budget = budget or SearchBudget()
    check = budget.make_check(on_tick)
    # Other processes get the deadline alone.
    own_check = budget.deadline if jobs > 1 else check
    searches: list[tuple[RunAtRate, CapacityRule]]
    if is_judged:
        rule = replace(rule, min_requests=MIN_JUDGED, permits_growth=True)
        # Rates near the capacity take the longest runs: a quick search leaves few of them, and an
        # answer if the budget ends there.
        quick = JudgedSimulation(config, rule, limits, own_check, is_quick=True)
        searches = [
            (quick, replace(rule, num_confirmations=0)),
            (JudgedSimulation(config, rule, limits, own_check), rule),
        ]
    else:
        searches = [(SimulationAtRate(config, rule, limits, check=own_check), rule)]
    trials: list[tuple[float, RateTrial]] = []

    def observe(rate: float, trial: RateTrial) -> None:
        trials.append((rate, trial))
        budget.end_evaluation()
        on_trial(rate, trial)

    rate, note = 0.0, ""
    for run, conditions in searches:
        start = rate or start_rate
        try:
            found = find_capacity(run, start, conditions, jobs, observe, budget.refusal)
            rate, note = found.rate, found.note
        except CostRangeError as error:
            note = f"outside of the profile: {error}"
            return ConfigurationCapacity(0.0, None, tuple(trials), note)
        except SearchEndedError as error:
            note = str(error)
        except ValueError as error:
            note = str(error)
            if not trials and note != INTERRUPTED and not budget.refusal():
                raise
        if note == INTERRUPTED:
            budget.stop(note)
        if budget.refusal():
            break
    if not rate:
        return ConfigurationCapacity(0.0, None, tuple(trials), note)
    figures, lowest = dict(trials)[rate].figures, rate / 2
    try:
        if is_judged and not note:
            run = JudgedSimulation(config, rule, limits, check, is_confirmation=True)
            while not rule.is_sustained(trial := run(rate)) and rate > lowest:
                rate /= RATE_STEP
            figures = trial.figures
    except SearchEndedError as error:
        note = str(error)
    except KeyboardInterrupt:
        note = INTERRUPTED
        budget.stop(note)
    return ConfigurationCapacity(rate, figures, tuple(trials), note)
