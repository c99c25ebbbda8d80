"""Search for the engine design that is best for a workload: closed forms first, then simulation.

Source of the search: Agrawal et al., "Vidur", MLSys 2024 (arXiv 2405.05465): the capacity of each
configuration within a limit of the scheduling delay, and QPS per dollar within latency limits. The
closed forms, which save most simulations, are this project's.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from math import ceil, inf
from typing import Any, NamedTuple

import msgspec

from gllm.plan.best_first import BestFirstOutcome, CandidateBound, SearchBudget, search_best
from gllm.plan.capacity import PLAN_RULES, extend_rule, measure_capacity
from gllm.plan.engine_bounds import EngineBounds, WorkloadMoments, measure_workload
from gllm.plan.layout import PlannedEngine, lay_out, place_engines
from gllm.plan.nodes import assume_nodes, with_inner_link
from gllm.plan.problem import ServiceProblem
from gllm.plan.search.designs import EngineDesign
from gllm.plan.search.objectives import (
    MAKESPAN,
    OBJECTIVES,
    TOO_SLOW,
    UNKNOWN,
    AssessedDesign,
    EngineLatencies,
    assess_capacity,
    count_planned_engines,
    max_engines,
)
from gllm.plan.serving_plan import ExpectedFigures, RouterPlan, ServingPlan
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.capacity import CapacityRule, SearchEndedError
from gllm.sim.configured import SimulationAtRate, simulate_requests
from gllm.sim.deployment import Deployment, ModelFitError
from gllm.sim.hardware.devices import NetworkLink
from gllm.sim.options import SimulationConfig, build_deployment, build_workload

LONG_PROMPT = "a prompt alone takes longer than the limit of TTFT"
LONG_STEP = "a token alone takes longer than the limit of TPOT or TBT"
UNSUITABLE = "sizes do not divide, or options do not suit each other"
FALLBACK_RATE = 1.0
"""First rate of a capacity search where closed forms know none, requests per second."""
MOMENT_REQUESTS = 2000
"""Least number of requests over which a workload's lengths are averaged."""
TICK_SECONDS = 1.0
"""Time between two reports of progress while other processes simulate."""
START_SHARE = 0.9
"""First rate of a capacity search, as a share of the estimate."""


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
        candidates = [(design, self.bound(design)) for design in designs]
        if len(self.unfit) == len(candidates):
            raise ValueError(self._describe_unfit())

        def score(result: AssessedDesign) -> float:
            return result.score

        if uses_closed_forms:

            def estimate(chosen: Sequence[EngineDesign]) -> list[AssessedDesign]:
                return [self.estimate(design) for design in chosen]

            return search_best(candidates, estimate, score, budget, is_exhaustive=True)

        with ProcessPoolExecutor(jobs) if jobs > 1 else nullcontext() as pool:

            def simulate(chosen: Sequence[EngineDesign]) -> list[AssessedDesign]:
                trials = [
                    (design, self._start_rate(design), self.rule_of(design)) for design in chosen
                ]
                run = partial(
                    simulate_design, self.problem, self.config, budget.for_one_evaluation()
                )
                if pool is not None:
                    futures = [pool.submit(run, trial) for trial in trials]
                    return _wait_for_results(futures, on_result, on_tick)
                results = []
                for trial in trials:
                    results.append(run(trial, on_tick))
                    on_result(results[-1])
                return results

            return search_best(candidates, simulate, score, budget, jobs, is_exhaustive)

    def bounds_of(self, design: EngineDesign) -> EngineBounds:
        """Return the bounds and estimates of a design. Raises ValueError if it does not fit."""
        if design not in self._bounds:
            self._bounds[design] = EngineBounds(self.deployment_of(design), self.moments)
        return self._bounds[design]

    def deployment_of(self, design: EngineDesign) -> Deployment:
        """Return the simulated engine of a design. Raises ValueError if the model does not fit."""
        config = design.configure(self.config)
        return build_deployment(config, self.moments.longest_tokens)

    def rule_of(self, design: EngineDesign) -> CapacityRule:
        """Return the capacity rule for a design, with simulations of several request durations."""
        bounds, delay = self.bounds_of(design), self.rule.max_p99_delay_seconds
        return extend_rule(self.rule, bounds.request_seconds(self.problem.limits, delay))

    def _highest_rate(self, design: EngineDesign) -> float:
        """Return requests per second that no run of the problem can sustain within its limits."""
        bounds = self.bounds_of(design)
        if self.problem.objective == MAKESPAN:
            return bounds.max_rate()
        rule, requests = self.rule_of(design), self.problem.num_requests
        return bounds.max_rate_of_run(
            requests, rule.min_seconds, rule.max_p99_delay_seconds, self.problem.limits
        )

    def _hopeless_reason(self, bounds: EngineBounds) -> str:
        limits = self.problem.limits
        first = limits.limit_of("ttft")
        if first is not None and bounds.least_first_token_seconds(first[1]) > first[0]:
            return LONG_PROMPT
        steps = [limit[0] for name in ("tpot", "itl") if (limit := limits.limit_of(name))]
        if steps and bounds.least_token_seconds() > min(steps):
            return LONG_STEP
        return ""

    def _start_rate(self, design: EngineDesign) -> float:
        estimate = self.estimate(design).capacity
        return START_SHARE * estimate or FALLBACK_RATE

    def _describe_unfit(self) -> str:
        """Return the constraint of the largest design, which is the closest to fitting."""
        if not self.unfit:
            return "no design is within --max-devices: raise it, or lower --tp and --pp"
        design, message = max(self.unfit, key=lambda pair: pair[0].num_devices)
        return (
            f"no design fits; the largest is {design}: {message} "
            "(--devices, --max-devices, --pp, --tp and --max-request-tokens widen the search)"
        )


