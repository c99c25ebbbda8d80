"""Planner of prompt and token pools: the best cluster under a budget or for a rate.

Clusters are simulated at `1 / scale` of their size. For throughput, the clusters that use up a
budget are searched; for power, cost or space, those that serve a rate and lack no machine for it.

Source: Patel et al., "Splitwise", ISCA 2024 (arXiv 2311.18677), section on provisioning.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from math import ceil, inf
from typing import NamedTuple

from gllm.plan.attainment import Attainment
from gllm.plan.best_first import SearchBudget
from gllm.plan.layout import PlannedEngine, PlannedStage, changed_options, lay_out
from gllm.plan.nodes import DeviceCluster, DeviceNode
from gllm.plan.pools.clusters import (
    LONGEST_REQUEST,
    MODEL,
    WORKLOADS,
    ClusterPoint,
    PointVerdict,
    SampleSize,
    bound_rates,
    build_machine,
    fluid_rate,
    fluid_rates,
    judge_point,
    machine_scheduler,
    search_rate,
)
from gllm.plan.pools.design_search import (
    BUDGETS,
    MAX_DOUBLINGS,
    find_cheapest_cluster,
    maximal_designs,
    maximize_throughput,
)
from gllm.plan.problem import ServiceProblem
from gllm.plan.serving_plan import ExpectedFigures, RouterPlan, ServingPlan
from gllm.sim.capacity import SearchEndedError
from gllm.sim.hardware.machines import ClusterDesign, MachineType, machine_pair
from gllm.sim.metrics.slowdowns import SloMargin

THROUGHPUT = "throughput"
"""Objective under a budget; the others are names of BUDGETS."""
START_SHARE = 0.75
"""First rate of a search, per rate at which one pool is saturated."""
PRESET = "splitwise"
"""Preset of the router, which its engines take as well."""
POLICY = PRESET
"""Scheduling policy of that preset."""
BORDER_FACTOR = 2
"""Machines of a kind at most, per number that the closed form needs for a rate."""
FIRST_FACTORS = (1.15, 1.35, 1.6)
"""Clusters that a search for a rate tries first: machines per number of the closed form, which is
saturated by the rate."""
MIN_BORDER = 8
"""Least value of that limit: few machines serve less of the closed form's rate than many."""
DEVICES = {"DGX-A100": "A100-80G", "DGX-H100": "H100", "DGX-H100-cap": "H100"}
"""Device in the simulator's table by machine type; a power limit is set on the machine."""

JudgePoint = Callable[[ClusterPoint, Callable[[], None] | None], PointVerdict]
"""Tests a cluster at a rate; the last argument is called now and then, and may raise an error."""


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
    bound: float | None = None
    """Relaxation of the objective: the rate that no cluster within the limit exceeds, or the least
    of the quantity that no cluster for the rate is below."""
    attainment: Attainment | None = None
    """Verdict of the test of the nearest of the nine limits."""
    scale: int = 1
    """Divisor of the size at which the cluster was simulated."""


@dataclass
class _DesignSearch:
    """State of the search for the clusters of one design."""

    name: str
    bound: float
    """Relaxation of the objective."""
    best: PoolPlan | None = None
    num_points: int = 0
    worst: dict[ClusterDesign, SloMargin] = field(default_factory=dict)
    """Most violated SLO just above the highest rate, by simulated cluster."""
    small: ClusterDesign | None = None
    """Best cluster of a fraction of the size."""
    reason: str = ""
    """Reason why the design cannot be planned."""
    is_complete: bool = False

    def result(self) -> PoolPlan | None:
        """Return the best cluster."""
        if self.best is None:
            return None
        return self.best._replace(num_points=self.num_points, is_complete=self.is_complete)


