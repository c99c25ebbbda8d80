"""The search against exhaustive search, its monotony, and its rivals (H3, H5, H6, H7)."""

import time
from itertools import combinations
from random import Random

import pytest

from experiments.hexgen2_cases import random_exchanges
from experiments.hexgen2_genetic import GeneticSearch
from gllm.plan.hetero.costs import RooflineCosts, Table1Costs
from gllm.plan.hetero.evaluation import PlanEvaluator, make_partition
from gllm.plan.hetero.partition import (
    MAX_BRUTE_FORCE,
    choose_phases,
    divide_devices,
    first_partition,
)
from gllm.plan.hetero.planner import plan_replicas
from gllm.plan.hetero.replicas import Phase, PipelineCapacityRule, ReplicaPlanner
from gllm.plan.hetero.search import (
    MAX_VAIN_RESTARTS,
    Changes,
    LocalSearch,
    NeighbourFinder,
    PlanBudget,
    SearchResult,
    guided_changes,
    random_changes,
)
from gllm.plan.hetero.workload import mean_lengths
from gllm.plan.nodes import Group, build_cluster, named_cluster
from gllm.plan.problem import ServiceProblem
from gllm.sim.hardware.shapes import MODELS
from tests.support.full_cases import full_but
from tests.support.sim.hetero_oracle import all_partitions, best_flow

FIXTURES = [
    ({"h100": 4, "a100": 4}, "opt-30b", "HPHD"),
    ({"h100": 4, "a100": 4}, "llama-2-70b", "HPHD"),
    ({"h100": 2, "a100": 2, "l40": 4}, "opt-30b", "LPHD"),
    ({"a100": 4, "a6000": 4}, "opt-30b", "HPLD"),
    ({"h100": 2, "l40": 6}, "llama-2-70b", "HPHD"),
    ({"h100": 8}, "llama-2-13b", "LPLD"),
    ({"h100": 1, "a100": 3, "a6000": 4}, "llama-2-13b", "LPLD"),
    ({"l40": 4, "a6000": 4}, "opt-30b", "LPHD"),
]
QUICK_FIXTURES = (FIXTURES[0], FIXTURES[3], FIXTURES[5])


def make_planner(
    cluster, model, workload, costs=RooflineCosts, rule=PipelineCapacityRule.PIPELINED
):
    shape, lengths = MODELS[model], mean_lengths(workload)
    return ReplicaPlanner(cluster, shape, costs(cluster, shape, lengths), rule)


def search(
    planner, model: str, workload: str, budget=None, max_vain_restarts: int = MAX_VAIN_RESTARTS
) -> SearchResult:
    first = first_partition(planner)
    local = LocalSearch(
        PlanEvaluator(planner), budget or PlanBudget(), max_vain_restarts=max_vain_restarts
    )
    return local.run(first)


@pytest.mark.parametrize(("counts", "model", "workload"), full_but(QUICK_FIXTURES, FIXTURES))
@pytest.mark.parametrize("rule", [PipelineCapacityRule.PIPELINED, PipelineCapacityRule.CREDITED])
def test_flow_is_near_the_best_of_all_partitions(counts, model, workload, rule) -> None:
    cluster = build_cluster(counts)
    costs = RooflineCosts if rule is PipelineCapacityRule.PIPELINED else Table1Costs
    planner = make_planner(cluster, model, workload, costs, rule)
    best = best_flow(PlanEvaluator(planner), cluster.all_devices)
    result = search(planner, model, workload)
    ratio = result.best.score.flow / best
    assert ratio >= 0.95
    if counts == {"h100": 4, "a100": 4}:
        assert ratio == pytest.approx(1)


def test_oracle_sees_every_partition_once() -> None:
    # Two devices of one machine: both apart or together, each group of either phase.
    assert len(list(all_partitions((2,)))) == 5
    partitions = list(all_partitions((2, 2)))
    assert len(partitions) == len(set(partitions))
    # Whatever a change makes is among them.
    for partition in partitions:
        for other in NeighbourFinder(partition).all_changes():
            assert other in partitions


@pytest.mark.parametrize("cluster", ["case-e", "het1", "het4"])
def test_decode_gets_more_devices_for_long_outputs(cluster: str) -> None:
    model = "opt-30b" if cluster == "case-e" else "llama-2-70b"
    planner = make_planner(named_cluster(cluster), model, "LPHD")
    result = search(planner, model, "LPHD", max_vain_restarts=0)

    def num_decode_devices(partition) -> int:
        return sum(sum(group) for phase, group in partition if phase is Phase.DECODE)

    first, best = result.first.partition, result.best.partition
    assert num_decode_devices(best) >= num_decode_devices(first) + 1
    flows = [step.flow for step in result.steps]
    assert flows == sorted(flows)
    assert result.best.score.flow == flows[-1] > flows[0]


def rival_flows(planner, seed: int, budget: int, model: str, workload: str) -> dict[str, float]:
    """Return the flow of each search after as many evaluations."""
    first = first_partition(planner)

    def limits() -> PlanBudget:
        return PlanBudget(max_evaluations=budget)

    def local(first: Changes = guided_changes, later: Changes = random_changes) -> LocalSearch:
        return LocalSearch(PlanEvaluator(planner), limits(), seed, first, later, budget)

    searches: dict[str, LocalSearch | GeneticSearch] = {
        "guided": local(),
        "swaps": local(random_exchanges, random_exchanges),
        "genes": GeneticSearch(PlanEvaluator(planner), limits(), seed),
    }
    results = {name: each.run(first) for name, each in searches.items()}
    assert all(each.num_evaluations <= budget for each in results.values())
    return {name: each.best.score.flow for name, each in results.items()}


