"""Simulations of HexGen-2's plans beside those of colocated engines: peaks, loads, deadlines."""

import math
from statistics import fmean
from typing import NamedTuple

from experiments.hexgen2_baselines import best_colocated, best_uniform
from experiments.hexgen2_cases import LLAMA
from experiments.hexgen2_fleets import colocated_fleet, simulate_online
from gllm.observability.latency import percentile
from gllm.plan.hetero.planner import make_planner, plan_replicas
from gllm.plan.hetero.replicas import Phase
from gllm.plan.hetero.simulation import (
    SimulatedFleet,
    SimulatedThroughput,
    plan_fleet,
    simulate_throughput,
)
from gllm.plan.hetero.workload import mean_lengths
from gllm.plan.nodes import named_cluster
from gllm.plan.problem import ServiceProblem
from gllm.sim.metrics.run_record import ServedRequest

ONLINE_WORKLOAD = "azure-conv"
ONLINE_SHARE = 0.75
"""Request rate of online load over the peak (HexGen-2, section 5.1)."""
NUM_ONLINE, NUM_TIMED = 3000, 1500
"""Requests of a simulation of online load, and of one of deadlines."""
DEADLINE_WORKLOADS = (ONLINE_WORKLOAD, "HPLD", "LPHD")
"""Workloads whose deadlines are compared."""
STAGE_LIMITS = (None, 2)
"""Largest numbers of stages of the colocated engines among which the best simulated one counts."""
ATTAINMENT = (90, 99)
"""Per cent of the requests that keep their deadlines."""


class SimulatedCell(NamedTuple):
    """Peak of a plan and of colocated engines, requests per second."""

    plan: SimulatedThroughput
    colocated: SimulatedThroughput


def simulate_cell(cell: tuple[str, str, str]) -> SimulatedCell:
    """Simulate both for a model, a cluster and a workload."""
    model, cluster, workload = cell
    problem = ServiceProblem(model, workload, named_cluster(cluster))
    plan, colocated = _fleets(problem, is_uniform=False)
    return SimulatedCell(
        simulate_throughput(plan, workload), simulate_throughput(colocated, workload)
    )


class ChunkedOutcome(NamedTuple):
    """Simulated peaks of colocated engines, requests per second."""

    whole: float
    """Whole prompts before decodes, at the optimum of the estimate."""
    chunked: float
    """Chunks of prompts beside decodes, with the same engines."""
    best_whole: float
    """The best of the optima for each of STAGE_LIMITS."""
    best_chunked: float


def compare_chunking(workload: str) -> ChunkedOutcome:
    """Simulate colocated engines of setting 1 with and without chunked prefill."""
    problem = ServiceProblem(LLAMA, workload, named_cluster("het1"))
    planner = make_planner(problem)
    peaks: dict[str, list[float]] = {"vllm": [], "sarathi": []}
    for limit in STAGE_LIMITS:
        replicas = best_colocated(planner, limit).replicas
        for policy, known in peaks.items():
            fleet = colocated_fleet(problem, replicas, policy)
            known.append(simulate_throughput(fleet, workload).simulated)
    whole, chunked = peaks["vllm"], peaks["sarathi"]
    return ChunkedOutcome(whole[0], chunked[0], max(whole), max(chunked))


class OnlineOutcome(NamedTuple):
    """A system at a share of its peak."""

    peak: float
    """Simulated output tokens per second above its capacity."""
    served: float
    """Output tokens per second at ONLINE_SHARE of the peak."""
    latency: float
    """Mean seconds of a request at that load."""


def serve_online(system: str) -> OnlineOutcome:
    """Simulate a system of Table 3 with conversations of all lengths."""
    is_uniform = not system.startswith("hexgen")
    problem = ServiceProblem(LLAMA, ONLINE_WORKLOAD, named_cluster("hom" if is_uniform else "het1"))
    plan, colocated = _fleets(problem, is_uniform)
    fleet = plan if system in ("hexgen-2", "distserve") else colocated
    peak = simulate_throughput(fleet, ONLINE_WORKLOAD)
    rate = ONLINE_SHARE * min(peak.simulated, peak.estimate)
    served = simulate_online(fleet, ONLINE_WORKLOAD, rate, NUM_ONLINE)
    output = mean_lengths(problem.workload).output
    return OnlineOutcome(
        output * min(peak.simulated, peak.estimate), _finished_tokens(served), _mean_latency(served)
    )


