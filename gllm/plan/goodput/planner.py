"""Planner of prefill and decode engines: highest goodput per GPU, or the fewest GPUs for a rate.

Candidates come from `placement`, their bounds from `bounds`, goodputs from the simulator. The
search takes candidates in the order of their estimates and leaves out those that cannot win. A plan
is returned only for a rate at which it attains the SLO by `gllm.plan.attainment`.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any, NamedTuple

from gllm.options.slo import Slo
from gllm.plan.attainment import Attainment
from gllm.plan.best_first import BestFirstOutcome, CandidateBound, SearchBudget, search_best
from gllm.plan.goodput.bounds import GoodputBounds
from gllm.plan.goodput.engines import EngineCosts
from gllm.plan.goodput.placed_systems import SystemPlacer
from gllm.plan.goodput.placement import (
    PHASES,
    PlacementUnit,
    count_for_cluster,
    engine_choices,
    unit_choices,
)
from gllm.plan.goodput.search_results import (
    PhaseSearch,
    UnitSearch,
    best_pair,
    require_best,
    values_of,
)
from gllm.plan.goodput.systems import (
    PHASE_TARGET,
    GoodputTask,
    JudgedPlan,
    Outcome,
    RunTask,
    System,
    judge_system,
    measure_goodput,
)
from gllm.plan.layout import Parallelism
from gllm.plan.problem import ServiceProblem
from gllm.plan.serving_plan import ExpectedFigures, ServingPlan
from gllm.plan.strategies import UnservableError
from gllm.sim.capacity import INTERRUPTED, SearchEndedError
from gllm.sim.monotone_search import find_last

LEAST_RATE = 1e-3
"""Estimate of a goodput at least, requests per second."""
FIRST_FACTOR = 1.25
"""First upper end of a search, per closed-form estimate."""
NUM_STEPS = 64
"""Rates from 0 to that end."""
RATE_STEP = 2 ** (1 / 16)
"""Ratio of the rates at which a plan is judged: 4.4 %."""
MAX_STEPS = 48
"""Steps by which a rate is lowered at most: to an eighth."""


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
    attainment: Attainment
    """Verdict that the share of the requests within both latency limits at `rate` is enough."""
    searches: Mapping[str, PhaseSearch | UnitSearch]
    """Results of the searches, by phase, or under `unit` for pairs of engines; empty if the rate
    was an argument."""
    bound: float
    """No plan is better: with a rate as argument a lower bound of the number of GPUs, otherwise an
    upper bound of the rate on the cluster's GPUs. By closed forms, each phase for itself."""
    num_judged: int = 1
    """Number of plans or rates that were judged."""


class _Candidate(NamedTuple):
    """Engines that may serve a rate, and the rate that closed forms expect of them."""

    system: System
    unit: PlacementUnit | None
    expected: float


