"""Simulation of a plan: engines of its stages, its routes, and KV transfers over its links."""

from collections.abc import Callable, Mapping
from random import Random
from statistics import median
from typing import NamedTuple

from gllm.observability.latency import RequestTimeline
from gllm.options.slo import NO_SLO
from gllm.pacing.policy_registry import make_link_policy
from gllm.pacing.traffic import LinkPolicy
from gllm.plan.attainment import AttainmentTest, JudgedRequest, judge_line
from gllm.plan.hetero.costs import BLOCK_SIZE, build_pipeline, count_replica_kv_tokens
from gllm.plan.hetero.evaluation import EvaluatedPlan
from gllm.plan.hetero.links import LinkBytes, LinkDirection, RequestTraffic, make_traffic
from gllm.plan.hetero.planner import HeteroPlan
from gllm.plan.hetero.replicas import Phase, Replica, ReplicaPlanner, max_model_len_of
from gllm.plan.hetero.workload import cut_lengths, sample_workload
from gllm.plan.nodes import DeviceCluster
from gllm.plan.problem import ServiceProblem
from gllm.routing.disaggregation.policy_registry import make_pair_policy
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.cluster.cluster import ClusterRun
from gllm.sim.cluster.handoffs import KvNetwork, TransferPath
from gllm.sim.cluster.paired import simulate_pairs
from gllm.sim.costs.roofline import RooflineCostModel
from gllm.sim.deployment import Deployment
from gllm.sim.event_loop import EventLoop
from gllm.sim.hardware.devices import NetworkLink
from gllm.sim.joint_link import ActivationsFirstPolicy, JointLink, LinkShare
from gllm.sim.link import SimulatedLink
from gllm.sim.pipeline import PipelineLinks, make_pipeline_links
from gllm.sim.workloads.requests import WorkloadRequest, sample_arrival_times
from gllm.sim.workloads.traces import Lengths

OVERLOAD = 1.15
"""Request rate of a simulation over the estimated capacity, so that the capacity shows."""
WINDOW = (2.0, 4.0)
"""Time in which finished requests are counted, in latencies of the slowest replicas; requests
arrive until its end."""
MIN_REQUESTS = 200
"""Least number of requests of a simulation."""


RATE_SHARES = (0.95, 0.9, 0.85, 0.8, 0.7, 0.6, 0.5, 0.4)
"""Shares of a plan's capacity at which it is tried whether it is stable, highest first."""
MAX_EXTENSION = 16
"""Factor by which a simulation is extended at most to see whether it is stable."""


class SharedLinks(KvNetwork):
    """Simulated network of a plan: each direction of a machine's or device's link exists once.

    KV transfers of all pairs of engines and the activations between stages share these links, as
    they do in the flow of the plan.

    Args:
        cluster: Machines and links.
        traffic: Shares of the bytes that each link carries.
        replicas: Engines by name.
        bytes_per_token: KV cache of one token in bytes, over all layers.
    """

    def __init__(
        self,
        cluster: DeviceCluster,
        traffic: RequestTraffic,
        replicas: Mapping[str, Replica],
        bytes_per_token: int,
    ) -> None:
        super().__init__(NetworkLink(1.0, 0.0), bytes_per_token)
        self._cluster, self._traffic, self._replicas = cluster, traffic, replicas
        self._ways: dict[LinkDirection, SimulatedLink] = {}
        self._paths: dict[tuple[str, str], TransferPath] = {}
        self._has_activations = {
            link
            for name, replica in replicas.items()
            for index in range(len(replica.stages) - 1)
            for link in traffic.hop_shares(name, replica, index)
        }

    def path(self, source: str, target: str, loop: EventLoop) -> TransferPath:
        """Return the path between two engines, over all links that their stages use."""
        if (source, target) not in self._paths:
            ends = self._replicas[source], self._replicas[target]
            shares = self._traffic.kv_shares(source, ends[0], target, ends[1])
            latency = max(
                self._cluster.link(a.devices[0], b.devices[0]).latency
                for a in ends[0].stages
                for b in ends[1].stages
            )
            # The links of the path have rates of their own.
            network = NetworkLink(self.network.bandwidth, latency)
            self._paths[source, target] = TransferPath(self._join(shares, loop), network)
        return self._paths[source, target]

    def pipeline_links(self, engine: str, loop: EventLoop) -> PipelineLinks | None:
        """Return the links of an engine's stages, which it shares; None for a single stage."""
        replica = self._replicas[engine]
        num_hops = len(replica.stages) - 1
        if not num_hops:
            return None
        own = make_pipeline_links(loop, num_hops + 1)
        hops = [
            self._join(self._traffic.hop_shares(engine, replica, index), loop)
            for index in range(num_hops)
        ]
        return own._replace(activations=hops)

    def _join(self, shares: LinkBytes, loop: EventLoop) -> JointLink:
        for link in shares:
            if link not in self._ways:
                policy: LinkPolicy = make_link_policy("serial")
                if link in self._has_activations:
                    policy = ActivationsFirstPolicy()
                self._ways[link] = SimulatedLink(loop, policy)
        return JointLink(
            loop,
            [LinkShare(self._ways[link], share, link.bandwidth) for link, share in shares.items()],
        )


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
    blocks = count_replica_kv_tokens(hardware) // BLOCK_SIZE
    config = SchedulerConfig(
        **replica.options,
        block_size=BLOCK_SIZE,
        policy=policy if replica.phase is Phase.MIXED else "auto",
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
    problem: ServiceProblem,
    planner: ReplicaPlanner,
    plan: EvaluatedPlan,
    seed: int = 0,
    check: Callable[[], None] | None = None,
) -> SimulatedFleet:
    """Return the engines of a plan for a simulation; requests follow the plan's maximum flow.

    Args:
        problem: Model, workload and cluster.
        planner: Predicts the seconds of KV transfers.
        plan: Replicas and the flow between them; replicas without flow are left out.
        seed: Seed of the routing policy.
        check: Called now and then; an error that it raises ends a simulation.
    """
    routes = plan.routes()
    used = {*routes, *(name for targets in routes.values() for name in targets)}
    replicas = {name: replica for name, (replica, _) in plan.engines().items() if name in used}
    most = max_model_len_of(planner, list(replicas.values()))
    traffic = make_traffic(planner)
    roles = {name: str(replica.phase) for name, replica in replicas.items()}
    kv_bytes = problem.shape.layers * problem.shape.kv_bytes

    def serve(jobs: list[WorkloadRequest]) -> ClusterRun:
        engines = {
            name: build_engine_deployment(problem, replica, most)
            for name, replica in replicas.items()
        }
        network = SharedLinks(problem.cluster, traffic, replicas, kv_bytes)
        policy = make_pair_policy("flow", Random(seed), routes)
        return simulate_pairs(engines, roles, jobs, policy, network, check=check).cluster

    latency = max(replica.latency for replica in plan.prefill) + max(
        replica.latency for replica in plan.decode
    )
    return SimulatedFleet(plan.score.flow, latency, most, serve)