class DeadlineOutcome(NamedTuple):
    """Smallest scales of deadlines by ATTAINMENT, at the same rate."""

    rate: float
    """Requests per second: ONLINE_SHARE of the colocated engines' peak."""
    plan: list[float]
    colocated: list[float]
    """Scales of the optimum of the estimate."""
    short: list[float]
    """Scales of the optimum with at most two stages per engine."""


def compare_deadlines(workload: str) -> DeadlineOutcome:
    """Return the deadlines that plan and colocated engines keep on setting 1.

    A scale of 1 is the time of the request alone on 8 x H100 with tensor parallelism.
    """
    problem = ServiceProblem(LLAMA, workload, named_cluster("het1"))
    planner = make_planner(problem)
    plan = plan_fleet(problem, planner, plan_replicas(problem, planner).best)
    colocated, short = (
        colocated_fleet(problem, best_colocated(planner, limit).replicas) for limit in STAGE_LIMITS
    )
    rate = ONLINE_SHARE * simulate_throughput(colocated, workload).simulated
    alone = _alone(workload)

    def scales(fleet: SimulatedFleet) -> list[float]:
        served = _settled(simulate_online(fleet, workload, rate, NUM_TIMED))
        ratios = [_scale(each, *alone) for each in served]
        return [percentile(ratios, percent) for percent in ATTAINMENT]

    return DeadlineOutcome(rate, scales(plan), scales(colocated), scales(short))


def _scale(served: ServedRequest, prompt_seconds: float, output_seconds: float) -> float:
    """Return a request's latency over its time alone; infinite if it has not ended."""
    alone = prompt_seconds * served.num_prompt_tokens + output_seconds * served.max_tokens
    return math.inf if served.line.e2el is None else served.line.e2el / alone


def _fleets(problem: ServiceProblem, is_uniform: bool) -> tuple[SimulatedFleet, SimulatedFleet]:
    """Return the plan, of equal replicas for each phase if asked, and the colocated optimum."""
    planner = make_planner(problem)
    plan = best_uniform(planner) if is_uniform else plan_replicas(problem, planner).best
    colocated = best_colocated(planner).replicas
    return plan_fleet(problem, planner, plan), colocated_fleet(problem, colocated)


def _alone(workload: str) -> tuple[float, float]:
    """Return the seconds per prompt token and per output token of a request alone on 8 x H100."""
    problem = ServiceProblem(LLAMA, workload, named_cluster("hom"))
    planner = make_planner(problem)
    layouts = planner.candidates(problem.cluster.all_devices, Phase.MIXED)
    stages = next(layout.stages for layout in layouts if len(layout.stages) == 1)
    costs, lengths = planner.costs, mean_lengths(problem.workload)
    prompts = costs.prompts_per_batch * lengths.prompt
    prefill, decode = costs.prefill(stages), costs.decode(stages, 1)
    return sum(prefill.stages) / prompts, sum(decode.stages) / lengths.output


def _settled(served: list[ServedRequest]) -> list[ServedRequest]:
    """Return the requests without the first third, in whose time the engines fill."""
    return served[len(served) // 3 :]


def _finished_tokens(served: list[ServedRequest]) -> float:
    """Return the output tokens per second of requests that end while settled ones arrive."""
    begin, end = _settled(served)[0].line.arrival, served[-1].line.arrival
    ended = (each for each in served if each.line.times and begin <= each.line.times[-1] < end)
    return sum(each.max_tokens for each in ended) / (end - begin)


def _mean_latency(served: list[ServedRequest]) -> float:
    return fmean(each.line.e2el for each in _settled(served) if each.line.e2el is not None)
