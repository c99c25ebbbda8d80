"""Problem of a goodput planner: model, cluster, workload and limits."""

from dataclasses import dataclass

from gllm.plan.best_first import CandidateBound
from gllm.plan.goodput.engines import EngineCosts, Parallelism
from gllm.plan.goodput.measurement import PHASE_TARGET, GoodputTask
from gllm.plan.goodput.phase_bounds import PhaseLimits
from gllm.plan.goodput.placement import GpuCluster
from gllm.plan.goodput.systems import System
from gllm.sim.workloads.requests import make_workload

NUM_BOUND_REQUESTS = 400
"""Requests from which closed forms take the lengths."""
LEAST_RATE = 1e-3
"""Estimate of a goodput at least, requests per second."""
FIRST_FACTOR = 1.25
"""First upper end of a search, per closed-form estimate."""


@dataclass(frozen=True)
class GoodputProblem:
    """Model, cluster, workload and limits."""

    model: str
    costs: EngineCosts
    cluster: GpuCluster
    lengths: str
    """Name of a workload."""
    ttft: float
    """Seconds."""
    tpot: float
    """Seconds."""
    target: float
    """Share of requests that keep both limits, 0..1."""
    num_requests: int
    """Least number of a simulation."""
    network: str = "nvlink"
    """Name of the link between the engines."""
    seed: int = 0
    """Seed of lengths and arrivals."""

    @property
    def limits(self) -> PhaseLimits:
        """Requests and limits for closed forms."""
        jobs = make_workload(self.lengths, NUM_BOUND_REQUESTS, seed=self.seed)
        return PhaseLimits(jobs, self.ttft, self.tpot, self.target)

    def make_system(
        self, prefill: Parallelism, decode: Parallelism, num_prefill: int = 1, num_decode: int = 1
    ) -> System:
        """Return a system of prefill and decode engines."""
        return System(
            "plan",
            self.model,
            self.costs,
            prefill,
            decode,
            num_prefill,
            num_decode,
            network=self.network,
        )

    @property
    def phase_target(self) -> float:
        """Attainment of each phase, so that both together attain the target."""
        return max(self.target, PHASE_TARGET)

    def make_task(
        self, system: System, phase: str, target: float, bound: CandidateBound
    ) -> GoodputTask:
        """Return the search for the goodput of a system whose bound is in requests per second."""
        first_rate = FIRST_FACTOR * max(bound.expected, LEAST_RATE)
        limits = self.ttft, self.tpot, self.num_requests
        return GoodputTask(
            system,
            self.lengths,
            *limits,
            phase,
            target,
            self.seed,
            first_rate=first_rate,
            most_rate=max(bound.score, first_rate),
        )