class GoodputPlanner:
    """Planner of prefill and decode engines with the highest goodput per GPU (DistServe).

    Goodput is the request rate at which enough requests meet the limits of TTFT and TPOT.

    Args:
        problem: Model, workload, latency limits of each request, and equal nodes.
        costs: Source of the predicted step times of engines.
        budget: Time and evaluation limit of all simulations together.
        measure: Returns the simulated goodput of a task in requests per second; None for
            `measure_goodput`, which ends at the deadline of the budget.
        network: Name of the link between nodes; without units it also transfers KV caches from
            prefill to decode engines.
        judge: Judges a system at a rate; None for `judge_system`, which ends at the deadline of the
            budget.
        on_best: Called with a description of each system that attains the SLO, with its rate.

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
        judge: Callable[[RunTask, Slo], JudgedPlan] | None = None,
        on_best: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.problem, self.costs = problem, costs
        self._on_best = on_best
        self._measure = measure or partial(measure_goodput, check=budget.deadline)
        self._judge = judge or partial(judge_system, check=budget.final_deadline)
        self._num_judged = 0
        self._budget = budget
        self._bounds = GoodputBounds(problem, costs)
        self._placer = SystemPlacer(problem, costs, network)
        self._phase_target = max(problem.limits.attainment, PHASE_TARGET)
        self._rates: dict[GoodputTask, float] = {}

    def place_apart(self, rate: float | None) -> GoodputPlan:
        """Search for prefill and decode engines that are placed independently of each other.

        Without a rate the best engine of each phase is taken (DistServe's Algorithm 1), as many as
        all GPUs hold. With a rate, numbers and parallelism are those with the fewest GPUs.

        Raises:
            UnservableError: No engine of a phase meets the latency limits.
            ValueError: The rate needs more GPUs than there are.
        """
        shape, cluster = self.problem.shape, self.problem.cluster
        choices = list(engine_choices(cluster, shape.heads, shape.layers))
        bounds = {
            phase: [(engine, self._bounds.per_gpu(phase, engine)) for engine in choices]
            for phase in PHASES
        }
        if rate is not None:
            return self._find_cheapest(rate, self._apart_candidates(rate, choices), bounds)
        searches: dict[str, PhaseSearch] = {}
        for phase in PHASES:
            searches[phase] = search_best(
                bounds[phase], partial(self._phase_values, phase), lambda value: value, self._budget
            )
            require_best(f"{phase} engine", searches[phase], bounds[phase])
        self._complete(searches, bounds)
        prefill, decode = best_pair(searches, bounds, cluster.num_devices)
        engines = prefill.parallelism, decode.parallelism
        fits = partial(self._placer.fits_apart, *engines)
        counts = count_for_cluster(cluster.num_devices, prefill, decode, fits)
        rate = min(counts[0] * prefill.rate, counts[1] * decode.rate)
        system = self._placer.apart_system(*engines, *counts)
        per_gpu = 1 / (1 / prefill.per_gpu + 1 / decode.per_gpu)
        return self._certify(system, None, rate, per_gpu, searches)

    def _complete(
        self,
        searches: Mapping[str, PhaseSearch],
        bounds: Mapping[str, Sequence[tuple[Parallelism, CandidateBound]]],
    ) -> None:
        """Evaluate further engines where the best ones of both phases do not fit together.

        A search leaves out what is worse than the best engine of its phase, which may be too large
        to stand beside any engine of the other phase.
        """
        num_gpus = self.problem.cluster.num_devices
        while True:
            values = {phase: dict(searches[phase].evaluated) for phase in PHASES}
            pairs = [
                (1 / (1 / first + 1 / second), prefill, decode)
                for prefill, prefill_bound in bounds["prefill"]
                for decode, decode_bound in bounds["decode"]
                if prefill.num_gpus + decode.num_gpus <= num_gpus
                and (first := values["prefill"].get(prefill, prefill_bound.score)) > 0
                and (second := values["decode"].get(decode, decode_bound.score)) > 0
            ]
            if not pairs:
                return
            chosen = zip(PHASES, max(pairs)[1:], strict=True)
            missing = [(phase, engine) for phase, engine in chosen if engine not in values[phase]]
            if not missing or self._budget.refusal():
                return
            for phase, engine in missing:
                try:
                    (value,) = self._phase_values(phase, [engine])
                except SearchEndedError:
                    return
                self._budget.end_evaluation()
                searches[phase].evaluated.append((engine, value))

    def place_together(self, rate: float | None) -> GoodputPlan:
        """Search for the engine pair whose stages share nodes (DistServe's Algorithm 2).

        Without a rate the pair with the highest goodput per GPU is taken, as many as the nodes
        hold. With a rate, pair and number are those with the fewest GPUs.

        Raises:
            UnservableError: No pair meets the latency limits.
            ValueError: The rate needs more GPUs than there are.
        """
        shape, cluster = self.problem.shape, self.problem.cluster
        bounds = [
            (unit, self._bounds.of_unit(unit))
            for unit in unit_choices(cluster, shape.heads, shape.layers)
        ]
        if rate is not None:
            return self._find_cheapest(rate, self._unit_candidates(rate, bounds), {"unit": bounds})
        best_so_far = 0.0

        def evaluate(units: Sequence[PlacementUnit]) -> list[float]:
            nonlocal best_so_far
            values = [self._unit_value(unit, best_so_far) for unit in units]
            best_so_far = max(best_so_far, *values)
            return values

        search = search_best(bounds, evaluate, lambda value: value, self._budget)
        unit = require_best("unit", search, bounds)
        per_gpu = values_of(search, bounds)[unit]
        count = self._placer.max_units(unit)
        system = self._placer.unit_system(unit, count)
        rate = count * per_gpu * unit.num_gpus
        return self._certify(system, unit, rate, per_gpu, {"unit": search})

    def _unit_candidates(
        self, rate: float, bounds: Sequence[tuple[PlacementUnit, CandidateBound]]
    ) -> Iterator[_Candidate]:
        """Yield numbers of each unit that may serve a rate by its bound."""
        for unit, bound in bounds:
            for count in range(1, self._placer.max_units(unit) + 1):
                if not bound.reason and count * unit.num_gpus * bound.score >= rate:
                    system = self._placer.unit_system(unit, count)
                    yield _Candidate(system, unit, count * unit.num_gpus * bound.expected)

    def _apart_candidates(
        self, rate: float, choices: Sequence[Parallelism]
    ) -> Iterator[_Candidate]:
        """Yield numbers of prefill and decode engines that may serve a rate by their bounds."""
        num_gpus = self.problem.cluster.num_devices
        counted: dict[str, list[tuple[Parallelism, int, float]]] = {}
        for phase in PHASES:
            each = ((engine, self._bounds.of_engine(phase, engine)) for engine in choices)
            counted[phase] = [
                (engine, count, count * bound.expected)
                for engine, bound in each
                if not bound.reason
                for count in range(1, num_gpus // engine.num_gpus + 1)
                if count * bound.score >= rate
            ]
        for prefill, num_prefill, prefill_rate in counted["prefill"]:
            for decode, num_decode, decode_rate in counted["decode"]:
                total = num_prefill * prefill.num_gpus + num_decode * decode.num_gpus
                if total <= num_gpus:
                    try:
                        system = self._placer.apart_system(prefill, decode, num_prefill, num_decode)
                    except ValueError:
                        continue  # Nodes hold as many GPUs, but not these stages.
                    yield _Candidate(system, None, min(prefill_rate, decode_rate))

    def _find_cheapest(
        self,
        rate: float,
        candidates: Iterable[_Candidate],
        bounds: Mapping[str, Sequence[tuple[Any, CandidateBound]]],
    ) -> GoodputPlan:
        """Return the candidate with the fewest GPUs that attains the SLO at a rate.

        Candidates are judged in the order of their GPUs; of those with the same number engines on
        one node come first, then those of which the highest rate is expected.
        """
        for title, each in bounds.items():
            if all(bound.reason for _, bound in each):
                require_best(
                    f"{title} engine" if title in PHASES else title, BestFirstOutcome(), each
                )
        ordered = sorted(
            candidates,
            key=lambda each: (each.system.num_gpus, each.system.crosses_nodes, -each.expected),
        )
        for candidate in ordered:
            if reason := self._budget.refusal():
                raise UnservableError(
                    f"no plan was found for {rate:g} requests/s ({reason}): raise --budget"
                )
            judged = self._judge_at(candidate.system, rate)
            if judged.attainment.is_met:
                per_gpu = rate / candidate.system.num_gpus
                bound = self._bounds.min_gpus(rate)
                return GoodputPlan(
                    candidate.system, candidate.unit, rate, per_gpu, judged.outcome,
                    judged.attainment, {}, bound, self._num_judged,
                )  # fmt: skip
        raise UnservableError(
            f"none of {len(ordered)} plans on {self.problem.cluster.num_devices} GPUs attains the "
            f"limits at {rate:g} requests/s: add nodes, lower --rate or loosen --slo"
        )

    def _certify(
        self,
        system: System,
        unit: PlacementUnit | None,
        rate: float,
        per_gpu: float,
        searches: Mapping[str, PhaseSearch | UnitSearch],
    ) -> GoodputPlan:
        """Return the plan at the highest rate, up to a searched one, at which it attains the SLO.

        A search takes short runs, in which queues have no time to grow. At the end of the budget
        the highest rate so far counts.
        """
        judged: dict[int, JudgedPlan] = {}

        def attains(index: int, *_: int) -> bool:
            judged[index] = self._judge_at(system, rate / RATE_STEP**-index)
            return judged[index].attainment.is_met

        try:
            best = find_last(attains, 0, 1, -MAX_STEPS, 0)
        except UnservableError:
            met = [index for index, each in judged.items() if each.attainment.is_met]
            if not met:
                raise
            best = max(met)
        if best is None:
            raise UnservableError(
                f"{system.placement} attains the limits at no rate from "
                f"{rate / RATE_STEP**MAX_STEPS:.2f} requests/s: loosen --slo"
            )
        return GoodputPlan(
            system,
            unit,
            rate / RATE_STEP**-best,
            rate / RATE_STEP**-best / system.num_gpus,
            judged[best].outcome,
            judged[best].attainment,
            searches,
            self._bounds.max_rate(),
            self._num_judged,
        )

    def _judge_at(self, system: System, rate: float) -> JudgedPlan:
        """Judge a system at a request rate. Raises UnservableError at the end of the budget."""
        problem = self.problem
        task = RunTask(system, problem.workload, rate, problem.num_requests, problem.seed)
        self._num_judged += 1
        try:
            judged = self._judge(task, problem.limits)
        except SearchEndedError as error:
            reason = f"no plan was judged to the end ({error}): raise --budget"
            raise UnservableError(reason) from None
        except KeyboardInterrupt:
            self._budget.stop(INTERRUPTED)
            raise UnservableError(f"no plan was judged to the end ({INTERRUPTED})") from None
        self._budget.end_evaluation()
        if judged.attainment.is_met:
            self._on_best(f"{system.placement}, {rate:.2f} requests/s; {judged.attainment}")
        return judged

    def _phase_rate(self, phase: str, engine: Parallelism, target: float) -> float:
        """Return the goodput of an engine in one phase, requests per second."""
        system = System(phase, self.problem.model, self.costs, engine)
        task = self._make_task(system, phase, target, self._bounds.of_engine(phase, engine))
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
        score, expected, _ = self._bounds.of_unit(unit)
        bound = CandidateBound(score * unit.num_gpus, expected * unit.num_gpus)
        system = self._placer.unit_system(unit, 1)
        task = self._make_task(system, "", target, bound)
        return self._measure(task) / unit.num_gpus

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
            max_rate=max(bound.score, first_rate),
        )

    def lay_out(self, plan: GoodputPlan) -> ServingPlan:
        """Convert the chosen engines into a serving plan. Raises ValueError if they do not fit."""
        outcome = plan.outcome
        expected = ExpectedFigures(
            "",
            plan.rate,
            attainment=plan.attainment.share,
            ttft_seconds=median(outcome.ttft),
            tpot_seconds=median(outcome.tpot),
        )
        return self._placer.lay_out(plan.system, plan.unit, expected)
