"""Search for the engine design that is best for a workload: closed forms first, then simulation.

Source of the search: Agrawal et al., "Vidur", MLSys 2024 (arXiv 2405.05465): the capacity of each
configuration within a limit of the scheduling delay, and QPS per dollar within latency limits. The
closed forms, which save most simulations, are this project's.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import ceil, inf
from typing import NamedTuple

from gllm.options.slo import NO_SLO
from gllm.plan.best_first import BestFirstOutcome, CandidateBound, SearchBudget, search_best
from gllm.plan.capacity import PLAN_RULES, JudgedSimulation, extend_rule, measure_capacity
from gllm.plan.engine_bounds import EngineBounds, WorkloadMoments, measure_workload
from gllm.plan.engine_checks import with_planned_length
from gllm.plan.problem import ServiceProblem
from gllm.plan.search.designs import EngineDesign
from gllm.plan.search.objectives import (
    MAKESPAN,
    OBJECTIVES,
    TOO_LARGE,
    TOO_SLOW,
    UNKNOWN,
    AssessedDesign,
    EngineLatencies,
    assess_capacity,
    count_planned_engines,
    max_engines,
)
from gllm.sim.capacity import INTERRUPTED, CapacityRule, RateTrial, SearchEndedError
from gllm.sim.configured import RunLatencies, simulate_requests
from gllm.sim.costs.base import CostRangeError
from gllm.sim.deployment import Deployment, ModelFitError
from gllm.sim.monotone_search import find_last
from gllm.sim.options import SimulationConfig, build_deployment, build_workload
from gllm.sim.profiled import is_profile_file
from gllm.sim.simulation_pool import end_simulations, open_simulation_pool
from gllm.sim.workloads.requests import longest_job

LONG_PROMPT = "a prompt alone takes longer than the limit of TTFT"
LONG_STEP = "a token alone takes longer than the limit of TPOT or TBT"
UNSUITABLE = "sizes do not divide, or options do not suit each other"
FALLBACK_RATE = 1.0
"""First rate of a capacity search where closed forms know none, requests per second."""
STEADY_REQUESTS, STEADY_SECONDS = 10**9, 1e9
"""Length of a run to whose rate unfinished requests add nothing."""
MOMENT_REQUESTS = 2000
"""Least number of requests over which a workload's lengths are averaged."""
TICK_SECONDS = 1.0
"""Time between two reports of progress while other processes simulate."""
START_SHARE = 0.9
"""First rate of a capacity search, as a share of the estimate."""


class DesignTrial(NamedTuple):
    """A design to simulate, and where the search for its capacity begins."""

    design: EngineDesign
    start_rate: float
    """First request rate of one engine, requests per second."""
    rule: CapacityRule
    """Criteria of a sustained rate with long enough simulations: see `DesignPlanner.rule_of`."""
    min_engines: int = 1
    """Number of engines below which the problem's rate cannot be served."""
    max_model_len: int | None = None
    """Longest sequence of an engine in tokens; None: that of the simulation options."""


