"""Simulation of a plan: engines of its stages, its routes, and KV transfers over its links."""

from collections.abc import Callable
from random import Random
from typing import NamedTuple

from gllm.plan.hetero.costs import BLOCK_SIZE, build_pipeline
from gllm.plan.hetero.evaluation import EvaluatedPlan
from gllm.plan.hetero.planner import HeteroPlan
from gllm.plan.hetero.replicas import Phase, Replica, ReplicaPlanner
from gllm.plan.hetero.workload import mean_lengths, sample_workload
from gllm.plan.problem import ServiceProblem
from gllm.routing.disaggregation.policy_registry import make_pair_policy
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.cluster.cluster import ClusterRun
from gllm.sim.cluster.handoffs import KvNetwork, TransferPath
from gllm.sim.cluster.paired import simulate_pairs
from gllm.sim.costs.roofline import RooflineCostModel
from gllm.sim.deployment import USABLE_MEMORY_SHARE, Deployment
from gllm.sim.event_loop import EventLoop
from gllm.sim.hardware.devices import NetworkLink
from gllm.sim.workloads.requests import WorkloadRequest
from gllm.sim.workloads.traces import Lengths

OVERLOAD = 1.15
"""Request rate of a simulation over the estimated capacity, so that the capacity shows."""
WINDOW = (2.0, 4.0)
"""Time in which finished requests are counted, in latencies of the slowest replicas; requests
arrive until its end."""
MIN_REQUESTS = 200
"""Least number of requests of a simulation."""


class PairLinks(KvNetwork):
    """Simulated network with a separate link for each pair of prefill and decode engine.

    Args:
        seconds: Seconds in which `num_tokens` tokens are transferred, by (sender, receiver).
        num_tokens: Number of tokens for which `seconds` holds; fixes the bandwidth of each link.
        bytes_per_token: KV cache of one token in bytes, over all layers.
    """

    def __init__(
        self, seconds: dict[tuple[str, str], float], num_tokens: float, bytes_per_token: int
    ) -> None:
        super().__init__(NetworkLink(1.0, 0.0), bytes_per_token)
        self._ways = {
            pair: NetworkLink(num_tokens * bytes_per_token / pair_seconds, 0.0)
            for pair, pair_seconds in seconds.items()
        }

    def path(self, source: str, target: str, loop: EventLoop) -> TransferPath:
        """Return the link between two engines."""
        link = super().path(f"{source}-{target}", target, loop).link
        return TransferPath(link, self._ways[source, target])


class SimulatedThroughput(NamedTuple):
    """Throughput of a plan in requests per second: estimate of the planner and simulated value."""

    estimate: float
    """Requests per second that the planner predicts."""
    simulated: float
    """Requests that finish per second in the measured part of the simulation."""

    @property
    def error(self) -> float:
        """Relative deviation of the simulation from the estimate."""
        return self.simulated / self.estimate - 1


class SimulatedFleet(NamedTuple):
    """Engines of a plan ready to simulate, with the planner's estimates of rate and latency."""

    estimate: float
    """Requests per second that the planner predicts."""
    latency: float
    """Estimated seconds of a request in the slowest prefill and decode engine with full batches."""
    max_model_len: int
    """Largest number of tokens of a request that every engine can hold."""
    serve: Callable[[list[WorkloadRequest]], ClusterRun]
    """Simulates the requests on new engines."""


def build_engine_deployment(
    problem: ServiceProblem, replica: Replica, max_model_len: int, policy: str = "vllm"
) -> Deployment:
    """Return the simulated engine of a replica, with the batch size that fits its memory.

    Args:
        problem: Model and cluster.
        replica: Devices, stages and phase of the engine.
        max_model_len: Largest number of tokens of a request.
        policy: Scheduling policy, only for a replica that runs both phases.

    Raises:
        ValueError: A sequence of `max_model_len` tokens does not fit the KV cache.
    """
    hardware = build_pipeline(problem.cluster, problem.shape, replica.stages)
    blocks = min(hardware.stage_kv_blocks(BLOCK_SIZE, USABLE_MEMORY_SHARE))
    # A prefill engine needs room for prompts that wait for their transfer.
    batch = replica.batch if replica.phase is not Phase.PREFILL else 256
    is_mixed = replica.phase is Phase.MIXED
    config = SchedulerConfig(
        max_num_seqs=max(1, batch),
        prefix_cache=False,
        block_size=BLOCK_SIZE,
        preset=None if is_mixed else "flow",
        policy=policy if is_mixed else "auto",
    )
    return Deployment(
        problem.model,
        hardware.layer_counts,
        RooflineCostModel(hardware),
        config.resolve(len(replica.stages), blocks, min(max_model_len, blocks * BLOCK_SIZE)),
        degrees=hardware.degrees,
        hardware=hardware,
    )


