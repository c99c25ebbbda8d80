"""Planner of prefill and decode engines with the highest goodput per GPU.

Candidates come from `placement`, their bounds from `phase_bounds`, goodputs from the simulator. The
search takes candidates in the order of their estimates and leaves out those that cannot win.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import TypeVar

from gllm.plan.best_first import BestFirstOutcome, CandidateBound, SearchBudget, search_best
from gllm.plan.goodput.engines import LOCAL_LINK, EngineCosts, make_engine
from gllm.plan.goodput.phase_bounds import (
    CONSTRAINTS,
    bound_decode,
    bound_prefill,
    constraint_of_nearest_candidate,
)
from gllm.plan.goodput.placement import (
    PhaseGoodput,
    PlacementUnit,
    count_engines,
    count_for_cluster,
    engine_choices,
    place_units,
    unit_choices,
)
from gllm.plan.goodput.systems import (
    PHASE_TARGET,
    GoodputTask,
    Outcome,
    RunTask,
    System,
    measure_goodput,
    run_task,
)
from gllm.plan.layout import Parallelism, PlannedEngine, lay_out, place_engines
from gllm.plan.nodes import with_inner_link
from gllm.plan.problem import ServiceProblem
from gllm.plan.serving_plan import ExpectedFigures, RouterPlan, ServingPlan
from gllm.plan.strategies import UnservableError
from gllm.sim.hardware.devices import LINKS
from gllm.sim.workloads.requests import WorkloadRequest, make_workload

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
PRESET = "distserve"
"""Preset of the router, which its engines take as well."""
NUM_BOUND_REQUESTS = 400
"""Requests from which closed forms take the lengths."""
LEAST_RATE = 1e-3
"""Estimate of a goodput at least, requests per second."""
FIRST_FACTOR = 1.25
"""First upper end of a search, per closed-form estimate."""
NUM_STEPS = 64
"""Rates from 0 to that end."""
MAX_ADDED = 4
"""Engines that are added at most where a plan's simulated attainment misses the target."""


@dataclass(frozen=True)
class GoodputPlan:
    """Result of the goodput planner: prefill and decode engines, and their simulated latencies."""

    system: System
    unit: PlacementUnit | None
    """Pair of engines that share nodes stage by stage; None if each phase was placed for itself."""
    rate: float
    """Requests per second that the plan is for."""
    per_gpu: float
    """Goodput in requests per second per GPU of the chosen engines, before rounding up."""
    outcome: Outcome
    """Simulated latencies of the requests at `rate`."""
    attainment: float
    """Simulated share of the requests within both latency limits at `rate`, 0..1."""
    searches: Mapping[str, PhaseSearch | UnitSearch]
    """Results of the searches, by phase, or under `unit` for pairs of engines."""


