"""Planner of prefill and decode engines with the highest goodput per GPU.

Candidates come from `placement`, their bounds from `phase_bounds`, goodputs from the simulator. The
search takes candidates in the order of their estimates and leaves out those that cannot win.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TypeVar

from gllm.plan.best_first import BestFirstOutcome, CandidateBound, search_best
from gllm.plan.budget import SearchBudget
from gllm.plan.goodput.engines import Parallelism, make_engine
from gllm.plan.goodput.measurement import (
    GoodputTask,
    RunTask,
    measure_goodput,
    run_task,
)
from gllm.plan.goodput.phase_bounds import (
    CONSTRAINTS,
    PhaseLimits,
    binding_constraint,
    bound_decode,
    bound_prefill,
)
from gllm.plan.goodput.placement import (
    GpuCluster,
    PhaseGoodput,
    PlacementUnit,
    count_engines,
    count_for_cluster,
    engine_choices,
    unit_choices,
)
from gllm.plan.goodput.problem import GoodputProblem
from gllm.plan.goodput.systems import Outcome, System
from gllm.sim.hardware.shapes import MODELS

PHASES = ("prefill", "decode")
FIXES = {
    "GPU memory": "choose a device with more memory, or more GPUs per node",
    "KV cache": "choose a device with more memory, more GPUs per node, or shorter requests",
    "TTFT": "loosen the limit of ttft, or allow more GPUs per node",
    "TPOT": "loosen the limit of tpot, or allow more GPUs per node",
}
"""Remedy of each constraint."""
Candidate = TypeVar("Candidate", Parallelism, PlacementUnit)
PhaseSearch = BestFirstOutcome[Parallelism, float]
UnitSearch = BestFirstOutcome[PlacementUnit, float]
MAX_ADDED = 4
"""Engines that are added at most where a plan's simulated attainment misses the target."""


@dataclass(frozen=True)
class GoodputPlan:
    """Engines of both phases for a rate, and the account of the search."""

    system: System
    unit: PlacementUnit | None
    """Unit that shares nodes; None if phases were chosen apart."""
    rate: float
    """Requests per second that the plan is for."""
    per_gpu: float
    """Goodput in requests per second per GPU of the chosen engines, before rounding up."""
    outcome: Outcome
    """Simulated at `rate`."""
    attainment: float
    """Share of the requests within both limits at `rate`, 0..1."""
    searches: Mapping[str, PhaseSearch | UnitSearch]
    """By phase, or `unit`."""


class UnservableError(ValueError):
    """No engine of a cluster serves a workload within the limits."""


