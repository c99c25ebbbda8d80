"""Simulated fleets of HexGen-2's baselines: replicas that run both phases, and online load."""

from random import Random

from gllm.plan.hetero.planner import make_planner
from gllm.plan.hetero.replicas import Replica, max_model_len_of
from gllm.plan.hetero.simulation import (
    SimulatedFleet,
    build_engine_deployment,
    make_jobs,
)
from gllm.plan.hetero.workload import sample_workload
from gllm.plan.problem import ServiceProblem
from gllm.routing.policy import RoutingPolicy
from gllm.routing.smooth_round_robin import SmoothRoundRobin
from gllm.routing.state import RoutingRequest
from gllm.sim.cluster.cluster import ClusterRun, simulate_cluster
from gllm.sim.cluster.router import PolicyRouter
from gllm.sim.metrics.run_record import ServedRequest
from gllm.sim.workloads.requests import WorkloadRequest, sample_arrival_times


class WeightedTurns(RoutingPolicy):
    """Engines in turn, as often as their capacities say: the router of colocated replicas."""

    uses_statistics = False

    def __init__(self, weights: dict[str, float]) -> None:
        super().__init__(Random(0))
        self._weights, self._turns = weights, SmoothRoundRobin()

    def choose(self, request: RoutingRequest, engines: object) -> str | None:
        """Return the engine whose turn it is."""
        return self._turns.choose(self._weights)


def colocated_fleet(
    problem: ServiceProblem, replicas: list[Replica], policy: str = "vllm"
) -> SimulatedFleet:
    """Return replicas that run both phases, each with its share of the requests."""
    most = max_model_len_of(make_planner(problem), replicas)
    weights = {f"m{index}": replica.capacity for index, replica in enumerate(replicas)}

    def serve(jobs: list[WorkloadRequest]) -> ClusterRun:
        engines = {
            name: build_engine_deployment(problem, replica, most, policy)
            for name, replica in zip(weights, replicas, strict=True)
        }
        return simulate_cluster(engines, jobs, PolicyRouter(WeightedTurns(weights)))

    # The prompts of a whole batch are computed before it is full: Little's law.
    latency = max(replica.batch / replica.capacity for replica in replicas)
    return SimulatedFleet(sum(weights.values()), latency, most, serve)


def simulate_online(
    fleet: SimulatedFleet, workload: str, rate: float, count: int, seed: int = 0
) -> list[ServedRequest]:
    """Return requests with Poisson arrivals, in their order."""
    lengths = sample_workload(workload, count, seed)
    times = sample_arrival_times("poisson", count, rate, seed)
    run = fleet.serve(make_jobs(lengths, times, fleet.max_model_len))
    return [run.requests[index] for index in range(count)]