def _wait_for_results(
    futures: Sequence[Future[AssessedDesign]],
    on_result: Callable[[AssessedDesign], None],
    on_tick: Callable[[], None],
) -> list[AssessedDesign]:
    """Return the results of simulations in other processes, and report each when it ends."""
    pending = set(futures)
    while pending:
        done, pending = wait(pending, TICK_SECONDS, FIRST_COMPLETED)
        for future in done:
            on_result(future.result())
        on_tick()
    return [future.result() for future in futures]


def simulate_design(
    problem: ServiceProblem,
    config: SimulationConfig,
    budget: SearchBudget,
    candidate: tuple[EngineDesign, float, CapacityRule],
    on_tick: Callable[[], None] | None = None,
) -> AssessedDesign:
    """Search by simulation for the capacity of an engine design and return its score.

    Args:
        problem: Workload, rate, limits and objective.
        config: Simulation options of the planner.
        budget: Time limit, at which the search for the capacity ends with the highest rate so far.
        candidate: Design, first request rate of the search, and the criteria of a sustained rate
            with long enough simulations: see `DesignPlanner.rule_of`.
        on_tick: Called now and then.
    """
    design, start_rate, rule = candidate
    config = design.configure(config)
    if problem.objective == MAKESPAN:
        share = ceil(problem.num_requests / max_engines(problem, design))
        try:
            throughput = _measure_throughput(config, share, budget.deadline)
        except SearchEndedError as error:
            return assess_capacity(problem, design, 0.0, UNKNOWN, str(error))
        return assess_capacity(problem, design, throughput)
    capacity = measure_capacity(
        config, start_rate, rule, problem.limits, budget=budget, on_tick=on_tick
    )
    found = capacity.figures
    latencies = UNKNOWN
    if found:
        latencies = EngineLatencies(found.ttft_p90, found.tpot_p50, found.itl_p99)
    return assess_capacity(problem, design, capacity.rate, latencies, capacity.note)


def _measure_throughput(
    config: SimulationConfig, share: int, check: Callable[[], None] | None
) -> float:
    """Return requests per second of one engine that gets its share of an offline workload."""
    config = replace(config, requests=share, arrivals="static")
    jobs = build_workload(config)
    longest = max(job.num_prompt_tokens + job.num_output_tokens for job in jobs)
    served = simulate_requests(config, build_deployment(config, longest), jobs, check)
    return share / max(request.line.times[-1] for request in served.values())


