"""Baselines of HexGen-2: equal replicas, replicas of both phases, and their simulated fleets."""

from collections.abc import Iterable, Sequence
from itertools import product

import pytest

from experiments.hexgen2_baselines import best_colocated, best_uniform
from experiments.hexgen2_fleets import colocated_fleet, simulate_online
from gllm.plan.hetero.evaluation import PlanEvaluator, make_partition
from gllm.plan.hetero.planner import make_planner, plan_replicas
from gllm.plan.hetero.replicas import Phase
from gllm.plan.hetero.simulation import plan_fleet, simulate_throughput
from gllm.plan.hetero.workload import CLASSES
from gllm.plan.nodes import build_cluster, named_cluster
from gllm.plan.problem import ServiceProblem
from tests.support.sim.hetero_oracle import all_partitions


@pytest.mark.full
@pytest.mark.parametrize(
    ("clusters", "workloads"),
    [
        (("het1", "het4"), ("HPLD", "LPHD")),
        pytest.param(("het1", "het2", "het3", "het4"), CLASSES, marks=pytest.mark.long),
    ],
)
def test_unlike_devices_serve_more_apart_than_together(
    clusters: Sequence[str], workloads: Iterable[str]
) -> None:
    """In half of the cells at least; the paper says more.

    Long prompts with short outputs lose: all of a machine's KV caches share its link.
    """
    wins = []
    for cluster, workload in product(clusters, workloads):
        plan = plan_replicas(ServiceProblem("llama-2-70b", workload, named_cluster(cluster)))
        wins.append(plan.best.score.flow >= best_colocated(plan.planner).capacity)
    assert sum(wins) / len(wins) >= 0.5


def test_equal_replicas_are_among_the_plans() -> None:
    problem = ServiceProblem("opt-30b", "LPHD", named_cluster("hom4"))
    planner = make_planner(problem)
    uniform, best = best_uniform(planner), plan_replicas(problem, planner).best
    assert 0 < uniform.score.flow <= best.score.flow * (1 + 1e-9)
    groups = {phase: {group for p, group in uniform.partition if p is phase} for phase in Phase}
    assert all(len(each) <= 1 for each in groups.values())


@pytest.mark.parametrize("num_devices", [2, 3, 5])
def test_equal_replicas_are_the_best_of_all(num_devices: int) -> None:
    cluster = build_cluster({"h100": num_devices})
    planner = make_planner(ServiceProblem("llama-2-13b", "HPLD", cluster))
    evaluator = PlanEvaluator(planner)
    flows = [
        evaluator.evaluate(partition).score.flow
        for partition in all_partitions(cluster.all_devices)
        if all(len({group for p, group in partition if p is phase}) <= 1 for phase in Phase)
    ]
    assert best_uniform(planner).score.flow == pytest.approx(max(flows)) != 0


def test_colocated_division_is_the_best_of_all() -> None:
    problem = ServiceProblem("opt-30b", "HPHD", named_cluster("hom4"))
    planner = make_planner(problem)
    plan = best_colocated(planner)
    totals = [0.0]
    for sizes in ((4,), (3, 1), (2, 2), (2, 1, 1), (1, 1, 1, 1)):
        partition = make_partition([(Phase.MIXED, (size,)) for size in sizes])
        replicas = [planner.best(group, Phase.MIXED) for _, group in partition]
        totals.append(sum(each.capacity for each in replicas if each))
    assert plan.capacity == pytest.approx(max(totals))


def test_colocated_engines_without_stages_serve_their_estimate() -> None:
    problem = ServiceProblem("opt-30b", "HPLD", named_cluster("hom4"))
    planner = make_planner(problem)
    plan = best_colocated(planner, max_stages=1)
    assert all(len(each.stages) == 1 for each in plan.replicas)
    assert plan.capacity <= best_colocated(planner).capacity * (1 + 1e-9)
    run = simulate_throughput(colocated_fleet(problem, plan.replicas), problem.workload)
    # Batches fill before any request decodes; the window begins after that.
    assert abs(run.error) <= 0.1


def test_online_load_is_served_at_its_rate() -> None:
    problem = ServiceProblem("opt-30b", "HPHD", named_cluster("case-e"))
    plan = plan_replicas(problem)
    fleet = plan_fleet(problem, plan.planner, plan.best)
    served = simulate_online(fleet, problem.workload, 0.5 * fleet.estimate, 300)
    assert len(served) == 300
    assert all(each.line.num_tokens == each.max_tokens for each in served)
    span = served[-1].line.arrival - served[0].line.arrival
    assert 300 / span == pytest.approx(0.5 * fleet.estimate, rel=0.15)