class DesignPlanner:
    """Search for the best engine design: bounds by formulas first, then simulations.

    Designs whose bound cannot beat the best simulated one are not simulated.

    Args:
        problem: Model, workload, rate, limits and objective; its bounds have `devices`.
        config: Simulation options that neither the problem nor a design determines.
        rule: Criteria by which a simulated request rate counts as sustained.

    Raises:
        ValueError: The workload is unknown.
    """

    def __init__(
        self,
        problem: ServiceProblem,
        config: SimulationConfig,
        rule: CapacityRule = PLAN_RULES["vidur"],
    ) -> None:
        self.problem, self.rule = problem, rule
        self.config = replace(
            config,
            model=problem.model,
            workload=problem.workload,
            requests=problem.num_requests,
            seed=problem.seed,
        )
        num_requests = problem.num_requests
        if config.arrivals != "replay":
            num_requests = max(num_requests, MOMENT_REQUESTS)
        jobs = build_workload(replace(self.config, requests=num_requests))
        self.moments: WorkloadMoments = measure_workload(jobs)
        self.unfit: list[tuple[EngineDesign, str]] = []
        """Designs that the model does not fit, with the binding constraint."""
        self._engines: dict[EngineDesign, Deployment] = {}
        self._bounds: dict[EngineDesign, EngineBounds] = {}
        self._estimates: dict[EngineDesign, AssessedDesign] = {}

    def bound(self, design: EngineDesign) -> CandidateBound:
        """Return an upper bound and an estimate of a design's score, without simulation."""
        try:
            bounds = self.bounds_of(design)
        except ModelFitError as error:
            self.unfit.append((design, str(error)))
            return CandidateBound(-inf, -inf, f"does not fit: {error.constraint}")
        except ValueError as error:
            self.unfit.append((design, str(error)))
            return CandidateBound(-inf, -inf, UNSUITABLE)
        reason = self._hopeless_reason(bounds)
        if not max_engines(self.problem, design):
            reason = TOO_LARGE
        highest = self._highest_rate(design)
        num_engines = count_planned_engines(self.problem, design, highest)
        if not reason and num_engines > max_engines(self.problem, design):
            reason = TOO_SLOW
        score = OBJECTIVES[self.problem.objective].score(highest, self.problem, design)
        return CandidateBound(score, -inf if reason else self.estimate(design).score, reason)

    def estimate(self, design: EngineDesign) -> AssessedDesign:
        """Return the capacity, latencies and score of a design, estimated by formulas."""
        if design not in self._estimates:
            bounds = self.bounds_of(design)
            rate, latencies, note = 0.0, UNKNOWN, ""
            delay, limits = self.rule.max_p99_delay_seconds, self.problem.limits
            if self.problem.objective == MAKESPAN:
                highest = bounds.max_rate()
                rate = highest if highest < inf else 0.0
            elif (point := bounds.best_point(limits, delay)) is None:
                note = bounds.missed_limit(limits, delay)
            else:
                rate = point.rate
                latencies = EngineLatencies(point.ttft(90), point.step_seconds, point.itl(99))
            self._estimates[design] = assess_capacity(self.problem, design, rate, latencies, note)
        return self._estimates[design]

    def search(
        self,
        designs: Sequence[EngineDesign],
        budget: SearchBudget,
        jobs: int = 1,
        is_exhaustive: bool = False,
        uses_closed_forms: bool = False,
        on_result: Callable[[AssessedDesign], None] = lambda result: None,
        on_tick: Callable[[], None] = lambda: None,
    ) -> BestFirstOutcome[EngineDesign, AssessedDesign]:
        """Return the best design, and the numbers of designs that were not simulated, by reason.

        Args:
            designs: Candidate designs.
            budget: Time and evaluation limit of the simulations; formulas take milliseconds each.
            jobs: Number of processes that simulate in parallel.
            is_exhaustive: Also simulate designs whose bound is too low.
            uses_closed_forms: Use formulas only, without simulations.
            on_result: Called for each simulated design, as soon as its result is known.
            on_tick: Called now and then during the simulations.

        Raises:
            ValueError: No design fits the devices; the message names the failed constraint.
        """
        self.unfit.clear()
        candidates: list[tuple[EngineDesign, CandidateBound]] = []
        for design in designs:
            if (reason := budget.spent_reason()) and not uses_closed_forms:
                candidates.append((design, CandidateBound(-inf, -inf, reason)))
                continue
            candidates.append((design, self.bound(design)))
            on_tick()
        if len(self.unfit) == len(candidates):
            raise ValueError(self._describe_unfit())

        def score(result: AssessedDesign) -> float:
            return result.score

        if uses_closed_forms:

            def estimate(chosen: Sequence[EngineDesign]) -> list[AssessedDesign]:
                return [self.estimate(design) for design in chosen]

            return search_best(candidates, estimate, score, budget, is_exhaustive=True)

        with open_simulation_pool(jobs) if jobs > 1 else nullcontext() as pool:

            def simulate(chosen: Sequence[EngineDesign]) -> list[AssessedDesign]:
                trials = [self._trial_of(design) for design in chosen]
                run = partial(
                    simulate_design, self.problem, self.config, budget.for_one_evaluation()
                )
                results: dict[EngineDesign, AssessedDesign] = {}

                def report(result: AssessedDesign) -> None:
                    results[result.design] = result
                    on_result(result)

                try:
                    if pool is not None:
                        _wait_for_results(
                            [pool.submit(run, trial) for trial in trials], report, on_tick
                        )
                    else:
                        for trial in trials:
                            report(run(trial, on_tick))
                except KeyboardInterrupt:
                    end_simulations()
                    budget.stop(INTERRUPTED)
                none = partial(assess_capacity, self.problem, capacity=0.0, note=INTERRUPTED)
                return [results.get(design) or none(design) for design in chosen]

            return search_best(candidates, simulate, score, budget, jobs, is_exhaustive)

    def bounds_of(self, design: EngineDesign) -> EngineBounds:
        """Return the bounds and estimates of a design. Raises ValueError if it does not fit."""
        if design not in self._bounds:
            self._bounds[design] = EngineBounds(self.deployment_of(design), self.moments)
        return self._bounds[design]

    def deployment_of(self, design: EngineDesign) -> Deployment:
        """Return the simulated engine of a design. Raises ValueError if the model does not fit."""
        if design not in self._engines:
            config, longest = design.configure(self.config), self.moments.longest_tokens
            self._engines[design] = build_planned_engine(config, longest)
        return self._engines[design]

    def configure(self, design: EngineDesign) -> SimulationConfig:
        """Return the simulation of a design, with the longest sequence of its engine."""
        length = self.deployment_of(design).scheduler.max_model_len
        return replace(design.configure(self.config), max_model_len=length)

    def rule_of(self, design: EngineDesign) -> CapacityRule:
        """Return the capacity rule for a design, with simulations of several request durations."""
        bounds, delay = self.bounds_of(design), self.rule.max_p99_delay_seconds
        # For a rate, the same run under all limits: looser ones then never need more engines.
        limits = self.problem.limits if self.problem.rate is None else NO_SLO
        return extend_rule(self.rule, bounds.request_seconds(limits, delay))

    def _highest_rate(self, design: EngineDesign) -> float:
        """Return requests per second that no run of the problem can sustain within its limits."""
        bounds = self.bounds_of(design)
        if self.problem.objective == MAKESPAN:
            return bounds.max_rate()
        rule, requests = self.rule_of(design), self.problem.num_requests
        seconds, delay = rule.min_seconds, rule.max_p99_delay_seconds
        if is_judged(self.problem, rule):
            # Runs are extended until the queue is seen to be stable.
            requests, seconds = STEADY_REQUESTS, STEADY_SECONDS
        return bounds.max_rate_of_run(requests, seconds, delay, self.problem.limits)

    def _hopeless_reason(self, bounds: EngineBounds) -> str:
        limits = self.problem.limits
        first = limits.limit_of("ttft")
        if first is not None and bounds.min_first_token_seconds(first[1]) > first[0]:
            return LONG_PROMPT
        steps = [limit[0] for name in ("tpot", "itl") if (limit := limits.limit_of(name))]
        if steps and bounds.min_token_seconds() > min(steps):
            return LONG_STEP
        return ""

    def min_engines(self, design: EngineDesign) -> int:
        """Return a number of engines below which the problem's rate cannot be served."""
        return count_planned_engines(self.problem, design, self._highest_rate(design))

    def _trial_of(self, design: EngineDesign) -> DesignTrial:
        estimate = self.estimate(design).capacity
        start = START_SHARE * estimate or FALLBACK_RATE
        length = self.deployment_of(design).scheduler.max_model_len
        return DesignTrial(design, start, self.rule_of(design), self.min_engines(design), length)

    def _describe_unfit(self) -> str:
        """Return the constraint of the largest design, which is the closest to fitting."""
        if not self.unfit:
            return "no design is within --max-devices: raise it, or lower --tp and --pp"
        design, message = max(self.unfit, key=lambda pair: pair[0].num_devices)
        return (
            f"no design fits; the largest is {design}: {message} "
            "(--devices, --max-devices, --pp, --tp and --max-request-tokens widen the search)"
        )


