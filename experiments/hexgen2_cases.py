"""Plans of HexGen-2's settings, and searches that are compared."""

import time
from collections.abc import Iterator
from dataclasses import replace
from random import Random
from typing import NamedTuple

from experiments.hexgen2_baselines import best_colocated, best_uniform
from experiments.hexgen2_genetic import GeneticSearch
from gllm.plan.hetero.evaluation import EvaluatedPlan, Partition, PlanEvaluator
from gllm.plan.hetero.partition import first_partition
from gllm.plan.hetero.planner import make_planner, plan_replicas
from gllm.plan.hetero.replicas import PipelineCapacityRule
from gllm.plan.hetero.search import (
    LocalSearch,
    NeighbourFinder,
    PlanBudget,
    SearchResult,
    guided_changes,
    random_changes,
)
from gllm.plan.hetero.workload import mean_lengths
from gllm.plan.nodes import DeviceCluster, build_cluster, named_cluster
from gllm.plan.prices import PRICE_TABLES
from gllm.plan.problem import ServiceProblem
from gllm.sim.hardware.devices import NetworkLink

LLAMA, OPT = "llama-2-70b", "opt-30b"
SETTINGS = ("het1", "het2", "het3", "het4")
SEARCHED_SETTING, SEARCHED_MODEL, SEARCHED_WORKLOAD = "het1", LLAMA, "HPHD"
SHARES = {"h100": 0.1, "a100": 0.3, "l40": 0.2}
"""Shares of setting 1's devices; the others are A6000."""
CHECKPOINTS = (75, 300, 1200)
"""Numbers of compared partitions at which searches are compared."""
Cell = tuple[str, str, str, float]
"""Model, cluster, workload and the factor of all bandwidths."""


class CellOutcome(NamedTuple):
    """Requests per second of a plan and its rivals on one cluster."""

    flow: float
    colocated: float
    uniform: float
    """Equal replicas of each phase; 0 on several machines."""
    output: float
    """Mean output tokens of a request."""
    price: float
    """US dollars per hour."""


def scale_bandwidth(cluster: DeviceCluster, factor: float) -> DeviceCluster:
    """Return a shipped cluster with the bandwidth of every link multiplied by a factor."""

    def scale(link: NetworkLink | None) -> NetworkLink | None:
        return link and replace(link, bandwidth=link.bandwidth * factor)

    nodes = tuple(node._replace(inner_link=scale(node.inner_link)) for node in cluster.nodes)
    return DeviceCluster(nodes, scale(cluster.network))


def fleet_price(cluster: DeviceCluster) -> float:
    """Return the US dollars per hour of all devices of a cluster, by the paper's prices."""
    prices = PRICE_TABLES["hexgen-2"]
    return sum(node.num_devices * prices[node.device] for node in cluster.nodes)


def random_exchanges(plan: EvaluatedPlan, rng: Random) -> Iterator[Partition]:
    """Yield swaps, moves and flips in random order: the ablation of HexGen-2 (section 5.4)."""
    partitions = list(dict.fromkeys(NeighbourFinder(plan.partition).exchanges()))
    rng.shuffle(partitions)
    yield from partitions


def measure_cell(cell: Cell) -> CellOutcome:
    """Plan a cell and its baselines."""
    model, name, workload, factor = cell
    cluster = scale_bandwidth(named_cluster(name), factor)
    problem = ServiceProblem(model, workload, cluster)
    planner = make_planner(problem)
    plan = plan_replicas(problem, planner)
    uniform = best_uniform(planner).score.flow if len(cluster.nodes) == 1 else 0.0
    colocated = best_colocated(planner).capacity
    output = mean_lengths(workload).output
    return CellOutcome(plan.best.score.flow, colocated, uniform, output, fleet_price(cluster))


def measure_rule(case: tuple[str, PipelineCapacityRule, str]) -> float:
    """Return the gain of the plan over the colocated optimum on setting 1.

    Args:
        case: Costs, rule of the capacities and workload.
    """
    costs, credit, workload = case
    problem = ServiceProblem(SEARCHED_MODEL, workload, named_cluster("het1"))
    planner = make_planner(problem, costs, credit)
    flow = plan_replicas(problem, planner).best.score.flow
    return flow / best_colocated(planner).capacity - 1


def compare_searches(num_seeds: int) -> dict[str, list[SearchResult]]:
    """Return the results of each search for each seed, after as many partitions."""
    problem = ServiceProblem(SEARCHED_MODEL, SEARCHED_WORKLOAD, named_cluster(SEARCHED_SETTING))
    planner = make_planner(problem)
    first = first_partition(planner)
    most = CHECKPOINTS[-1]
    orders = {
        "guided": (guided_changes, random_changes),
        "same changes, random order": (random_changes, random_changes),
        "random swaps, moves, flips": (random_exchanges, random_exchanges),
    }
    results = {
        name: [
            LocalSearch(PlanEvaluator(planner), PlanBudget(None, most), seed, *changes, most).run(
                first
            )
            for seed in range(num_seeds)
        ]
        for name, changes in orders.items()
    }
    results["genetic"] = [
        GeneticSearch(PlanEvaluator(planner), PlanBudget(None, most), seed).run(first)
        for seed in range(num_seeds)
    ]
    return results


class ScaleOutcome(NamedTuple):
    """Effort of a search without restarts."""

    num_devices: int
    cpu_seconds: float
    num_evaluations: int
    num_flows: int
    flow: float


def measure_scale(num_devices: int) -> ScaleOutcome:
    """Plan as many devices in the proportions of setting 1."""
    counts = {name: round(share * num_devices) for name, share in SHARES.items()}
    counts["a6000"] = num_devices - sum(counts.values())
    problem = ServiceProblem(SEARCHED_MODEL, SEARCHED_WORKLOAD, build_cluster(counts))
    begin = time.process_time()
    search = plan_replicas(problem, max_vain_restarts=0).search
    return ScaleOutcome(
        num_devices,
        time.process_time() - begin,
        search.num_evaluations,
        search.num_flows,
        search.best.score.flow,
    )