class GoodputPlanner:
    """Search for the placement of a problem; goodputs of phases are measured once.

    Args:
        problem: Model, cluster, workload and limits.
        budget: Of all simulations together.
        measure: Goodput of a task in requests per second.

    Raises:
        ValueError: The workload is unknown, or has a request that is longer than the context.
    """

    def __init__(
        self,
        problem: GoodputProblem,
        budget: SearchBudget,
        measure: Callable[[GoodputTask], float] = measure_goodput,
    ) -> None:
        self.problem = problem
        self._budget = budget
        self._measure = measure
        self._limits = problem.limits
        self._bounds: dict[tuple[str, Parallelism], CandidateBound] = {}
        self._rates: dict[GoodputTask, float] = {}
        longest = max(job.num_prompt_tokens + job.num_output_tokens for job in self._limits.jobs)
        if longest > problem.costs.max_model_len:
            raise ValueError(
                f"--workload {problem.lengths} has a request of {longest} tokens, but "
                f"--max-model-len is {problem.costs.max_model_len}: raise it or choose another "
                "workload"
            )

    def place_apart(self, rate: float | None) -> GoodputPlan:
        """Return the placement of Algorithm 1 for a rate, or for all GPUs if it is None.

        Raises:
            UnservableError: No engine of a phase keeps the limits.
            ValueError: The rate needs more GPUs than there are.
        """
        shape, cluster = MODELS[self.problem.model], self.problem.cluster
        choices = list(engine_choices(cluster, shape.heads, shape.layers))
        searches: dict[str, PhaseSearch] = {}
        for phase in PHASES:
            bounds = [(each, self._per_gpu(phase, each)) for each in choices]
            searches[phase] = search_best(
                bounds, partial(self._phase_values, phase), lambda value: value, self._budget
            )
            _require(f"{phase} engine", searches[phase], bounds)
        prefill, decode = _best_pair(searches, cluster)
        if rate is None:
            counts = count_for_cluster(cluster.num_gpus, prefill, decode)
            rate = min(counts[0] * prefill.rate, counts[1] * decode.rate)
        else:
            counts = count_engines(rate, prefill.rate), count_engines(rate, decode.rate)
        system = self.problem.make_system(prefill.parallelism, decode.parallelism, *counts)
        per_gpu = 1 / (1 / prefill.per_gpu + 1 / decode.per_gpu)
        return self._finish(system, None, rate, per_gpu, searches)

    def place_together(self, rate: float | None) -> GoodputPlan:
        """Return the placement of Algorithm 2 for a rate, or for all GPUs if it is None.

        Raises:
            UnservableError: No unit keeps the limits.
            ValueError: The rate needs more GPUs than there are.
        """
        shape, cluster = MODELS[self.problem.model], self.problem.cluster
        bounds = [
            (unit, self._bound_unit(unit))
            for unit in unit_choices(cluster, shape.heads, shape.layers)
        ]
        best_so_far = 0.0

        def evaluate(units: Sequence[PlacementUnit]) -> list[float]:
            nonlocal best_so_far
            values = [self._unit_value(unit, best_so_far) for unit in units]
            best_so_far = max(best_so_far, *values)
            return values

        search = search_best(bounds, evaluate, lambda value: value, self._budget)
        unit = _require("unit", search, bounds)
        per_gpu = dict(search.evaluated)[unit]
        goodput = per_gpu * unit.num_gpus
        groups = cluster.num_nodes // unit.num_nodes
        most = groups * (cluster.gpus_per_node // unit.gpus_per_node)
        count = most if rate is None else count_engines(rate, goodput)
        if count > most:
            raise ValueError(
                f"--rate {rate:g} needs {count} units of {unit.num_gpus} GPUs, and the cluster "
                f"holds {most}: add nodes, or lower the rate to {most * goodput:.2f}"
            )
        system = self.problem.make_system(unit.prefill, unit.decode, count, count)
        return self._finish(system, unit, rate or count * goodput, per_gpu, {"unit": search})

    def _finish(
        self,
        system: System,
        unit: PlacementUnit | None,
        rate: float,
        per_gpu: float,
        searches: Mapping[str, PhaseSearch | UnitSearch],
    ) -> GoodputPlan:
        """Return the plan, simulated at its rate; engines of separate phases are added if needed.

        Both phases at 95 % attain about 90 % together. Where that falls short, the better one of a
        further prefill engine and a further decode engine is added while the cluster has GPUs.
        """
        cluster = self.problem.cluster
        if system.num_gpus > cluster.num_gpus:
            raise ValueError(
                f"--rate {rate:g} needs {system.placement}, {system.num_gpus} GPUs, and the "
                f"cluster has {cluster.num_gpus}: add nodes, or lower the rate"
            )
        outcome, attained = self._simulate(system, rate)
        for _ in range(MAX_ADDED if unit is None else 0):
            if attained >= self.problem.target:
                break
            larger = [
                replace(system, num_prefill=system.num_prefill + 1),
                replace(system, num_decode=system.num_decode + 1),
            ]
            results = [
                (each, *self._simulate(each, rate))
                for each in larger
                if each.num_gpus <= cluster.num_gpus
            ]
            if not results:
                break
            system, outcome, attained = max(results, key=lambda each: each[2])
        return GoodputPlan(system, unit, rate, per_gpu, outcome, attained, searches)

    def _simulate(self, system: System, rate: float) -> tuple[Outcome, float]:
        problem = self.problem
        outcome = run_task(
            RunTask(system, problem.lengths, rate, problem.num_requests, problem.seed)
        )
        return outcome, outcome.attainment(problem.ttft, problem.tpot)

    def _bound(self, phase: str, engine: Parallelism) -> CandidateBound:
        """Return the closed forms of a phase on an engine, which are computed once."""
        key = phase, engine
        if key not in self._bounds:
            self._bounds[key] = bound_phase(self.problem, self._limits, phase, engine)
        return self._bounds[key]

    def _per_gpu(self, phase: str, engine: Parallelism) -> CandidateBound:
        score, expected, reason = self._bound(phase, engine)
        return CandidateBound(score / engine.num_gpus, expected / engine.num_gpus, reason)

    def _bound_unit(self, unit: PlacementUnit) -> CandidateBound:
        """Return the closed forms of a unit per GPU: those of its slower phase."""
        each = self._bound("prefill", unit.prefill), self._bound("decode", unit.decode)
        reason = next((bound.reason for bound in each if bound.reason), "")
        return CandidateBound(
            min(bound.score for bound in each) / unit.num_gpus,
            min(bound.expected for bound in each) / unit.num_gpus,
            reason,
        )

    def _phase_rate(self, phase: str, engine: Parallelism, target: float) -> float:
        """Return the goodput of an engine in one phase, requests per second."""
        problem = self.problem
        system = System(phase, problem.model, problem.costs, engine)
        task = problem.make_task(system, phase, target, self._bound(phase, engine))
        if task not in self._rates:
            self._rates[task] = self._measure(task)
        return self._rates[task]

    def _phase_values(self, phase: str, engines: Sequence[Parallelism]) -> list[float]:
        """Return goodputs per GPU."""
        target = self.problem.phase_target
        return [self._phase_rate(phase, each, target) / each.num_gpus for each in engines]

    def _unit_value(self, unit: PlacementUnit, best: float) -> float:
        """Return the goodput per GPU of a unit; 0 if one phase alone is not better than the best.

        A unit attains no more than one of its phases does alone.
        """
        problem = self.problem
        for phase, engine in zip(PHASES, (unit.prefill, unit.decode), strict=True):
            if self._phase_rate(phase, engine, problem.target) / unit.num_gpus <= best:
                return 0.0
        score, expected, _ = self._bound_unit(unit)
        bound = CandidateBound(score * unit.num_gpus, expected * unit.num_gpus)
        system = problem.make_system(unit.prefill, unit.decode)
        task = problem.make_task(system, "", problem.target, bound)
        return self._measure(task) / unit.num_gpus


def bound_phase(
    problem: GoodputProblem, limits: PhaseLimits, phase: str, engine: Parallelism
) -> CandidateBound:
    """Return the closed forms of a phase on an engine, requests per second.

    Args:
        problem: Model and costs.
        limits: Limits of the problem, and the requests whose lengths count.
        phase: prefill or decode.
        engine: The engine; it may be too small for the model.
    """
    admission = "auto" if phase == "prefill" else "distserve"
    has_prefill = phase == "prefill"
    try:
        deployment = make_engine(
            problem.costs, problem.model, engine, "distserve", admission, has_prefill
        )
    except ValueError as error:
        return CandidateBound(0.0, 0.0, _reason_of(error))
    return (bound_prefill if has_prefill else bound_decode)(deployment, limits)


def _reason_of(error: ValueError) -> str:
    """Return the constraint that an engine fails, by the error of `make_engine`."""
    text = str(error)
    if "published nothing" in text or "no batches" in text:
        return "no costs are known"
    return CONSTRAINTS[1] if "the KV cache has" in text else CONSTRAINTS[0]


def _best_pair(
    searches: Mapping[str, PhaseSearch], cluster: GpuCluster
) -> tuple[PhaseGoodput, PhaseGoodput]:
    """Return the simulated engines with the fewest GPUs per rate that a cluster holds together.

    These are the best ones of each phase, unless both together are too large.

    Raises:
        UnservableError: No simulated engines fit together.
    """
    prefills, decodes = (
        [PhaseGoodput(each, value * each.num_gpus) for each, value in searches[phase].evaluated]
        for phase in PHASES
    )
    pairs = [
        (prefill, decode)
        for prefill in prefills
        for decode in decodes
        if prefill.rate > 0
        and decode.rate > 0
        and prefill.parallelism.num_gpus + decode.parallelism.num_gpus <= cluster.num_gpus
    ]
    if not pairs:
        raise UnservableError(
            f"no simulated engine of each phase fit {cluster.num_gpus} GPUs together: add nodes"
        )
    return min(pairs, key=lambda pair: 1 / pair[0].per_gpu + 1 / pair[1].per_gpu)


def _require(
    title: str,
    search: BestFirstOutcome[Candidate, float],
    bounds: Sequence[tuple[Candidate, CandidateBound]],
) -> Candidate:
    """Return the best candidate of a search.

    Raises:
        UnservableError: There is none; the message names the constraint that binds.
    """
    if search.best is not None and search.best[1] > 0:
        return search.best[0]
    if search.left_out and search.best is None:
        reasons = ", ".join(search.left_out)
        raise UnservableError(f"no {title} was simulated ({reasons}): raise --budget")
    counts = Counter(bound.reason for _, bound in bounds if bound.reason)
    if search.best is not None:
        constraint = "latency limits, with queues"
        counts[constraint] = len(search.evaluated)
    else:
        constraint = binding_constraint(list(counts))
    account = ", ".join(f"{count} by {reason}" for reason, count in counts.items())
    raise UnservableError(
        f"no {title} of {len(bounds)} fits: {constraint} binds ({account or 'none to try'}): "
        f"{FIXES.get(constraint, 'loosen --slo')}"
    )
