"""Properties of every plan of small generated clusters: resources, copies, more machines, bound."""

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from random import Random

import pytest

from gllm.commands.plan.hetero import UNMEASURED_SHARE, stop_on_interrupt
from gllm.plan.engine_checks import check_engines
from gllm.plan.hetero.bound import bound_rate
from gllm.plan.hetero.costs import (
    RooflineCosts,
    Table1Costs,
    build_pipeline,
    count_replica_kv_tokens,
)
from gllm.plan.hetero.evaluation import EvaluatedPlan, PlanEvaluator, make_partition, pair_traffic
from gllm.plan.hetero.links import LinkDirection, make_traffic
from gllm.plan.hetero.planner import HeteroPlan, make_planner, make_serving_plan, plan_replicas
from gllm.plan.hetero.replicas import Phase
from gllm.plan.hetero.search import PlanBudget
from gllm.plan.hetero.simulation import (
    build_engine_deployment,
    measure_rate,
    plan_fleet,
    simulate_throughput,
)
from gllm.plan.hetero.workload import mean_lengths
from gllm.plan.nodes import DeviceCluster, DeviceNode
from gllm.plan.problem import ServiceProblem
from gllm.plan.processes import check_configurations
from gllm.plan.serving_plan import ExpectedFigures
from gllm.sim.capacity import SearchEndedError
from gllm.sim.hardware.devices import GBIT_BYTES, NetworkLink

MODEL, MOST = "llama-2-13b", 4096
NETWORKS = tuple(NetworkLink(gbit * GBIT_BYTES, 50e-6) for gbit in (1, 25, 400))
INNER = {"A100-80G": NetworkLink(300e9, 5e-6), "L40": NetworkLink(20e9, 1e-5)}
SEEDS = range(5)


def random_cluster(rng: Random) -> DeviceCluster:
    """Return one or two machines of one or two kinds, two to four devices, with a network."""
    kinds = [(device, rng.choice((1, 2))) for device in rng.choices(sorted(INNER), k=2)]
    nodes = [
        DeviceNode(f"m{index}", device, size, INNER[device])
        for index, (device, size) in enumerate(kinds)
    ]
    return DeviceCluster(
        tuple(nodes[: 1 + (nodes[0].num_devices < 2 or rng.random() < 0.7)]), rng.choice(NETWORKS)
    )


def problem_of(cluster: DeviceCluster, workload: str = "HPHD", seed: int = 0) -> ServiceProblem:
    return ServiceProblem(MODEL, workload, cluster, seed=seed, max_request_tokens=MOST)


def plan_of(cluster: DeviceCluster, workload: str = "HPHD", seed: int = 0) -> HeteroPlan:
    return plan_replicas(problem_of(cluster, workload, seed), max_vain_restarts=0)


@cache
def case(seed: int) -> tuple[DeviceCluster, HeteroPlan]:
    rng = Random(seed)
    cluster = random_cluster(rng)
    return cluster, plan_of(cluster, rng.choice(("HPLD", "LPHD", "HPHD")))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_plan_fits_devices_memory_and_links(seed: int) -> None:
    cluster, plan = case(seed)
    best = plan.best
    groups = [group for _, group in best.partition]
    used = [sum(counts) for counts in zip(*groups, strict=True)]
    assert all(count <= node.num_devices for count, node in zip(used, cluster.nodes, strict=True))
    longest = plan.planner.costs.lengths.longest
    for replica in (*best.prefill, *best.decode):
        assert sum(stage.layers for stage in replica.stages) == plan.problem.shape.layers
        tokens = count_replica_kv_tokens(
            build_pipeline(cluster, plan.problem.shape, replica.stages)
        )
        assert tokens >= longest
        assert tokens >= replica.batch * plan.planner.costs.lengths.total
    shares: dict[LinkDirection, float] = {}
    traffic = make_traffic(plan.planner)
    for pair, sizes in pair_traffic(best.prefill, best.decode, traffic).items():
        for link, size in sizes.items():
            rate = best.flow.routes.get(pair, 0.0) * size
            shares[link] = shares.get(link, 0.0) + rate / link.bandwidth
    assert max(shares.values()) <= 1 + 1e-9
    # A link of a machine has the bandwidth of the cluster file, whatever the number of its peers.
    assert cluster.network is not None
    machine_links = {link for link in shares if link.is_of_machine}
    assert {link.bandwidth for link in machine_links} <= {cluster.network.bandwidth}
    assert len(machine_links) <= 2 * len(cluster.nodes)


