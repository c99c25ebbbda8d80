"""Fleets of equal engines: their number for a rate behind a router, their figures, their plan."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from gllm.plan.capacity import JudgedSimulation
from gllm.plan.layout import PlannedEngine, changed_options, lay_out, place_engines
from gllm.plan.nodes import assume_nodes, with_inner_link
from gllm.plan.problem import ServiceProblem
from gllm.plan.search.designs import EngineDesign
from gllm.plan.search.objectives import AssessedDesign, assess_capacity, max_engines
from gllm.plan.search.planner import DesignPlanner, is_judged
from gllm.plan.serving_plan import ExpectedFigures, RouterPlan, ServingPlan
from gllm.sim.capacity import SearchEndedError
from gllm.sim.configured import SimulationAtRate
from gllm.sim.deployment import Deployment
from gllm.sim.hardware.devices import NetworkLink
from gllm.sim.monotone_search import find_last
from gllm.sim.options import SimulationConfig


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
    """Simulate the planned engines behind a router, and find the least number within the limits.

    Args:
        planner: Has the problem and the simulation options.
        best: Chosen design, its capacity and number of engines.
        router: Routing policy.
        check: Called now and then; an error that it raises ends the simulation.

    Raises:
        SearchEndedError: The time for simulations is over, and no number is within the limits.
    """
    problem = planner.problem
    rule = planner.rule_of(best.design)
    rate = problem.rate or best.capacity
    forecasts: dict[int, FleetForecast] = {}

    def serves(index: int, *_: int) -> bool:
        config = replace(planner.configure(best.design), engines=-index, routing_policy=router)
        run: JudgedSimulation | SimulationAtRate
        if is_judged(problem, rule):
            run = JudgedSimulation(config, rule, problem.limits, check, is_confirmation=True)
        else:
            run = SimulationAtRate(config, rule, problem.limits, stops_early=False, check=check)
        trial = run(rate)
        is_within = rule.is_sustained(trial)
        figures, attainment = trial.figures, None
        if problem.limits and figures is not None:
            attainment = figures.attainment
        expected = ExpectedFigures(
            "",
            rate,
            # Of engines for a rate, no higher one is simulated.
            -index * best.capacity if problem.rate is None else None,
            attainment,
            figures and figures.ttft_p50,
            figures and figures.tpot_p50,
        )
        forecasts[-index] = FleetForecast(-index, expected, is_within)
        return is_within

    least, most = best.num_engines, best.num_engines
    if problem.rate is not None:
        least, most = planner.min_engines(best.design), max_engines(problem, best.design)
    try:
        find_last(serves, -best.num_engines, 1, -most, -least)
    except SearchEndedError:
        if not any(forecast.is_within for forecast in forecasts.values()):
            raise
    within = [count for count, forecast in forecasts.items() if forecast.is_within]
    return forecasts[min(within, default=max(forecasts))]


def choose_fleet(
    planner: DesignPlanner,
    results: Sequence[AssessedDesign],
    router: str,
    check: Callable[[], None] | None = None,
) -> tuple[AssessedDesign, FleetForecast]:
    """Simulate the best designs behind a router until one stays the best with its engines.

    Args:
        planner: Has the problem and the simulation options.
        results: Simulated designs, at least one with a finite score.
        router: Routing policy.
        check: Called now and then; an error that it raises ends the simulation.

    Returns:
        The design with the number of engines that it needs, and their figures.

    Raises:
        SearchEndedError: The time for simulations is over before a design is simulated.
    """
    open_results = sorted(results, key=lambda result: -result.score)
    chosen: tuple[AssessedDesign, FleetForecast] | None = None
    for result in open_results:
        if chosen is not None and chosen[0].score >= result.score:
            break
        try:
            forecast = forecast_fleet(planner, result, router, check)
        except SearchEndedError:
            if chosen is None:
                raise
            break
        settled = result
        if planner.problem.rate is not None:
            share = planner.problem.rate / forecast.num_engines if forecast.is_within else 0.0
            settled = assess_capacity(
                planner.problem, result.design, share, result.latencies, result.note
            )
        if chosen is None or settled.score > chosen[0].score:
            chosen = settled, forecast
    assert chosen is not None, "there is a result"
    return chosen


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
    length = deployment.scheduler.max_model_len
    return lay_out(
        replace(problem, model=deployment.model),
        cluster,
        [
            PlannedEngine(f"engine-{index}", stages, "mixed", scheduler, flags or {}, length)
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
