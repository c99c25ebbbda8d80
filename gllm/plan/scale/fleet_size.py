"""Least number of workers that serve a workload within its SLO, by simulation."""

from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import NamedTuple

from gllm.observability.latency import slo_attainment
from gllm.options.slo import Slo
from gllm.plan.best_first import SearchBudget
from gllm.routing.placement import ALL_CONSTRAINTS, LatencyModel, PlacementRules
from gllm.routing.policies.aladdin import AladdinPolicy
from gllm.routing.policy_registry import make_policy
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.capacity import SearchEndedError
from gllm.sim.cluster.cluster import ClusterRun, simulate_cluster
from gllm.sim.cluster.router import PolicyRouter
from gllm.sim.costs.base import CostModel
from gllm.sim.deployment import Deployment
from gllm.sim.monotone_search import find_last
from gllm.sim.workloads.requests import WorkloadRequest, make_workload, scale_request

SECONDS = 120.0
"""Time in which the requests of a run arrive."""
MAX_TOKENS = 4096
"""Longest request in tokens."""
NUM_HISTORY = 2000
"""Requests whose outputs the length predictor knows at the beginning."""
HISTORY_SEED = 1000
BLOCK_SIZE = 16
MAX_WORKERS = 512


@dataclass(frozen=True)
class WorkerSpec:
    """An engine of a simulated fleet (a worker in Aladdin): step times, KV cache size and GPUs."""

    name: str
    """Name of the model."""
    num_layers: int
    cost: CostModel
    latency: LatencyModel
    """Linear latency model, by which the routing policy `aladdin` predicts step times."""
    num_kv_tokens: int
    num_gpus: int = 1
    max_num_seqs: int = 128

    def deployment(self) -> Deployment:
        """Return the simulated engine; it schedules prompts first, as early vLLM did."""
        config = SchedulerConfig(
            policy="vllm",
            max_num_batched_tokens=MAX_TOKENS,
            max_num_seqs=self.max_num_seqs,
            prefix_cache=False,
            async_scheduling=False,
        )
        num_blocks = self.num_kv_tokens // BLOCK_SIZE
        resolved = config.resolve(1, num_blocks, min(MAX_TOKENS, num_blocks * BLOCK_SIZE))
        return Deployment(self.name, [self.num_layers], self.cost, resolved)


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

    def jobs(self) -> list[WorkloadRequest]:
        """Return the requests, truncated to the longest that a worker accepts."""
        count = max(2, round(self.rate * self.seconds))
        most = min(MAX_TOKENS, self.worker.num_kv_tokens // BLOCK_SIZE * BLOCK_SIZE)
        return [
            scale_request(job, 1.0, most)
            for job in make_workload(self.workload, count, self.rate, seed=self.seed)
        ]

    def router(self) -> PolicyRouter:
        """Return a new router with the routing policy."""
        if self.policy != "aladdin":
            return PolicyRouter(make_policy(self.policy, Random(self.seed)), self.slo)
        return PolicyRouter(self.best_fit(), self.slo)

    @property
    def rules(self) -> PlacementRules:
        """Constraints of the policy `aladdin`."""
        return PlacementRules(self.slo, self.theta, constraints=self.constraints)

    def best_fit(self) -> AladdinPolicy:
        """Return a new policy `aladdin` whose length predictor is trained on earlier requests."""
        policy = AladdinPolicy(Random(self.seed), self.rules, self.worker.latency)
        history = make_workload(
            self.workload, NUM_HISTORY, self.rate, seed=self.seed + HISTORY_SEED
        )
        for job in history:
            policy.on_finished(job.num_prompt_tokens, job.num_output_tokens)
        return policy


class FleetOutcome(NamedTuple):
    """SLO attainment and latencies of a simulated fleet of engines."""

    num_workers: int
    attainment: float
    """Share of requests within both limits, 0..1."""
    ttft_attainment: float
    """Share of requests within the TTFT limit, 0..1."""
    tpots: tuple[float, ...]
    """Time per output token of each request in seconds, sorted; 0 with a single token."""


def run_fleet_case(
    case: FleetCase, num_workers: int, check: Callable[[], None] | None = None
) -> ClusterRun:
    """Simulate a workload on a fleet of equal engines and return the record of the whole run.

    Args:
        case: Engine type, workload, request rate and routing policy.
        num_workers: Number of engines.
        check: Called now and then; an error that it raises ends the simulation.
    """
    deployments = fleet_deployments(case, num_workers)
    return simulate_cluster(deployments, case.jobs(), case.router(), check=check)


def fleet_deployments(case: FleetCase, num_workers: int) -> dict[str, Deployment]:
    """Return the simulated engines of a fleet by name: w0, w1, ..."""
    deployment = case.worker.deployment()
    return {f"w{index}": deployment for index in range(num_workers)}


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


def least_fleet(
    case: FleetCase,
    attainment: float = 0.99,
    start: int = 4,
    max_workers: int = MAX_WORKERS,
    on_outcome: Callable[[FleetOutcome], None] = lambda outcome: None,
    budget: SearchBudget | None = None,
) -> FleetOutcome | None:
    """Search by simulation for the fewest engines that reach an SLO attainment.

    More engines are assumed never to lower the attainment.

    Args:
        case: Engine type, workload, request rate and routing policy.
        attainment: Required share of requests within both latency limits, 0..1.
        start: Number of engines of the first simulation.
        max_workers: Largest number of engines.
        on_outcome: Called after each simulation.
        budget: Time and evaluation limit; None: no limit.

    Returns:
        Result of the smallest sufficient fleet; None if none of up to `max_workers` suffices.

    Raises:
        SearchEndedError: The budget is spent; a running simulation is cut off.
    """
    known: dict[int, FleetOutcome] = {}
    budget = budget or SearchBudget()

    def is_too_small(count: int, *_: int) -> bool:
        if count and count not in known:
            if reason := budget.refusal():
                raise SearchEndedError(reason)
            with budget.evaluation():
                known[count] = simulate_fleet(case, count, budget.deadline)
            on_outcome(known[count])
        return not count or known[count].attainment < attainment

    start = min(max(1, start), max_workers)
    largest = find_last(is_too_small, start, max(1, start // 2), 0, max_workers)
    return None if largest is None or largest == max_workers else known[largest + 1]