@pytest.mark.parametrize("seed", SEEDS)
def test_the_plan_file_is_what_was_judged(seed: int) -> None:
    _, plan = case(seed)
    serving = make_serving_plan(plan, ExpectedFigures("gllm plan hetero", 1.0))
    fleet = plan_fleet(plan.problem, plan.planner, plan.best)
    for name, config in check_configurations(check_engines(serving)).items():
        replica, flow = plan.best.engines()[name]
        assert flow > 0
        judged = build_engine_deployment(plan.problem, replica, fleet.max_model_len).scheduler
        # The model's context, which has no flag.
        assert config.max_model_len is None
        assert judged.max_model_len == plan.problem.shape.max_context == MOST
        for field in ("preset", "policy", "max_num_seqs", "prefix_cache", "block_size"):
            assert getattr(config.scheduler, field) == getattr(judged, field)
        if replica.phase is Phase.DECODE:
            assert judged.max_num_seqs == replica.batch
    routed = sum(flow for targets in plan.best.routes().values() for flow in targets.values())
    assert routed == pytest.approx(plan.best.score.flow)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("costs", [RooflineCosts, Table1Costs])
def test_no_plan_exceeds_the_bound(seed: int, costs: type) -> None:
    _, plan = case(seed)
    name = "roofline" if costs is RooflineCosts else "table1"
    planner = make_planner(plan.problem, name)
    if costs is Table1Costs:
        plan = plan_replicas(plan.problem, planner, max_vain_restarts=0)
    assert 0 < plan.best.score.flow <= bound_rate(planner, costs) * (1 + 1e-9)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_further_machine_or_a_faster_network_is_never_worse(seed: int) -> None:
    cluster, plan = case(seed)
    flow, workload = plan.best.score.flow, plan.problem.workload
    for device in INNER:
        added = DeviceNode("added", device, 1, INNER[device])
        more = replace(cluster, nodes=(*cluster.nodes, added))
        assert plan_of(more, workload).best.score.flow >= flow * (1 - 1e-6)
    assert cluster.network is not None
    faster = NetworkLink(2 * cluster.network.bandwidth, cluster.network.latency)
    assert plan_of(replace(cluster, network=faster), workload).best.score.flow >= flow * (1 - 1e-6)


def copies_of(cluster: DeviceCluster, count: int) -> Iterator[DeviceNode]:
    for copy in range(count):
        for node in cluster.nodes:
            yield node._replace(name=f"{node.name}-{copy}")


@pytest.mark.parametrize(
    ("seed", "count"),
    [(0, 2), (1, 3), *(pytest.param(*case, marks=pytest.mark.full) for case in ((2, 4), (4, 6)))],
)
def test_copies_of_a_plan_are_a_plan(seed: int, count: int) -> None:
    cluster, plan = case(seed)
    copied = replace(cluster, nodes=tuple(copies_of(cluster, count)))
    flow = plan_of(copied, plan.problem.workload).best.score.flow
    assert flow >= count * plan.best.score.flow * (1 - 1e-6)


def test_seeds_repeat_a_plan() -> None:
    cluster = random_cluster(Random(11))
    first, second = (plan_of(cluster, seed=5) for _ in range(2))
    assert first.best == second.best
    assert first.search.num_evaluations == second.search.num_evaluations