def build_planned_engine(config: SimulationConfig, longest: int) -> Deployment:
    """Return the simulated engine of a configuration, with the longest sequence of a planned one.

    Args:
        config: The options; their longest sequence and that of a measured engine are kept.
        longest: Tokens of the longest request of the workload.

    Raises:
        ValueError: The model does not fit.
    """
    engine = build_deployment(config, longest)
    is_measured = config.profile is not None and is_profile_file(config.profile)
    if config.max_model_len is not None or is_measured:
        return engine
    return with_planned_length(engine, longest)


def _wait_for_results(
    futures: Sequence[Future[AssessedDesign]],
    on_result: Callable[[AssessedDesign], None],
    on_tick: Callable[[], None],
) -> None:
    """Wait for simulations in other processes, and report each when it ends."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, TICK_SECONDS, FIRST_COMPLETED)
        for future in done:
            on_result(future.result())
        on_tick()


def simulate_design(
    problem: ServiceProblem,
    config: SimulationConfig,
    budget: SearchBudget,
    trial: DesignTrial,
    on_tick: Callable[[], None] | None = None,
) -> AssessedDesign:
    """Simulate an engine design and return its score.

    With a rate to serve, the least number of engines is searched of which each serves its share of
    the rate; otherwise the capacity of one engine.

    Args:
        problem: Workload, rate, limits and objective.
        config: Simulation options of the planner.
        budget: Time limit, at which the search ends with the best result so far.
        trial: The design.
        on_tick: Called now and then.
    """
    design, start_rate, rule, *_ = trial
    config = design.configure(config)
    if trial.max_model_len is not None:
        config = replace(config, max_model_len=trial.max_model_len)
    if problem.objective == MAKESPAN:
        share = ceil(problem.num_requests / max_engines(problem, design))
        try:
            throughput = _measure_throughput(config, share, budget.deadline)
        except SearchEndedError as error:
            return assess_capacity(problem, design, 0.0, UNKNOWN, str(error))
        return assess_capacity(problem, design, throughput)
    if problem.rate is not None:
        return _count_engines(problem, config, budget, trial, on_tick)
    capacity = measure_capacity(
        config,
        start_rate,
        rule,
        problem.limits,
        is_judged=is_judged(problem, rule),
        budget=budget,
        on_tick=on_tick,
    )
    latencies = _latencies_of(capacity.figures)
    return assess_capacity(problem, design, capacity.rate, latencies, capacity.note)


def is_judged(problem: ServiceProblem, rule: CapacityRule) -> bool:
    """Return True if runs are extended until they decide; Vidur's rule has runs of fixed length."""
    return problem.rate is not None or not rule.permits_growth