class GoodputPlanner:
    """Planner of prefill and decode engines with the highest goodput per GPU (DistServe).

    Goodput is the request rate at which enough requests meet the limits of TTFT and TPOT.

    Args:
        problem: Model, workload, latency limits of each request, and equal nodes.
        costs: Source of the predicted step times of engines.
        budget: Time and evaluation limit of all simulations together.
        measure: Returns the simulated goodput of a task in requests per second; None for
            `measure_goodput`, which ends at the deadline of the budget.
        network: Name of the link that transfers KV caches from prefill to decode engines.

    Raises:
        ValueError: The workload is unknown, or has a request that is longer than the context.
    """

    def __init__(
        self,
        problem: ServiceProblem,
        costs: EngineCosts,
        budget: SearchBudget,
        measure: Callable[[GoodputTask], float] | None = None,
        network: str = "nvlink",
    ) -> None:
        self.problem, self.costs = problem, costs
        self._measure = measure or partial(measure_goodput, check=budget.deadline)
        self._budget, self._network = budget, network
        self._jobs = make_workload(problem.workload, NUM_BOUND_REQUESTS, seed=problem.seed)
        self._phase_target = max(problem.limits.attainment, PHASE_TARGET)
        self._bounds: dict[tuple[str, Parallelism], CandidateBound] = {}
        self._rates: dict[GoodputTask, float] = {}
        longest = max(job.num_prompt_tokens + job.num_output_tokens for job in self._jobs)
        if longest > costs.max_model_len:
            raise ValueError(
                f"--workload {problem.workload} has a request of {longest} tokens, but "
                f"--max-model-len is {costs.max_model_len}: raise it or choose another "
                "workload"
            )

    def place_apart(self, rate: float | None) -> GoodputPlan:
        """Search for the best prefill and decode engines independently (DistServe's Algorithm 1).

        They serve `rate` requests per second, or as many as all GPUs can if it is None.

        Raises:
            UnservableError: No engine of a phase meets the latency limits.
            ValueError: The rate needs more GPUs than there are.
        """
        shape, cluster = self.problem.shape, self.problem.cluster
        choices = list(engine_choices(cluster, shape.heads, shape.layers))
        searches: dict[str, PhaseSearch] = {}
        for phase in PHASES:
            bounds = [(engine, self._per_gpu(phase, engine)) for engine in choices]
            searches[phase] = search_best(
                bounds, partial(self._phase_values, phase), lambda value: value, self._budget
            )
            _require(f"{phase} engine", searches[phase], bounds)
        prefill, decode = _best_pair(searches, cluster.num_devices)
        if rate is None:
            counts = count_for_cluster(cluster.num_devices, prefill, decode)
            rate = min(counts[0] * prefill.rate, counts[1] * decode.rate)
        else:
            counts = count_engines(rate, prefill.rate), count_engines(rate, decode.rate)
        system = self._make_system(prefill.parallelism, decode.parallelism, *counts)
        per_gpu = 1 / (1 / prefill.per_gpu + 1 / decode.per_gpu)
        return self._finish(system, None, rate, per_gpu, searches)

    def place_together(self, rate: float | None) -> GoodputPlan:
        """Search for the best engine pair whose stages share nodes (DistServe's Algorithm 2).

        They serve `rate` requests per second, or as many as all GPUs can if it is None.

        Raises:
            UnservableError: No pair meets the latency limits.
            ValueError: The rate needs more GPUs than there are.
        """
        shape, cluster = self.problem.shape, self.problem.cluster
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
        groups = len(cluster.nodes) // unit.num_nodes
        most = groups * (cluster.devices_per_node // unit.gpus_per_node)
        count = most if rate is None else count_engines(rate, goodput)
        if count > most:
            raise ValueError(
                f"--rate {rate:g} needs {count} units of {unit.num_gpus} GPUs, and the cluster "
                f"holds {most}: add nodes, or lower the rate to {most * goodput:.2f}"
            )
        system = self._make_system(unit.prefill, unit.decode, count, count)
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
        if system.num_gpus > cluster.num_devices:
            raise ValueError(
                f"--rate {rate:g} needs {system.placement}, {system.num_gpus} GPUs, and the "
                f"cluster has {cluster.num_devices}: add nodes, or lower the rate"
            )
        outcome, attained = self._simulate(system, rate)
        for _ in range(MAX_ADDED if unit is None else 0):
            if attained >= self.problem.limits.attainment:
                break
            larger = [
                replace(system, num_prefill=system.num_prefill + 1),
                replace(system, num_decode=system.num_decode + 1),
            ]
            results = [
                (candidate, *self._simulate(candidate, rate))
                for candidate in larger
                if candidate.num_gpus <= cluster.num_devices
            ]
            if not results:
                break
            system, outcome, attained = max(results, key=lambda result: result[2])
        return GoodputPlan(system, unit, rate, per_gpu, outcome, attained, searches)

    def _simulate(self, system: System, rate: float) -> tuple[Outcome, float]:
        problem = self.problem
        outcome = run_task(
            RunTask(system, problem.workload, rate, problem.num_requests, problem.seed)
        )
        return outcome, outcome.attainment(*problem.limits.require("ttft", "tpot"))

    def _bound(self, phase: str, engine: Parallelism) -> CandidateBound:
        """Return the closed forms of a phase on an engine, which are computed once."""
        key = phase, engine
        if key not in self._bounds:
            self._bounds[key] = bound_phase(self.problem, self.costs, self._jobs, phase, engine)
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
        system = System(phase, self.problem.model, self.costs, engine)
        task = self._make_task(system, phase, target, self._bound(phase, engine))
        if task not in self._rates:
            self._rates[task] = self._measure(task)
        return self._rates[task]

    def _phase_values(self, phase: str, engines: Sequence[Parallelism]) -> list[float]:
        """Return goodputs per GPU."""
        target = self._phase_target
        return [self._phase_rate(phase, engine, target) / engine.num_gpus for engine in engines]

    def _unit_value(self, unit: PlacementUnit, best: float) -> float:
        """Return the goodput per GPU of a unit; 0 if one phase alone is not better than the best.

        A unit attains no more than one of its phases does alone.
        """
        target = self.problem.limits.attainment
        for phase, engine in zip(PHASES, (unit.prefill, unit.decode), strict=True):
            if self._phase_rate(phase, engine, target) / unit.num_gpus <= best:
                return 0.0
        score, expected, _ = self._bound_unit(unit)
        bound = CandidateBound(score * unit.num_gpus, expected * unit.num_gpus)
        system = self._make_system(unit.prefill, unit.decode)
        task = self._make_task(system, "", target, bound)
        return self._measure(task) / unit.num_gpus

    def _make_system(
        self, prefill: Parallelism, decode: Parallelism, num_prefill: int = 1, num_decode: int = 1
    ) -> System:
        """Return a system of prefill and decode engines."""
        counts = num_prefill, num_decode
        return System(
            "plan", self.problem.model, self.costs, prefill, decode, *counts, network=self._network
        )

    def _make_task(
        self, system: System, phase: str, target: float, bound: CandidateBound
    ) -> GoodputTask:
        """Return the search for the goodput of a system whose bound is in requests per second."""
        problem = self.problem
        first_rate = FIRST_FACTOR * max(bound.expected, LEAST_RATE)
        return GoodputTask(
            system,
            problem.workload,
            problem.limits._replace(attainment=target),
            problem.num_requests,
            phase,
            problem.seed,
            first_rate=first_rate,
            num_steps=NUM_STEPS,
            most_rate=max(bound.score, first_rate),
        )

    def lay_out(self, plan: GoodputPlan) -> ServingPlan:
        """Convert the chosen engines into a serving plan. Raises ValueError if they do not fit."""
        problem, system, unit = self.problem, plan.system, plan.unit
        assert system.decode is not None
        layers = problem.shape.layers
        if unit is not None:
            pairs = place_units(problem.cluster, unit, system.num_prefill, layers)
            engines = [
                PlannedEngine(f"{phase}-{index}", stages, phase)
                for index, pair in enumerate(pairs)
                for phase, stages in zip(PHASES, pair, strict=True)
            ]
        else:
            counted = [("prefill", index, system.prefill) for index in range(system.num_prefill)]
            counted += [("decode", index, system.decode) for index in range(system.num_decode)]
            counted.sort(key=lambda engine: -engine[2].tp)
            placed = place_engines(
                problem.cluster,
                [(engine, engine.split_layers(layers)) for _, _, engine in counted],
            )
            engines = [
                PlannedEngine(f"{phase}-{index}", stages, phase)
                for (phase, index, _), stages in zip(counted, placed, strict=True)
            ]
        # KV caches stay within the nodes of a unit.
        routes = {f"prefill-{i}": {f"decode-{i}": 1.0} for i in range(system.num_prefill)}
        outcome = plan.outcome
        return lay_out(
            problem,
            with_inner_link(problem.cluster, LINKS[LOCAL_LINK]),
            engines,
            RouterPlan("", preset=PRESET),
            ExpectedFigures(
                "",
                plan.rate,
                attainment=plan.attainment,
                ttft_seconds=median(outcome.ttft),
                tpot_seconds=median(outcome.tpot),
            ),
            routes if unit is not None else {},
        )


def bound_phase(
    problem: ServiceProblem,
    costs: EngineCosts,
    jobs: Sequence[WorkloadRequest],
    phase: str,
    engine: Parallelism,
) -> CandidateBound:
    """Return an upper bound and an estimate of an engine's goodput in prefill or decode.

    Both are in requests per second and computed without a simulation.

    Args:
        problem: Model and latency limits.
        costs: Source of the predicted step times.
        jobs: Requests of the workload.
        phase: prefill or decode.
        engine: Parallelism of the engine; if the model does not fit, the bound is 0 with a reason.
    """
    admission = "auto" if phase == "prefill" else "distserve"
    has_prefill = phase == "prefill"
    try:
        deployment = make_engine(costs, problem.model, engine, "distserve", admission, has_prefill)
    except ValueError as error:
        return CandidateBound(0.0, 0.0, _reason_of(error))
    return (bound_prefill if has_prefill else bound_decode)(deployment, jobs, problem.limits)


def _reason_of(error: ValueError) -> str:
    """Return the constraint that an engine fails, by the error of `make_engine`."""
    text = str(error)
    if "published nothing" in text or "no batches" in text:
        return "no costs are known"
    return CONSTRAINTS[1] if "the KV cache has" in text else CONSTRAINTS[0]


def _best_pair(
    searches: Mapping[str, PhaseSearch], num_gpus: int
) -> tuple[PhaseGoodput, PhaseGoodput]:
    """Return the simulated engines with the fewest GPUs per rate that so many GPUs hold together.

    These are the best ones of each phase, unless both together are too large.

    Raises:
        UnservableError: No simulated engines fit together.
    """
    prefills, decodes = (
        [
            PhaseGoodput(engine, value * engine.num_gpus)
            for engine, value in searches[phase].evaluated
        ]
        for phase in PHASES
    )
    pairs = [
        (prefill, decode)
        for prefill in prefills
        for decode in decodes
        if prefill.rate > 0
        and decode.rate > 0
        and prefill.parallelism.num_gpus + decode.parallelism.num_gpus <= num_gpus
    ]
    if not pairs:
        raise UnservableError(
            f"no simulated engine of each phase fit {num_gpus} GPUs together: add nodes"
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
        constraint = constraint_of_nearest_candidate(list(counts))
    account = ", ".join(f"{count} by {reason}" for reason, count in counts.items())
    raise UnservableError(
        f"no {title} of {len(bounds)} fits: {constraint} binds ({account or 'none to try'}): "
        f"{FIXES.get(constraint, 'loosen --slo')}"
    )