def one_gpu_machines(count: int) -> DeviceCluster:
    nodes = [DeviceNode(f"m{index}", "A100-80G", 1, INNER["A100-80G"]) for index in range(count)]
    return DeviceCluster(tuple(nodes), NETWORKS[2])


@pytest.mark.parametrize("count", [33, pytest.param(200, marks=pytest.mark.full)])
def test_machines_of_one_device_are_planned_beyond_the_number_of_layers(count: int) -> None:
    cluster = one_gpu_machines(count)
    plan = plan_replicas(problem_of(cluster), max_vain_restarts=0, budget=PlanBudget(None, 300))
    bound = bound_rate(plan.planner, RooflineCosts)
    assert bound >= plan.best.score.flow >= 0.8 * bound
    assert plan.num_parts > 3


def test_a_budget_ends_the_search_in_time_and_says_so() -> None:
    ticks = iter(range(10**6))
    budget = PlanBudget(400.0, clock=lambda: float(next(ticks)))
    flows: list[float] = []
    plan = plan_replicas(
        problem_of(one_gpu_machines(6)),
        budget=budget,
        on_better=lambda better: flows.append(better.score.flow),
    )
    assert plan.search.ending == "the budget of 400 s is spent"
    assert budget.elapsed_seconds <= 440
    assert flows == sorted(flows)
    assert plan.best.score.flow == flows[-1]


def test_ctrl_c_leaves_the_best_plan() -> None:
    budget, before = PlanBudget(), signal.getsignal(signal.SIGINT)
    flows: list[float] = []

    def interrupt(better: EvaluatedPlan) -> None:
        flows.append(better.score.flow)
        if len(flows) == 1:
            os.kill(os.getpid(), signal.SIGINT)

    with stop_on_interrupt(budget):
        plan = plan_replicas(problem_of(one_gpu_machines(4)), budget=budget, on_better=interrupt)
    assert plan.search.ending == "interrupted"
    assert plan.best.score.flow == max(flows) > 0
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(SearchEndedError, match="interrupted"):
        budget.check()


def test_requests_are_cut_before_lengths_are_averaged() -> None:
    whole, cut = mean_lengths("HPHD"), mean_lengths("HPHD", 2048)
    assert cut.longest == 2048 < whole.longest
    assert cut.prompt < whole.prompt


def test_simulated_transfers_of_several_engines_share_the_link_of_a_machine() -> None:
    nodes = tuple(DeviceNode(name, "A100-80G", 2, INNER["A100-80G"]) for name in "ab")
    cluster = DeviceCluster(nodes, NETWORKS[0])
    problem = problem_of(cluster, "HPLD")
    planner = make_planner(problem)
    groups = [(Phase.PREFILL, (1, 0)), (Phase.DECODE, (0, 1))]
    plan = PlanEvaluator(planner).evaluate(make_partition(2 * groups))
    # The way out of the first machine limits the flow: each engine alone would serve more.
    assert plan.flow.links[LinkDirection(0, True, NETWORKS[0].bandwidth)] == pytest.approx(1)
    assert plan.score.flow < 0.2 * plan.score.scarce
    routes = {(p, d): plan.score.flow / 4 for p in range(2) for d in range(2)}
    balanced = plan._replace(flow=plan.flow._replace(routes=routes))
    fleet = plan_fleet(problem, planner, balanced)
    run = simulate_throughput(fleet, problem.workload, most=MOST)
    assert abs(run.error) <= 0.05


@pytest.mark.full
@pytest.mark.parametrize("seed", [1, 3])
def test_no_queue_grows_at_the_rate_that_a_plan_promises(seed: int) -> None:
    """In a longer run of another seed than the plan's, with Poisson arrivals."""
    _, plan = case(seed)
    fleet = plan_fleet(plan.problem, plan.planner, plan.best, seed=7)
    flow = plan.best.score.flow
    stable = measure_rate(fleet, plan.problem, flow, 7, 600)
    assert stable is not None
    assert stable.num_requests >= 600
    assert stable.rate >= UNMEASURED_SHARE * flow * (1 - 1e-9)