def _count_engines(
    problem: ServiceProblem,
    config: SimulationConfig,
    budget: SearchBudget,
    trial: DesignTrial,
    on_tick: Callable[[], None] | None,
) -> AssessedDesign:
    """Return a design with the least number of engines that serve the rate in equal shares.

    Its capacity is the share of one engine: more was not simulated.
    """
    design, start_rate, rule, least, _ = trial
    rate, most = problem.rate, max_engines(problem, design)
    assert rate is not None, "the problem has a rate"
    judged = JudgedSimulation(config, rule, problem.limits, budget.make_check(on_tick))
    enough: dict[int, RateTrial] = {}

    def serves(index: int, *_: int) -> bool:
        trial = judged(rate / -index)
        if not rule.is_sustained(trial):
            return False
        enough[-index] = trial
        return True

    note = ""
    try:
        # More engines have lower shares: the last negative number is the least number of engines.
        start = min(max(ceil(START_SHARE * rate / start_rate), least), most)
        find_last(serves, -start, 1, -most, -least)
    except SearchEndedError as error:
        note = str(error)
    except CostRangeError as error:
        note = f"outside of the profile: {error}"
    if not enough:
        return assess_capacity(problem, design, 0.0, UNKNOWN, note or TOO_SLOW)
    count = min(enough)
    latencies = _latencies_of(enough[count].figures)
    return assess_capacity(problem, design, rate / count, latencies, note)


def _latencies_of(figures: RunLatencies | None) -> EngineLatencies:
    if figures is None:
        return UNKNOWN
    return EngineLatencies(figures.ttft_p90, figures.tpot_p50, figures.itl_p99)


def _measure_throughput(
    config: SimulationConfig, share: int, check: Callable[[], None] | None
) -> float:
    """Return requests per second of one engine that gets its share of an offline workload."""
    config = replace(config, requests=share, arrivals="static")
    jobs = build_workload(config)
    longest = longest_job(jobs)
    served = simulate_requests(config, build_deployment(config, longest), jobs, check)
    return share / max(request.line.times[-1] for request in served.values())
