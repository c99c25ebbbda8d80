"""Expected figures of a fleet of equal engines at its planned rate."""

from dataclasses import replace
from typing import NamedTuple

from gllm.plan.capacity import LimitedRun
from gllm.plan.design_problem import AssessedDesign
from gllm.plan.design_search import DesignPlanner


class FleetForecast(NamedTuple):
    """Expected figures of a fleet at a rate."""

    num_engines: int
    rate: float
    """Requests per second."""
    capacity: float
    """Requests per second of all engines."""
    attainment: float | None
    """Share of requests within the limits, 0..1; None: unknown."""
    ttft_p50: float | None
    """Seconds."""
    tpot_p50: float | None
    is_within: bool
    """True if the limits are kept."""


def forecast_closed(planner: DesignPlanner, best: AssessedDesign) -> FleetForecast:
    """Return what closed forms expect of the fleet."""
    count = best.num_engines
    rate = planner.problem.rate or best.capacity
    point = planner.bounds_of(best.design).point_at(rate / count)
    if point is None:
        return FleetForecast(count, rate, count * best.capacity, None, None, None, True)
    figures = point.ttft(), point.step_seconds
    return FleetForecast(count, rate, count * best.capacity, None, *figures, True)


def forecast_fleet(planner: DesignPlanner, best: AssessedDesign, router: str) -> FleetForecast:
    """Simulate the fleet at the rate; add engines as long as it misses a limit and may have more.

    Args:
        planner: Closed forms of the task's designs.
        best: The design.
        router: Routing policy.
    """
    problem = planner.problem
    rule = planner.rule_of(best.design)
    facts = problem.facts(best.design)
    rate = problem.rate or best.capacity
    count = best.num_engines
    while True:
        config = replace(
            best.design.configure(problem.config), engines=count, routing_policy=router
        )
        run = LimitedRun(config, rule, problem.limits)
        is_within = rule.is_sustained(run(rate))
        if is_within or problem.rate is None or count >= facts.max_engines:
            break
        count += 1
    figures = run.figures[rate]
    attainment = figures.attainment if problem.limits else None
    return FleetForecast(
        count,
        rate,
        count * best.capacity,
        attainment,
        figures.ttft_p50,
        figures.tpot_p50,
        is_within,
    )