@dataclass
class PoolSearch:
    """Search for the best numbers of prefill and decode machines of given types (Splitwise).

    Splitwise calls them prompt and token machines. With `scale`, clusters of a fraction of the size
    are searched first, for all designs, and the best ones are refined at full size.

    Args:
        problem: Model, workload (a name of WORKLOADS) and objective. The objective is THROUGHPUT
            with one bound, relative to one DGX-A100 or in machines; or a name of BUDGETS, to be
            minimized at a request rate.
        budget: Time and evaluation limit; checked before each simulated cluster, and the time
            within a simulation.
        judge: Tests a cluster at a rate.
        scale: Divisor of the size of the clusters that are searched first, and of their rate: 5
            simulates a fifth.
        on_best: Called with each plan of a design that is better than those before.
    """

    problem: ServiceProblem
    budget: SearchBudget
    judge: JudgePoint = judge_point
    scale: int = 1
    on_best: Callable[[PoolPlan], None] = lambda plan: None
    refused: dict[str, str] = field(default_factory=dict)
    """Reason why there is no plan, by name of the design."""
    end_reason: str = ""
    """Reason why the search ended early; empty if it did not."""

    @property
    def worst(self) -> dict[ClusterDesign, SloMargin]:
        """Most violated SLO of the latest design just above the highest rate, by cluster."""
        return self._search.worst

    def plan_all(self, names: list[str]) -> list[PoolPlan]:
        """Return the best cluster of each design that has one, in the order of the names.

        Designs whose relaxation is best are searched first, those whose clusters of a fraction of
        the size are best are refined first. `refused` has the reasons for the others.

        Raises:
            ValueError: A design is unknown.
        """
        self.end_reason = ""
        searches = [self._open(name) for name in names]
        order = sorted(searches, key=lambda search: self._badness(search.bound))
        for step in self._steps():
            for search in order:
                if not search.reason and not self.end_reason:
                    try:
                        self._run(step, search)
                    except ValueError as error:
                        search.reason = str(error)
            order.sort(key=self._badness_of_best)
        for search in searches:
            if search.best is None:
                self.refused[search.name] = search.reason or self._explain(search)
        return [plan for search in searches if (plan := search.result()) is not None]

    def plan(self, name: str) -> PoolPlan | None:
        """Return the best cluster for a pair of machine types; None if none meets the SLOs.

        Raises:
            ValueError: The pair is unknown, or the limit does not allow one machine of each type.
        """
        self.end_reason = ""
        search = self._open(name)
        for step in self._steps():
            if not self.end_reason:
                self._run(step, search)
        return search.result()

    def _open(self, name: str) -> _DesignSearch:
        """Return the search for a design, before it begins."""
        self._search = _DesignSearch(name, self.bound(machine_pair(name)))
        return self._search

    def _steps(self) -> list[Callable[[tuple[MachineType, MachineType]], None]]:
        """Return the steps of the search for a design: the last one is at full size."""
        search_whole = self._maximize if self.problem.objective == THROUGHPUT else self._minimize
        return [search_whole] if self.scale == 1 else [self._search_small, search_whole]

    def _run(
        self, step: Callable[[tuple[MachineType, MachineType]], None], search: _DesignSearch
    ) -> None:
        """Make a step of the search for a design. Raises ValueError if it cannot be planned."""
        self._search = search
        try:
            step(machine_pair(search.name))
        except (SearchEndedError, KeyboardInterrupt) as error:
            self.end_reason = str(error) or "interrupted"
        else:
            search.is_complete = step != self._search_small

    def _badness(self, value: float) -> float:
        """Return a value of the objective, or its negative where more is better."""
        return -value if self.problem.objective == THROUGHPUT else value

    def _badness_of_best(self, search: _DesignSearch) -> float:
        if search.best is None:
            return inf
        objective = self.problem.objective
        is_rate = objective == THROUGHPUT
        return self._badness(
            search.best.rate if is_rate else BUDGETS[objective](search.best.cluster)
        )

    def bound(self, pair: tuple[MachineType, MachineType]) -> float:
        """Return a bound of the objective for a pair of machine types, by a relaxation.

        Both pools work without a pause at the best batch size, and latencies have no limit. For
        throughput parts of machines count.
        """
        problem = self.problem
        rates = bound_rates(
            pair, problem.workload, POLICY, problem.model, problem.max_request_tokens
        )
        if problem.objective != THROUGHPUT:
            assert problem.rate is not None, "these objectives have a rate to serve"
            prompt, token = (max(1, ceil(problem.rate / rate - 1e-9)) for rate in rates)
            return BUDGETS[problem.objective](ClusterDesign(*pair, prompt, token))
        ((constraint, limit),) = problem.bounds.items()
        unit = BUDGETS[constraint]
        weights = unit(ClusterDesign(*pair, 1, 0)), unit(ClusterDesign(*pair, 0, 1))
        # Both pools have the same rate where the limit is used up.
        return limit / sum(weight / rate for weight, rate in zip(weights, rates, strict=True))

    def _search_small(self, pair: tuple[MachineType, MachineType]) -> None:
        """Search clusters of a fraction of the size."""
        if self.problem.objective != THROUGHPUT:
            self._search.small = self._find_cheapest(pair, self.scale, None)
            return
        ((constraint, limit),) = self.problem.bounds.items()
        if any(maximal_designs(pair, constraint, limit / self.scale)):
            self._search.small = maximize_throughput(
                pair,
                constraint,
                limit / self.scale,
                lambda design: self._highest_rate(design, self.scale),
            ).design

    def _maximize(self, pair: tuple[MachineType, MachineType]) -> None:
        """Search the clusters that use up the limit, at full size."""
        ((constraint, limit),) = self.problem.bounds.items()
        small, best = self._search.small, self._search.best
        if small is None:
            # A fraction of the limit has no machine of each type.
            maximize_throughput(
                pair, constraint, limit, lambda design: self._highest_rate(design, 1)
            )
            return
        whole = list(maximal_designs(pair, constraint, limit))
        near = small.num_prompt * self.scale
        for shift in sorted({0, -(self.scale // 2), self.scale // 2}, key=abs):
            design = min(whole, key=lambda each: abs(each.num_prompt - near - shift))
            self._highest_rate(design, 1, None if best is None else best.rate)

    def _minimize(self, pair: tuple[MachineType, MachineType]) -> None:
        """Search the cheapest cluster for the rate, at full size."""
        small, start = self._search.small, None
        if small is not None:
            whole = scale_cluster(small, self.scale)
            if self._serves(whole, self._rate, 1):
                start = whole
        self._find_cheapest(pair, 1, start)

    @property
    def _rate(self) -> float:
        """Requests per second to serve."""
        assert self.problem.rate is not None, "these objectives have a rate to serve"
        return self.problem.rate

    def _find_cheapest(
        self, pair: tuple[MachineType, MachineType], scale: int, start: ClusterDesign | None
    ) -> ClusterDesign | None:
        """Return the cheapest cluster for the rate over `scale`; None if none serves it."""
        problem, rate = self.problem, self._rate / scale
        rates = fluid_rates(pair, problem.workload, problem.model, problem.max_request_tokens)
        prompt, token = (max(1, ceil(rate / each - 1e-9)) for each in rates)
        most = max_machine_counts(
            pair, rate, problem.workload, problem.model, problem.max_request_tokens
        )
        serves = cache(lambda design: self._serves(design, rate, scale))
        start = start or _first_cluster(pair, serves, (prompt, token), most)
        for _ in range(MAX_DOUBLINGS + 1):
            found = find_cheapest_cluster(
                pair,
                serves,
                problem.objective,
                (prompt, token),
                most,
                start,
            )
            if found is not None:
                return found
            most = 2 * most[0], 2 * most[1]
        return None

    def _saturated_rate(self, design: ClusterDesign) -> float:
        problem = self.problem
        return fluid_rate(design, problem.workload, problem.model, problem.max_request_tokens)

    def _highest_rate(
        self, design: ClusterDesign, scale: int, start_rate: float | None = None
    ) -> float:
        """Return the highest rate that a cluster of 1 / scale of the size serves, 0 without one."""
        saturated = self._saturated_rate(design)
        self._search.num_points += 1
        return search_rate(
            lambda rate: self._serves(design, rate, scale, is_counted=False),
            min(saturated, start_rate or START_SHARE * saturated),
        )[0]

    def _serves(
        self, design: ClusterDesign, rate: float, scale: int, is_counted: bool = True
    ) -> bool:
        """Test a cluster at a rate; return True if it is stable and all SLOs hold.

        A rate above saturation is not tested. The best cluster is noted, else the worst SLO.
        """
        problem = self.problem
        if self._saturated_rate(design) < rate:
            return False
        if reason := self.budget.refusal():
            raise SearchEndedError(reason)
        self._search.num_points += is_counted
        size = SampleSize(problem.num_requests, problem.min_seconds)
        point = ClusterPoint(
            design,
            problem.workload,
            rate,
            size,
            policy=POLICY,
            seed=problem.seed,
            model=problem.model,
            max_request_tokens=problem.max_request_tokens,
        )
        verdict = self.judge(point, self.budget.deadline)
        self.budget.end_evaluation()
        if verdict.is_served:
            self._note(scale_cluster(design, scale), rate * scale, scale, verdict.attainment)
        else:
            self._search.worst[design] = verdict.worst
        return verdict.is_served

    def _note(
        self,
        cluster: ClusterDesign,
        rate: float,
        scale: int,
        attainment: Attainment | None,
    ) -> None:
        """Keep a cluster if it is better than the best so far, or the first at full size."""
        search = self._search
        best = PoolPlan(
            search.name, cluster, rate, search.num_points, False, search.bound, attainment, scale
        )
        if search.best is None or search.best.scale != scale:
            is_better = search.best is None or scale == 1
        else:
            is_better = best_plan([search.best, best], self.problem.objective) is best
        if is_better:
            search.best = best
            self.on_best(best)

    def _explain(self, search: _DesignSearch) -> str:
        """Return why a design has no plan: the budget, or the SLO that binds."""
        if self.end_reason and not search.is_complete:
            tried = "" if search.num_points else "not tried: "
            return f"{tried}{self.end_reason}"
        if not search.worst:
            return "no cluster has enough machines: raise the limit of the cluster"
        closest = min(search.worst.values(), key=lambda margin: margin.slowdown / margin.limit)
        if closest.is_met:
            return (
                "no cluster is stable and certain to be within the nine SLOs: raise the limit of "
                "the cluster or lower --rate"
            )
        return (
            f"no cluster serves the workload within the nine SLOs: P{closest.percent} of "
            f"{closest.metric} binds, {closest.slowdown:.2f} times that of an idle DGX-A100 where "
            f"{closest.limit:g} is the limit: raise the limit of the cluster or lower --rate"
        )


def _first_cluster(
    pair: tuple[MachineType, MachineType],
    serves: Callable[[ClusterDesign], bool],
    least: tuple[int, int],
    most: tuple[int, int],
) -> ClusterDesign | None:
    """Return the first cluster that serves a rate, of those somewhat larger than the closed form's.

    Args:
        pair: Types of the prefill and decode machines.
        serves: Returns True if a cluster serves the rate.
        least: Numbers of prefill and decode machines by the closed form.
        most: Largest numbers.

    Returns:
        The cluster; None if none of FIRST_FACTORS suffices.
    """
    for factor in FIRST_FACTORS:
        counts = (
            min(ceil(factor * few - 1e-9), many) for few, many in zip(least, most, strict=True)
        )
        if serves(design := ClusterDesign(*pair, *counts)):
            return design
    return None


def max_machine_counts(
    pair: tuple[MachineType, MachineType],
    rate: float,
    workload: str,
    model: str = MODEL,
    max_request_tokens: int | None = None,
) -> tuple[int, int]:
    """Return the largest numbers of prefill and decode machines that a search has to try.

    Each is BORDER_FACTOR times the number of machines that a formula gives for the rate if there
    are enough machines of the other type.

    Args:
        pair: Types of the prefill and decode machines.
        rate: Requests per second to serve.
        workload: A name of WORKLOADS.
        model: A name of PROFILES.
        max_request_tokens: Tokens to which longer requests are cut; None: none is cut.
    """
    prompt, token = (
        max(MIN_BORDER, int(BORDER_FACTOR * rate / each) + 1)
        for each in fluid_rates(pair, workload, model, max_request_tokens)
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
        return max(plans, key=lambda plan: (plan.rate, -plan.cluster.num_prompt))
    return min(
        plans,
        key=lambda plan: (round(BUDGETS[objective](plan.cluster), 9), plan.cluster.num_prompt),
    )


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
    longest = problem.max_request_tokens or LONGEST_REQUEST
    engines_of = {
        machine: build_machine(machine, POLICY, model=problem.model, longest=longest)
        for machine in (cluster.prompt, cluster.token)
    }
    scheduler = changed_options(machine_scheduler(POLICY))
    # The preset sets it.
    del scheduler["policy"]
    engines = [
        PlannedEngine(
            name,
            (PlannedStage((index,) * machine.num_gpus, layers),),
            role,
            scheduler,
            max_model_len=engines_of[machine].scheduler.max_model_len,
        )
        for index, (name, role, machine) in enumerate(machines)
    ]
    return lay_out(
        replace(problem, workload=WORKLOADS[problem.workload]),
        DeviceCluster(nodes),
        engines,
        RouterPlan("", preset=PRESET),
        ExpectedFigures("", plan.rate, capacity=plan.rate if problem.rate is None else None),
    )
