"""Planner of prompt and token pools: the best cluster under a budget or for a rate.

Clusters are simulated at `1 / scale` of their size. For throughput, the clusters that use up a
budget are searched; for power, cost or space, those that serve a rate and lack no machine for it.

Source: Patel et al., "Splitwise", ISCA 2024 (arXiv 2311.18677), section on provisioning.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from gllm.plan.best_first import SearchBudget
from gllm.plan.layout import PlannedEngine, PlannedStage, lay_out
from gllm.plan.nodes import DeviceCluster, DeviceNode
from gllm.plan.pools.clusters import (
    MODEL,
    WORKLOADS,
    ClusterPoint,
    SampleSize,
    fluid_rate,
    search_rate,
    simulate_point,
)
from gllm.plan.pools.design_search import (
    BUDGETS,
    choose_cheapest,
    find_smallest_clusters,
    maximize_throughput,
)
from gllm.plan.problem import ServiceProblem
from gllm.plan.serving_plan import ExpectedFigures, RouterPlan, ServingPlan
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

PRESET = "splitwise"
"""Preset of the router, which its engines take as well."""
DEVICES = {"DGX-A100": "A100-80G", "DGX-H100": "H100", "DGX-H100-cap": "H100"}
"""Device in the simulator's table by machine type; a power limit is set on the machine."""

SimulatePoint = Callable[[ClusterPoint], list[SloMargin]]
"""Returns the nine slowdowns of a point beside their limits."""


class PoolPlan(NamedTuple):
    """Best numbers of prefill and decode machines for a pair of machine types (Splitwise)."""

    name: str
    """Pair of machine types as in the paper: AA, HH, HA or HHcap."""
    cluster: ClusterDesign
    """Numbers of prompt and token machines, not scaled down."""
    rate: float
    """Requests per second within the SLOs, or the rate that was required."""
    num_points: int
    """Number of simulated clusters."""
    is_complete: bool
    """False if the search ended early because its time or evaluation limit was reached."""


@dataclass
class PoolSearch:
    """Search for the best numbers of prefill and decode machines of given types (Splitwise).

    Splitwise calls them prompt and token machines.

    Args:
        problem: Model, workload (a name of WORKLOADS) and objective. The objective is THROUGHPUT
            with one bound, relative to one DGX-A100 or in machines; or a name of BUDGETS, to be
            minimized at a request rate.
        budget: Time and evaluation limit; checked before each simulated cluster, and the time
            within a simulation.
        simulate: Simulates a cluster and returns its slowdowns with their limits; None for
            `simulate_point`.
        scale: Divisor of the size of simulated clusters and of the rate: 5 simulates a fifth.
    """

    problem: ServiceProblem
    budget: SearchBudget
    simulate: SimulatePoint | None = None
    scale: int = 1
    worst: dict[ClusterDesign, SloMargin] = field(default_factory=dict)
    """Most violated SLO just above the highest rate, by simulated cluster."""

    def plan(self, name: str) -> PoolPlan | None:
        """Return the best cluster for a pair of machine types; None if none meets the SLOs.

        Raises:
            ValueError: The pair is unknown, or the limit does not allow one machine of each type.
        """
        pair = machine_pair(name)
        if self.problem.objective == THROUGHPUT:
            return self._maximize(name, pair)
        return self._minimize(name, pair)

    def _maximize(self, name: str, pair: tuple[MachineType, MachineType]) -> PoolPlan | None:
        ((constraint, limit),) = self.problem.bounds.items()
        rates: dict[ClusterDesign, float] = {}

        def evaluate(design: ClusterDesign) -> float:
            if self.budget.refusal():
                raise SearchEndedError
            with self.budget.evaluation():
                rates[design] = self._highest_rate(design)
            return rates[design]

        is_complete = True
        try:
            maximize_throughput(pair, constraint, limit / self.scale, evaluate)
        except SearchEndedError:
            is_complete = False
        if not any(rates.values()):
            return None
        best = max(rates, key=lambda design: (rates[design], -design.num_prompt))
        whole = scale_cluster(best, self.scale)
        return PoolPlan(name, whole, rates[best] * self.scale, len(rates), is_complete)

    def _minimize(self, name: str, pair: tuple[MachineType, MachineType]) -> PoolPlan | None:
        problem = self.problem
        assert problem.rate is not None, "these objectives have a rate to serve"
        rate = problem.rate / self.scale
        limit = max_machine_counts(pair, rate, problem.workload, problem.model)
        served: list[ClusterDesign] = []
        num_points = 0

        def serves(design: ClusterDesign) -> bool:
            nonlocal num_points
            if fluid_rate(design, problem.workload, problem.model) < rate:
                return False
            if self.budget.refusal():
                raise SearchEndedError
            num_points += 1
            with self.budget.evaluation():
                is_served = self._is_served(design, rate)
            if is_served:
                served.append(design)
            return is_served

        is_complete = True
        try:
            served = find_smallest_clusters(pair, serves, limit)[0]
        except SearchEndedError:
            is_complete = False
        except ValueError:
            return None
        if not served:
            return None
        best = scale_cluster(choose_cheapest(served, problem.objective), self.scale)
        return PoolPlan(name, best, problem.rate, num_points, is_complete)

    def _highest_rate(self, design: ClusterDesign) -> float:
        saturated = fluid_rate(design, self.problem.workload, self.problem.model)
        return search_rate(partial(self._is_served, design), START_SHARE * saturated)[0]

    def _is_served(self, design: ClusterDesign, rate: float) -> bool:
        """Simulate a cluster at a rate; return True if all SLOs hold, else keep the worst one."""
        problem = self.problem
        size = SampleSize(problem.num_requests, problem.min_seconds)
        point = ClusterPoint(
            design,
            problem.workload,
            rate,
            size,
            policy=POLICY,
            seed=problem.seed,
            model=problem.model,
        )
        if self.simulate is None:
            margins = simulate_point(point, self.budget.deadline).margins
        else:
            margins = self.simulate(point)
        is_served = all(margin.is_met for margin in margins)
        if not is_served:
            self.worst[design] = worst_margin(margins)
        return is_served


