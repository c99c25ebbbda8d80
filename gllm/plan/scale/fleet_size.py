"""Least number of workers that serve a workload within its SLO, by simulation."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple, TypeVar

from gllm.observability.latency import slo_attainment
from gllm.options.slo import Slo
from gllm.plan.attainment import (
    Attainment,
    AttainmentTest,
    JudgedRequest,
    goals_of,
    judge_line,
)
from gllm.plan.best_first import SearchBudget
from gllm.routing.placement import ALL_CONSTRAINTS, LatencyModel, PlacementRules
from gllm.routing.policies.aladdin import AladdinPolicy
from gllm.routing.policy_registry import make_policy
from gllm.scheduler.output_lengths import PromptLengthPredictor
from gllm.sim.capacity import SearchEndedError
from gllm.sim.cluster.cluster import ClusterRun, simulate_cluster
from gllm.sim.cluster.router import PolicyRouter
from gllm.sim.deployment import Deployment
from gllm.sim.monotone_search import find_last
from gllm.sim.workloads.requests import WorkloadRequest, cut_requests, make_workload

SECONDS = 120.0
"""Time in which the requests of a run arrive."""
NUM_HISTORY = 2000
"""Requests whose outputs the length predictor knows at the beginning."""
HISTORY_SEED = 1000
MAX_WORKERS = 512
MIN_REQUESTS = 500
"""Requests of the first run of a test, at least."""
MAX_REQUESTS = 4000
"""Requests of the longest run of a test in a search."""
QUICK_REQUESTS = 1000
"""Requests of the longest run of a test in a first search."""
LONGEST_RUN = 16_000
"""Requests of the longest run that decides the fleet of a plan."""

Result = TypeVar("Result")


@dataclass(frozen=True)
class WorkerSpec:
    """An engine of a fleet (a worker in Aladdin): what is simulated, and its latency model."""

    engine: Deployment
    """Step times, scheduler options and KV cache: of the simulated and of the planned engine."""
    latency: LatencyModel
    """Linear latency model, by which the routing policy `aladdin` predicts step times."""
    num_gpus: int = 1

    @property
    def max_model_len(self) -> int:
        """Longest request in tokens, prompt and output."""
        return self.engine.scheduler.max_model_len


@dataclass(frozen=True)
class FleetCase:
    """Arguments of a fleet simulation: engine type, workload, request rate, SLO, routing policy."""

    worker: WorkerSpec
    workload: str
    rate: float
    slo: Slo
    policy: str = "aladdin"
    seed: int = 0
    seconds: float = SECONDS
    theta: float = PlacementRules.theta
    constraints: frozenset[str] = field(default=ALL_CONSTRAINTS)
    num_requests: int = 300
    """Requests of the first run of a test, at least."""
    max_requests: int = MAX_REQUESTS
    """Requests of the longest run of a test."""
    quick_requests: int | None = None
    """Requests of the longest run that is made: a test that needs more is undecided; None: all."""
    heartbeat_seconds: float = 0.0
    """Time for which the policy `aladdin` collects requests; 0: each is placed at its arrival."""
    max_request_tokens: int | None = None
    """Tokens to which longer requests are cut; None: none is cut."""

    def jobs(self, count: int | None = None) -> list[WorkloadRequest]:
        """Return the first requests.

        Args:
            count: Number of requests; default: those of `seconds`.
        """
        number = count or max(2, round(self.rate * self.seconds))
        jobs = make_workload(self.workload, number, self.rate, seed=self.seed)
        return cut_requests(jobs, self.max_request_tokens)

    def router(self) -> PolicyRouter:
        """Return a new router with the routing policy; `aladdin` knows earlier requests."""
        if self.policy != "aladdin":
            return PolicyRouter(make_policy(self.policy, Random(self.seed)), self.slo)
        policy = AladdinPolicy(Random(self.seed), self.rules, self.worker.latency)
        return PolicyRouter(policy, self.slo, self.trained_lengths(), self.heartbeat_seconds)

    @property
    def rules(self) -> PlacementRules:
        """Constraints of the policy `aladdin`."""
        return PlacementRules(self.slo, self.theta, constraints=self.constraints)

    def trained_lengths(self) -> PromptLengthPredictor:
        """Return a new length predictor that is trained on earlier requests."""
        lengths = PromptLengthPredictor()
        history = make_workload(
            self.workload, NUM_HISTORY, self.rate, seed=self.seed + HISTORY_SEED
        )
        for job in history:
            lengths.record(job.num_prompt_tokens, job.num_output_tokens)
        return lengths


class FleetOutcome(NamedTuple):
    """SLO attainment and latencies of a simulated fleet of engines."""

    num_workers: int
    attainment: float
    """Share of requests within both limits, 0..1."""
    ttft_attainment: float
    """Share of requests within the TTFT limit, 0..1."""
    tpots: tuple[float, ...]
    """Time per output token of each request in seconds, sorted; 0 with a single token."""


class JudgedFleet(NamedTuple):
    """Number of engines, and the verdict of a sequential test of their SLO attainment."""

    num_workers: int
    attainment: Attainment

    @property
    def is_met(self) -> bool:
        """True if the SLO is met. Where the longest run decides nothing, its share decides."""
        return self.attainment.is_likely


def run_fleet_case(
    case: FleetCase, num_workers: int, check: Callable[[], None] | None = None
) -> ClusterRun:
    """Simulate a workload on a fleet of equal engines and return the record of the whole run.

    Args:
        case: Engine type, workload, request rate and routing policy.
        num_workers: Number of engines.
        check: Called now and then; an error that it raises ends the simulation.

    Raises:
        ValueError: A request is longer than the engines accept.
    """
    deployments = fleet_deployments(case, num_workers)
    return simulate_cluster(deployments, case.jobs(), case.router(), check=check)


def fleet_deployments(case: FleetCase, num_workers: int) -> dict[str, Deployment]:
    """Return the simulated engines of a fleet by name: w0, w1, ..."""
    return {f"w{index}": case.worker.engine for index in range(num_workers)}


def simulate_fleet(
    case: FleetCase, num_workers: int, check: Callable[[], None] | None = None
) -> FleetOutcome:
    """Simulate a workload on a fleet of equal engines and return SLO attainment and latencies.

    The arguments are those of `run_fleet_case`.
    """
    return measure_fleet(run_fleet_case(case, num_workers, check), case.slo, num_workers)


def measure_fleet(run: ClusterRun, slo: Slo, num_workers: int) -> FleetOutcome:
    """Return the SLO attainment and the latencies of a simulated run of a fleet."""
    lines = [served.line for served in run.requests.values()]
    return FleetOutcome(
        num_workers,
        slo_attainment(lines, slo),
        slo_attainment(lines, Slo(slo.ttft_seconds)),
        tuple(sorted(line.tpot or 0.0 for line in lines)),
    )


def judge_fleet(
    case: FleetCase, num_workers: int, check: Callable[[], None] | None = None
) -> JudgedFleet:
    """Test whether a fleet of equal engines is stable and attains the SLO; runs are extended.

    The first run has the requests of `case.seconds`, and at least `case.num_requests`.

    Args:
        case: Engine type, workload, request rate, SLO and routing policy.
        num_workers: Number of engines.
        check: Called now and then; an error that it raises ends the simulation.
    """
    deployments = fleet_deployments(case, num_workers)
    first = max(MIN_REQUESTS, case.num_requests, round(case.rate * case.seconds))
    first = min(case.max_requests, first)
    # A shorter run has the first requests of a longer one.
    jobs = case.jobs(case.max_requests)

    def simulate(count: int) -> list[JudgedRequest]:
        if case.quick_requests is not None and count > max(first, case.quick_requests):
            raise SearchEndedError("a longer run is left to a later test")
        run = simulate_cluster(deployments, jobs[:count], case.router(), check=check)
        lines = (served.line for _, served in sorted(run.requests.items()))
        return [judge_line(line, case.slo) for line in lines]

    test = AttainmentTest(goals_of(case.slo), first, case.max_requests)
    return JudgedFleet(num_workers, test.run(simulate))


def least_fleet(
    judge: Callable[[int, Callable[[], None] | None], tuple[Result, bool]],
    start: int = 4,
    max_workers: int = MAX_WORKERS,
    budget: SearchBudget | None = None,
    min_workers: int = 1,
    step: int | None = None,
) -> Result | None:
    """Search by simulation for the fewest engines that suffice.

    More engines are assumed never to be worse.

    Args:
        judge: Simulates a number of engines; returns the result, and True if they suffice. Its
            second argument is called now and then and may end the simulation by an error.
        start: Number of engines of the first simulation.
        max_workers: Largest number of engines.
        budget: Time and evaluation limit; None: no limit.
        min_workers: Number of engines that fewer are known to be too few for.
        step: Distance of the second number; default: half of the first.

    Returns:
        Result of the smallest sufficient fleet; None if none of up to `max_workers` suffices.

    Raises:
        SearchEndedError: The budget is spent; a running simulation is cut off.
    """
    known: dict[int, tuple[Result, bool]] = {}
    budget = budget or SearchBudget()
    least = max(1, min_workers) - 1

    def is_too_small(count: int, *_: int) -> bool:
        if count <= least:
            return True
        if count not in known:
            if reason := budget.refusal():
                raise SearchEndedError(reason)
            known[count] = judge(count, budget.deadline)
            budget.end_evaluation()
        return not known[count][1]

    if max_workers <= least:
        return None
    start = min(max(least + 1, start), max_workers)
    step = step or max(1, start // 2)
    largest = find_last(is_too_small, start, step, least, max_workers)
    return None if largest is None or largest == max_workers else known[largest + 1][0]
