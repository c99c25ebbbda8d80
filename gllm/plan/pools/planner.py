"""Planner of prompt and token pools: the best cluster under a budget or for a rate.

Clusters are simulated at `1 / scale` of their size. For throughput, the clusters that use up a
budget are searched; for power, cost or space, those that serve a rate and lack no machine for it.

Source: Patel et al., "Splitwise", ISCA 2024 (arXiv 2311.18677), section on provisioning.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from gllm.plan.budget import SearchBudget
from gllm.plan.pools.clusters import (
    MODEL,
    ClusterPoint,
    SampleSize,
    fluid_rate,
    search_rate,
    simulate_point,
)
from gllm.plan.pools.design_search import BUDGETS, choose_cheapest, find_border, maximize_throughput
from gllm.sim.capacity import SearchEndedError
from gllm.sim.hardware.machines import ClusterDesign, MachineType, machine_pair
from gllm.sim.metrics.slowdowns import SloMargin, worst_margin

THROUGHPUT = "throughput"
"""Objective under a budget; the others are names of BUDGETS."""
START_SHARE = 0.75
"""First rate of a search, per rate at which one pool is saturated."""
POLICY = "vllm"
"""Scheduling policy of prompt and token machines: prompts first, in the order of arrival."""
BORDER_FACTOR = 2
"""Machines of a kind at most, per number that the closed form needs for a rate."""
MIN_BORDER = 8
"""Least value of that limit: few machines serve less of the closed form's rate than many."""

SimulatePoint = Callable[[ClusterPoint], list[SloMargin]]
"""Returns the nine slowdowns of a point beside their limits."""


class PoolGoals(NamedTuple):
    """Workload, objective, and the constraint of a search."""

    workload: str
    """A name of WORKLOADS."""
    objective: str
    """THROUGHPUT, or a name of BUDGETS that is minimised at `rate`."""
    constraint: str = "power"
    """Name of BUDGETS, for THROUGHPUT."""
    limit: float = 0.0
    """Limit of the constraint: power or cost relative to one DGX-A100, or machines."""
    rate: float = 0.0
    """Requests per second, for the other objectives."""
    model: str = MODEL
    scale: int = 1
    """Clusters are simulated at this fraction of their size: 5 is a fifth."""
    size: SampleSize = SampleSize(300)
    seed: int = 0
    """Seed of lengths and arrivals."""


class PoolPlan(NamedTuple):
    """Best cluster of one design."""

    name: str
    """A name of the paper's designs: AA, HH, HA or HHcap."""
    cluster: ClusterDesign
    """At full size."""
    rate: float
    """Requests per second within the SLOs at full size, or the rate that it has to serve."""
    num_points: int
    """Simulated clusters."""
    is_complete: bool
    """False if the budget of the search was spent before its end."""


@dataclass
class PoolSearch:
    """Searches of one planner; counts simulations and keeps the worst margins.

    Args:
        goals: Workload, objective and constraint.
        budget: Asked before each simulated cluster.
        simulate: Simulates a point.
    """

    goals: PoolGoals
    budget: SearchBudget
    simulate: SimulatePoint = lambda point: simulate_point(point).margins
    worst: dict[ClusterDesign, SloMargin] = field(default_factory=dict)
    """SLO that binds just above the highest rate, by simulated cluster."""

    def plan(self, name: str) -> PoolPlan | None:
        """Return the best cluster of a design; None if no cluster serves anything.

        Raises:
            ValueError: The design is unknown, or the limit admits no cluster of it.
        """
        pair = machine_pair(name)
        if self.goals.objective == THROUGHPUT:
            return self._maximize(name, pair)
        return self._minimize(name, pair)

    def _maximize(self, name: str, pair: tuple[MachineType, MachineType]) -> PoolPlan | None:
        goals = self.goals
        rates: dict[ClusterDesign, float] = {}

        def evaluate(design: ClusterDesign) -> float:
            if self.budget.refusal():
                raise SearchEndedError
            with self.budget.evaluation():
                rates[design] = self._highest_rate(design)
            return rates[design]

        is_complete = True
        try:
            maximize_throughput(pair, goals.constraint, goals.limit / goals.scale, evaluate)
        except SearchEndedError:
            is_complete = False
        if not any(rates.values()):
            return None
        best = max(rates, key=lambda design: (rates[design], -design.num_prompt))
        whole = scale_cluster(best, goals.scale)
        return PoolPlan(name, whole, rates[best] * goals.scale, len(rates), is_complete)

    def _minimize(self, name: str, pair: tuple[MachineType, MachineType]) -> PoolPlan | None:
        goals = self.goals
        rate = goals.rate / goals.scale
        limit = border_limit(pair, rate, goals.workload, goals.model)
        served: list[ClusterDesign] = []
        num_points = 0

        def serves(design: ClusterDesign) -> bool:
            nonlocal num_points
            if fluid_rate(design, goals.workload, goals.model) < rate:
                return False
            if self.budget.refusal():
                raise SearchEndedError
            num_points += 1
            with self.budget.evaluation():
                margins = self.simulate(self._point(design, rate))
            if not (is_served := all(margin.is_met for margin in margins)):
                self.worst[design] = worst_margin(margins)
            else:
                served.append(design)
            return is_served

        is_complete = True
        try:
            served = find_border(pair, serves, limit)[0]
        except SearchEndedError:
            is_complete = False
        except ValueError:
            return None
        if not served:
            return None
        best = scale_cluster(choose_cheapest(served, goals.objective), goals.scale)
        return PoolPlan(name, best, goals.rate, num_points, is_complete)

    def _highest_rate(self, design: ClusterDesign) -> float:
        goals = self.goals

        def serves(rate: float) -> bool:
            margins = self.simulate(self._point(design, rate))
            is_served = all(margin.is_met for margin in margins)
            if not is_served:
                self.worst[design] = worst_margin(margins)
            return is_served

        return search_rate(serves, START_SHARE * fluid_rate(design, goals.workload, goals.model))[0]

    def _point(self, design: ClusterDesign, rate: float) -> ClusterPoint:
        goals = self.goals
        return ClusterPoint(
            design,
            goals.workload,
            rate,
            goals.size,
            policy=POLICY,
            seed=goals.seed,
            model=goals.model,
        )


def border_limit(
    pair: tuple[MachineType, MachineType], rate: float, workload: str, model: str = MODEL
) -> tuple[int, int]:
    """Return the most prompt and token machines of clusters that are tried for a rate per second.

    These are BORDER_FACTOR times the machines of a kind that the closed form needs if the other
    kind is no limit.
    """
    one = ClusterDesign(*pair, 1, 10**6), ClusterDesign(*pair, 10**6, 1)
    prompt, token = (
        max(MIN_BORDER, int(BORDER_FACTOR * rate / fluid_rate(design, workload, model)) + 1)
        for design in one
    )
    return prompt, token


def scale_cluster(design: ClusterDesign, factor: int) -> ClusterDesign:
    """Return a cluster with a multiple of the machines."""
    return design._replace(
        num_prompt=design.num_prompt * factor, num_token=design.num_token * factor
    )


def best_plan(plans: list[PoolPlan], objective: str) -> PoolPlan:
    """Return the best of several designs: the highest rate, or the least of a quantity."""
    if objective == THROUGHPUT:
        return max(plans, key=lambda plan: plan.rate)
    return min(plans, key=lambda plan: BUDGETS[objective](plan.cluster))