def max_machine_counts(
    pair: tuple[MachineType, MachineType], rate: float, workload: str, model: str = MODEL
) -> tuple[int, int]:
    """Return the largest numbers of prefill and decode machines that a search has to try.

    Each is BORDER_FACTOR times the number of machines that a formula gives for the rate if there
    are enough machines of the other type.

    Args:
        pair: Types of the prefill and decode machines.
        rate: Requests per second to serve.
        workload: A name of WORKLOADS.
        model: A name of PROFILES.
    """
    one = ClusterDesign(*pair, 1, 10**6), ClusterDesign(*pair, 10**6, 1)
    prompt, token = (
        max(MIN_BORDER, int(BORDER_FACTOR * rate / fluid_rate(design, workload, model)) + 1)
        for design in one
    )
    return prompt, token


def scale_cluster(design: ClusterDesign, factor: int) -> ClusterDesign:
    """Return a cluster with `factor` times as many prefill and decode machines."""
    return design._replace(
        num_prompt=design.num_prompt * factor, num_token=design.num_token * factor
    )


def best_plan(plans: list[PoolPlan], objective: str) -> PoolPlan:
    """Return the plan with the highest request rate, or with the lowest cost, power or machines.

    Args:
        plans: Plans to compare, at least one.
        objective: THROUGHPUT, or a name of BUDGETS.
    """
    if objective == THROUGHPUT:
        return max(plans, key=lambda plan: plan.rate)
    return min(plans, key=lambda plan: BUDGETS[objective](plan.cluster))


def lay_out_pools(plan: PoolPlan, problem: ServiceProblem) -> ServingPlan:
    """Convert a cluster of prefill and decode machines into a serving plan for `gllm up`.

    Each machine runs one engine with one pipeline stage on all its devices.

    Args:
        plan: Numbers and types of the machines.
        problem: Model and workload.
    """
    cluster = plan.cluster
    machines = [
        (f"{role}-{index}", role, machine)
        for role, machine, count in (
            ("prefill", cluster.prompt, cluster.num_prompt),
            ("decode", cluster.token, cluster.num_token),
        )
        for index in range(count)
    ]
    nodes = tuple(
        DeviceNode(name, DEVICES[machine.name], machine.num_gpus, price=machine.dollars_per_hour)
        for name, _, machine in machines
    )
    layers = problem.shape.layers
    engines = [
        PlannedEngine(name, (PlannedStage((index,) * machine.num_gpus, layers),), role)
        for index, (name, role, machine) in enumerate(machines)
    ]
    return lay_out(
        replace(problem, workload=WORKLOADS[problem.workload]),
        DeviceCluster(nodes),
        engines,
        RouterPlan("", preset=PRESET),
        ExpectedFigures("", plan.rate, capacity=plan.rate),
    )
