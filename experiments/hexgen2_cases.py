"""Plans of HexGen-2's settings, and searches that are compared."""

import time
from typing import NamedTuple

from experiments.hexgen2_baselines import best_colocated, best_uniform
from experiments.hexgen2_genetic import GeneticSearch
from gllm.plan.hetero.cluster import build_cluster, named_cluster
from gllm.plan.hetero.evaluation import PlanEvaluator
from gllm.plan.hetero.moves import guided_changes, random_changes, random_exchanges
from gllm.plan.hetero.partition import count_groups, first_partition
from gllm.plan.hetero.planner import PlanProblem, plan_replicas
from gllm.plan.hetero.replicas import PipelineCredit
from gllm.plan.hetero.search import LocalSearch, RefinementBudget, SearchResult

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


def measure_cell(cell: Cell) -> CellOutcome:
    """Plan a cell and its baselines."""
    model, name, workload, factor = cell
    cluster = named_cluster(name).scale_bandwidth(factor)
    problem = PlanProblem(cluster, model, workload)
    planner = problem.make_planner()
    plan = plan_replicas(problem, planner)
    uniform = best_uniform(planner).score.flow if len(cluster.machines) == 1 else 0.0
    colocated = best_colocated(planner).capacity
    return CellOutcome(
        plan.best.score.flow, colocated, uniform, problem.lengths.output, cluster.price()
    )


def measure_rule(case: tuple[str, PipelineCredit, str]) -> float:
    """Return the gain of the plan over the colocated optimum on setting 1.

    Args:
        case: Costs, rule of the capacities and workload.
    """
    costs, credit, workload = case
    problem = PlanProblem(named_cluster("het1"), SEARCHED_MODEL, workload, costs, credit)
    planner = problem.make_planner()
    flow = plan_replicas(problem, planner).best.score.flow
    return flow / best_colocated(planner).capacity - 1


def compare_searches(num_seeds: int) -> dict[str, list[SearchResult]]:
    """Return the results of each search for each seed, after as many partitions."""
    problem = PlanProblem(named_cluster(SEARCHED_SETTING), SEARCHED_MODEL, SEARCHED_WORKLOAD)
    planner = problem.make_planner()
    num_groups = count_groups(problem.cluster, problem.shape, problem.lengths)
    first = first_partition(planner, num_groups)
    most = CHECKPOINTS[-1]
    orders = {
        "guided": (guided_changes, random_changes),
        "same changes, random order": (random_changes, random_changes),
        "random swaps, moves, flips": (random_exchanges, random_exchanges),
    }
    results = {
        name: [
            LocalSearch(
                PlanEvaluator(planner), RefinementBudget(most, kicks=most), seed, *changes
            ).run(first)
            for seed in range(num_seeds)
        ]
        for name, changes in orders.items()
    }
    results["genetic"] = [
        GeneticSearch(PlanEvaluator(planner), RefinementBudget(most), seed).run(first)
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
    problem = PlanProblem(
        build_cluster(counts),
        SEARCHED_MODEL,
        SEARCHED_WORKLOAD,
        budget=RefinementBudget(100_000, kicks=0),
    )
    begin = time.process_time()
    search = plan_replicas(problem).search
    return ScaleOutcome(
        num_devices,
        time.process_time() - begin,
        search.num_evaluations,
        search.num_flows,
        search.best.score.flow,
    )