def simulate_throughput(
    fleet: SimulatedFleet, workload: str, seed: int = 0, most: int | None = None
) -> SimulatedThroughput:
    """Simulate engines at OVERLOAD times their estimated capacity, with evenly spaced arrivals.

    Args:
        fleet: Engines of a plan and their estimated capacity.
        workload: Name of the workload, which determines prompt and output lengths.
        seed: Seed of the lengths.
        most: Tokens to which longer requests are cut; None: those that no engine holds.
    """
    rate = OVERLOAD * fleet.estimate
    latency = max(fleet.latency, MIN_REQUESTS / rate / WINDOW[1])
    begin, end = WINDOW[0] * latency, WINDOW[1] * latency
    lengths = cut_lengths(sample_workload(workload, round(rate * end), seed), most)
    times = [index / rate for index in range(len(lengths))]
    run = fleet.serve(make_jobs(lengths, times, fleet.max_model_len))
    ends = [served.line.times[-1] for served in run.requests.values() if served.line.times]
    num_finished = sum(begin <= seconds < end for seconds in ends)
    return SimulatedThroughput(fleet.estimate, num_finished / (end - begin))


def simulate_plan(
    plan: HeteroPlan, seed: int = 0, check: Callable[[], None] | None = None
) -> SimulatedThroughput:
    """Simulate a plan at a request rate above its estimated capacity; return its throughput.

    Args:
        plan: Result of `plan_replicas`.
        seed: Seed of the lengths and of the routing policy.
        check: Called now and then; an error that it raises ends the simulation.
    """
    fleet = plan_fleet(plan.problem, plan.planner, plan.best, seed, check)
    return simulate_throughput(fleet, plan.problem.workload, seed, plan.problem.max_request_tokens)


class MeasuredRate(NamedTuple):
    """Request rate at which a simulated plan is stable, and the latencies of its requests."""

    rate: float
    """Requests per second."""
    num_requests: int
    """Requests of the simulation."""
    ttft_seconds: float
    """Median TTFT."""
    tpot_seconds: float
    """Median TPOT of the requests with several output tokens."""


def measure_rate(
    fleet: SimulatedFleet,
    problem: ServiceProblem,
    limit: float,
    seed: int,
    num_requests: int,
) -> MeasuredRate | None:
    """Return the highest of some shares of a rate at which a fleet is stable.

    Arrivals are a Poisson process. The shared test of planners decides, which extends a run until
    the number of requests in the system is seen to grow, or not to.

    Args:
        fleet: Engines of a plan.
        problem: Workload, and the tokens to which its requests are cut.
        limit: Rate of which RATE_SHARES are tried, requests per second.
        seed: Seed of lengths and arrivals.
        num_requests: Least number of requests of a simulation.

    Returns:
        None if the fleet is not stable at any of them.

    Raises:
        SearchEndedError: The deadline of the fleet's simulations has come.
    """
    test = AttainmentTest((), num_requests, MAX_EXTENSION * num_requests)
    lengths = sample_workload(problem.workload, test.max_requests, seed)
    lengths = cut_lengths(lengths, problem.max_request_tokens)
    for share in RATE_SHARES:
        rate = share * limit
        times = sample_arrival_times("poisson", test.max_requests, rate, seed)
        jobs = make_jobs(lengths, times, fleet.max_model_len)
        lines: list[RequestTimeline] = []

        def simulate(count: int) -> list[JudgedRequest]:
            run = fleet.serve(jobs[:count])  # noqa: B023 - called before the next rate
            lines[:] = [run.requests[index].line for index in range(count)]  # noqa: B023
            return [judge_line(line, NO_SLO) for line in lines]  # noqa: B023

        result = test.run(simulate)
        if result.is_met:
            ttft = median(line.ttft for line in lines if line.ttft is not None)
            tpot = [line.tpot for line in lines if line.tpot is not None]
            return MeasuredRate(rate, result.num_requests, ttft, median(tpot) if tpot else 0.0)
    return None


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