class FleetForecast(NamedTuple):
    """Predicted performance of a number of equal engines at the planned request rate."""

    num_engines: int
    expected: ExpectedFigures
    """Performance of all engines together; `by` is empty."""
    is_within: bool
    """True if the latency limits are met."""


def forecast_closed(planner: DesignPlanner, best: AssessedDesign) -> FleetForecast:
    """Predict the performance of the planned engines by formulas, without simulation.

    Args:
        planner: Has the formulas for the design.
        best: Chosen design, its capacity and number of engines.
    """
    count = best.num_engines
    rate = planner.problem.rate or best.capacity
    point = planner.bounds_of(best.design).point_at(rate / count)
    ttft, tpot = (None, None) if point is None else (point.ttft(), point.step_seconds)
    capacity = count * best.capacity
    expected = ExpectedFigures("", rate, capacity, ttft_seconds=ttft, tpot_seconds=tpot)
    return FleetForecast(count, expected, True)


def forecast_fleet(
    planner: DesignPlanner,
    best: AssessedDesign,
    router: str,
    check: Callable[[], None] | None = None,
) -> FleetForecast:
    """Simulate the planned engines behind a router; add engines while a latency limit is missed.

    Args:
        planner: Has the problem and the simulation options.
        best: Chosen design, its capacity and number of engines.
        router: Routing policy.
        check: Called now and then; an error that it raises ends the simulation.

    Raises:
        SearchEndedError: The time for simulations is over.
    """
    problem = planner.problem
    rule = planner.rule_of(best.design)
    rate = problem.rate or best.capacity
    count = best.num_engines
    while True:
        config = replace(
            best.design.configure(planner.config), engines=count, routing_policy=router
        )
        run = SimulationAtRate(config, rule, problem.limits, stops_early=False, check=check)
        is_within = rule.is_sustained(run(rate))
        if is_within or problem.rate is None or count >= max_engines(problem, best.design):
            break
        count += 1
    figures = run.figures[rate]
    attainment = figures.attainment if problem.limits else None
    expected = ExpectedFigures(
        "", rate, count * best.capacity, attainment, figures.ttft_p50, figures.tpot_p50
    )
    return FleetForecast(count, expected, is_within)


def lay_out_fleet(
    problem: ServiceProblem,
    design: EngineDesign,
    deployment: Deployment,
    config: SimulationConfig,
    forecast: FleetForecast,
    flags: dict[str, Any] | None = None,
) -> ServingPlan:
    """Convert a number of equal engines into a serving plan on the nodes of a problem.

    Without given nodes the plan has as many as the engines need.

    Args:
        problem: Workload, limits and nodes.
        design: Configuration of the engines.
        deployment: The simulated engine, with its division of layers.
        config: Simulation options, whose scheduler options the engines get.
        forecast: Number of engines and their predicted performance.
        flags: Further flags of the engines.

    Raises:
        ValueError: The engines do not fit the nodes.
    """
    count, cluster = forecast.num_engines, problem.cluster
    if not cluster.nodes:
        cluster = assume_nodes(design.device, count * design.num_devices)
    cluster = with_inner_link(cluster, _find_inner_link(deployment))
    placed = place_engines(
        cluster, [(design.parallelism, deployment.layers)] * count, design.device
    )
    scheduler = changed_options(config.scheduler)
    return lay_out(
        replace(problem, model=deployment.model),
        cluster,
        [
            PlannedEngine(f"engine-{index}", stages, "mixed", scheduler, flags or {})
            for index, stages in enumerate(placed)
        ],
        RouterPlan("", policy=config.routing_policy),
        forecast.expected,
    )


def _find_inner_link(deployment: Deployment) -> NetworkLink | None:
    """Return the link between devices that was simulated; None if it was not."""
    hardware = deployment.hardware
    links = () if hardware is None else (hardware.stages[0].rank_link, *hardware.links)
    return next((link for link in links if link is not None), None)


def changed_options(config: SchedulerConfig) -> dict[str, Any]:
    """Return the scheduler options that differ from their defaults, by name."""
    default = msgspec.to_builtins(SchedulerConfig())
    derived = ("stages", "num_blocks", "max_model_len")
    return {
        name: value
        for name, value in msgspec.to_builtins(config).items()
        if name not in derived and value != default[name]
    }