def plan_fleet(
    problem: ServiceProblem, planner: ReplicaPlanner, plan: EvaluatedPlan, seed: int = 0
) -> SimulatedFleet:
    """Return the engines of a plan for a simulation; requests follow the plan's maximum flow.

    Args:
        problem: Model, workload and cluster.
        planner: Predicts the seconds of KV transfers.
        plan: Replicas and the flow between them; replicas without flow are left out.
        seed: Seed of the routing policy.
    """
    routes = plan.routes()
    used = {*routes, *(name for targets in routes.values() for name in targets)}
    replicas = {name: replica for name, (replica, _) in plan.engines().items() if name in used}
    most = max_model_len_of(problem, list(replicas.values()))
    seconds = {
        (p, d): planner.kv_seconds(replicas[p], replicas[d])
        for p, targets in routes.items()
        for d in targets
    }
    roles = {name: str(replica.phase) for name, replica in replicas.items()}
    kv_bytes = problem.shape.layers * problem.shape.kv_bytes

    def serve(jobs: list[WorkloadRequest]) -> ClusterRun:
        engines = {
            name: build_engine_deployment(problem, replica, most)
            for name, replica in replicas.items()
        }
        network = PairLinks(seconds, mean_lengths(problem.workload).prompt, kv_bytes)
        policy = make_pair_policy("flow", Random(seed), routes)
        return simulate_pairs(engines, roles, jobs, policy, network).cluster

    latency = max(replica.latency for replica in plan.prefill) + max(
        replica.latency for replica in plan.decode
    )
    return SimulatedFleet(plan.score.flow, latency, most, serve)


def simulate_throughput(fleet: SimulatedFleet, workload: str, seed: int = 0) -> SimulatedThroughput:
    """Simulate engines at OVERLOAD times their estimated capacity, with evenly spaced arrivals.

    Args:
        fleet: Engines of a plan and their estimated capacity.
        workload: Name of the workload, which determines prompt and output lengths.
        seed: Seed of the lengths.
    """
    rate = OVERLOAD * fleet.estimate
    latency = max(fleet.latency, MIN_REQUESTS / rate / WINDOW[1])
    begin, end = WINDOW[0] * latency, WINDOW[1] * latency
    lengths = sample_workload(workload, round(rate * end), seed)
    times = [index / rate for index in range(len(lengths))]
    run = fleet.serve(make_jobs(lengths, times, fleet.max_model_len))
    ends = [served.line.times[-1] for served in run.requests.values() if served.line.times]
    num_finished = sum(begin <= seconds < end for seconds in ends)
    return SimulatedThroughput(fleet.estimate, num_finished / (end - begin))


def simulate_plan(plan: HeteroPlan, seed: int = 0) -> SimulatedThroughput:
    """Simulate a plan at a request rate above its estimated capacity; return its throughput.

    Args:
        plan: Result of `plan_replicas`.
        seed: Seed of the lengths and of the routing policy.
    """
    fleet = plan_fleet(plan.problem, plan.planner, plan.best, seed)
    return simulate_throughput(fleet, plan.problem.workload, seed)


def make_jobs(lengths: Lengths, times: list[float], max_model_len: int) -> list[WorkloadRequest]:
    """Return requests with given lengths and arrival times; too long prompts are truncated.

    Args:
        lengths: (prompt tokens, output tokens) of each request.
        times: Arrival time of each request in seconds.
        max_model_len: Largest number of prompt and output tokens of a request.
    """
    return [
        WorkloadRequest(time, min(prompt, max_model_len - output), output)
        for time, (prompt, output) in zip(times, lengths, strict=True)
    ]


def max_model_len_of(problem: ServiceProblem, replicas: list[Replica]) -> int:
    """Return the largest number of tokens of a request that fits the KV cache of every replica."""
    pipelines = [
        build_pipeline(problem.cluster, problem.shape, replica.stages) for replica in replicas
    ]
    blocks = [
        min(pipeline.stage_kv_blocks(BLOCK_SIZE, USABLE_MEMORY_SHARE)) for pipeline in pipelines
    ]
    return BLOCK_SIZE * min(blocks)