@pytest.mark.full
@pytest.mark.parametrize("budget", [75, pytest.param(1200, marks=pytest.mark.long)])
def test_guided_search_is_no_worse_in_most_seeds(budget: int) -> None:
    model, workload = "llama-2-70b", "HPHD"
    planner = make_planner(named_cluster("het1"), model, workload)
    flows = [rival_flows(planner, seed, budget, model, workload) for seed in range(15)]
    for rival in ("swaps", "genes"):
        num_wins = sum(each["guided"] >= each[rival] * (1 - 1e-9) for each in flows)
        assert num_wins >= 0.8 * len(flows), rival


@pytest.mark.parametrize("changes", [guided_changes, random_changes])
def test_changes_are_every_neighbour_once(changes) -> None:
    planner = make_planner(named_cluster("case-e"), "opt-30b", "HPHD")
    plan = PlanEvaluator(planner).evaluate(first_partition(planner))
    neighbours = list(changes(plan, Random(0)))
    assert len(neighbours) == len(set(neighbours))
    expected = set(NeighbourFinder(plan.partition).all_changes()) - {plan.partition}
    assert set(neighbours) - {plan.partition} == expected


def test_devices_with_fast_links_form_groups_of_similar_memory() -> None:
    groups = divide_devices(build_cluster({"h100": 4, "a100": 4}), 4)
    assert sorted(groups) == [(0, 2), (0, 2), (2, 0), (2, 0)]
    assert make_partition([(Phase.DECODE, (0, 0)), (Phase.PREFILL, (1, 0))]) == (
        (Phase.PREFILL, (1, 0)),
    )


def test_phases_of_many_groups_have_much_bandwidth_between_them() -> None:
    """No change of one group's phase raises it; all divisions would be too many to compare."""
    cluster = build_cluster({"h100": 8, "l40": MAX_BRUTE_FORCE - 6})
    planner = make_planner(cluster, "llama-2-13b", "HPHD")
    groups: list[Group] = [(1, 0) if index < 8 else (0, 1) for index in range(MAX_BRUTE_FORCE + 2)]
    phases = choose_phases(planner, groups)
    assert len(phases) == len(groups) > MAX_BRUTE_FORCE
    assert set(phases) == {Phase.PREFILL, Phase.DECODE}

    def bandwidth(flipped: int = -1) -> float:
        sides = [(phase is Phase.PREFILL) != (i == flipped) for i, phase in enumerate(phases)]
        machines = [group.index(1) for group in groups]
        return sum(
            cluster.link(machines[i], machines[j]).bandwidth
            for i, j in combinations(range(len(groups)), 2)
            if sides[i] != sides[j]
        )

    assert all(bandwidth(index) <= bandwidth() * (1 + 1e-9) for index in range(len(groups)))


def test_budget_ends_the_search_and_is_reported() -> None:
    planner = make_planner(named_cluster("het1"), "llama-2-70b", "HPHD")
    short = search(planner, "llama-2-70b", "HPHD", PlanBudget(max_evaluations=40))
    assert not short.is_complete
    assert short.num_evaluations == 40
    ticks = iter(range(1000))
    late = search(planner, "llama-2-70b", "HPHD", PlanBudget(20, clock=lambda: next(ticks)))
    assert not late.is_complete
    assert late.num_evaluations <= 21


def test_a_partition_is_expected_to_take_as_long_as_the_slowest_one() -> None:
    now = 0.0
    budget = PlanBudget(10.0, clock=lambda: now)
    part = budget.part(1.0)
    now = 4.0
    part.end_evaluation()
    assert not budget.refusal()
    now = 6.1
    assert budget.refusal() == part.refusal() == "the budget of 10 s is spent"


SETTING_1 = {"h100": 2, "a100": 6, "l40": 4, "a6000": 8}
DEVICES_64 = {"h100": 6, "a100": 18, "l40": 14, "a6000": 26}


@pytest.mark.parametrize(
    ("counts", "num_evaluations", "num_flows"),
    [
        (SETTING_1, 6000, 60),
        pytest.param(DEVICES_64, 40_000, 400, marks=pytest.mark.long),
    ],
)
def test_large_clusters_need_few_evaluations(
    counts: dict[str, int], num_evaluations: int, num_flows: int
) -> None:
    planner = make_planner(build_cluster(counts), "llama-2-70b", "HPHD")
    result = search(planner, "llama-2-70b", "HPHD", max_vain_restarts=0)
    assert result.is_complete
    assert result.num_evaluations < num_evaluations
    assert result.num_flows < num_flows


@pytest.mark.full
def test_whole_search_ends_before_its_budget() -> None:
    planner = make_planner(build_cluster(SETTING_1), "llama-2-70b", "HPHD")
    result = search(planner, "llama-2-70b", "HPHD")
    assert result.is_complete
    assert result.num_restarts >= MAX_VAIN_RESTARTS
    # Most partitions are refused by their bound, without a maximum flow.
    assert result.num_flows < 0.1 * result.num_evaluations


@pytest.mark.long
@pytest.mark.parametrize(("counts", "cpu_seconds"), [(SETTING_1, 120), (DEVICES_64, 600)])
def test_plan_is_found_in_time_on_one_core(counts: dict[str, int], cpu_seconds: float) -> None:
    begin = time.process_time()
    plan = plan_replicas(ServiceProblem("llama-2-70b", "HPHD", build_cluster(counts)))
    assert time.process_time() - begin <= cpu_seconds
    assert plan.best.score.flow > plan.search.first.score.flow
