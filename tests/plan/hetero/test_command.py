"""`gllm plan hetero`: its output, its file, its simulation and its errors."""

from collections.abc import Iterable, Sequence
from itertools import product
from pathlib import Path
from statistics import fmean

import pytest

from experiments.hexgen2_baselines import best_colocated, best_uniform
from experiments.hexgen2_fleets import colocated_fleet, simulate_online
from gllm.commands.plan.command import main
from gllm.commands.up import main as up
from gllm.plan.flags import ROUTER_CONFIGS, render_flags
from gllm.plan.hetero.cluster import build_cluster, named_cluster, read_cluster
from gllm.plan.hetero.evaluation import PlanEvaluator, make_partition
from gllm.plan.hetero.planner import PlanProblem, plan_replicas
from gllm.plan.hetero.replicas import Phase
from gllm.plan.hetero.simulation import plan_fleet, simulate_plan, simulate_throughput
from gllm.plan.hetero.workload import CLASSES, mean_lengths, sample_workload
from gllm.plan.serving_plan import read_plan
from tests.support.sim.hetero_oracle import all_partitions

FILE = """
links: {fast: {gbit: 2400, us: 5}, slow: {gbit: 25, us: 50}}
machines:
  a: {device: H100, count: 2, link: fast}
  b: {device: A100-80G, count: 2, link: fast}
network: slow
between: {a-b: fast}
"""


def test_plan_is_shown_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.yaml"
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(FILE)
    flags = ["--model", "opt-30b", "--workload", "HPHD", "--output", str(path)]
    assert main(["hetero", "--cluster", str(cluster), *flags]) == 0
    text = capsys.readouterr().out
    assert "2 H100 + 2 A100-80G" in text
    assert "[p0.0]" in text
    plan = read_plan(path)
    assert {engine.role for engine in plan.engines.values()} == {"prefill", "decode"}
    assert sum(engine.num_devices for engine in plan.engines.values()) <= 4
    assert plan.router is not None
    assert plan.router.preset == "flow"
    arguments = render_flags(ROUTER_CONFIGS, plan.router.flags, "router.flags")
    assert any(source in arguments[-1] for source in plan.routes)
    assert plan.expected is not None
    assert plan.expected.by.startswith("gllm plan hetero --cluster")
    assert read_cluster(cluster).link(0, 1).latency == pytest.approx(5e-6)


def test_plan_of_machines_with_hosts_is_served_without_edits(tmp_path: Path) -> None:
    cluster, path, folder = (tmp_path / name for name in ("cluster.yaml", "plan.yaml", "compose"))
    text = FILE.replace("count: 2,", "count: 2, host: 10.0.0.1,", 1)
    cluster.write_text(text.replace("count: 2, link", "count: 2, host: 10.0.0.2, link", 1))
    flags = ["--cluster", str(cluster), "--model", "opt-30b", "--workload", "HPHD"]
    names = ["--checkpoint", "facebook/opt-30b", "--output", str(path)]
    assert main(["hetero", *flags, *names]) == 0
    plan = read_plan(path)
    assert [node.host for node in plan.nodes.values()] == ["10.0.0.1", "10.0.0.2"]
    assert up([str(path), "--emit", "compose", str(folder)]) == 0
    emitted = "".join(file.read_text() for file in folder.iterdir())
    assert "--model=facebook/opt-30b" in emitted
    secret = ["--node-secret-file", str(cluster)]
    for node in plan.nodes:
        assert up([str(path), "--node", node, "--dry-run", *secret]) == 0


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (["--model", "deepseek-v3", "--cluster", "hom4"], "memory: the weights of deepseek-v3 are"),
        (["--model", "llama-2-70b", "--cluster", "case-e2"], "no file and none of hom"),
        (["--model", "gpt", "--cluster", "hom"], "model 'gpt' is none of"),
    ],
)
def test_errors_name_the_constraint(
    flags: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["hetero", *flags, "--workload", "HPHD"]) == 2
    assert error in capsys.readouterr().err


@pytest.mark.parametrize(
    ("old", "new", "error"),
    [
        ("device: H100", "device: X", "machines.a.device"),
        ("count: 2", "count: 0", "machines.a.count: 0"),
        ("network: slow", "network: lan", "network 'lan' is none of fast, slow"),
        ("a-b: fast", "a-c: fast", "between 'a-c' is none of a-b, b-a"),
        ("gbit: 25,", "gbit: 0,", "links.slow: gbit must be above 0"),
    ],
)
def test_a_cluster_file_is_checked(tmp_path: Path, old: str, new: str, error: str) -> None:
    path = tmp_path / "cluster.yaml"
    path.write_text(FILE.replace(old, new, 1))
    with pytest.raises(ValueError, match=error):
        read_cluster(path)


SETTINGS = ("het1", "het2", "het3", "het4")


@pytest.mark.parametrize(
    ("cluster", "model", "workload"),
    [
        pytest.param("case-e", "opt-30b", "HPHD", marks=pytest.mark.full),
        # Its pipeline of prefill has 56,000 tokens of KV cache, prompts of up to 8,000 tokens.
        ("het2", "llama-2-70b", "HPLD"),
        *(
            pytest.param(cluster, "llama-2-70b", workload, marks=pytest.mark.long)
            for cluster in SETTINGS
            for workload in CLASSES
            if (cluster, workload) != ("het2", "HPLD")
        ),
    ],
)
def test_simulated_throughput_is_near_the_flow(cluster: str, model: str, workload: str) -> None:
    plan = plan_replicas(PlanProblem(named_cluster(cluster), model, workload))
    assert abs(simulate_plan(plan).error) <= 0.15


def test_sample_of_a_class_has_its_lengths_all_the_time() -> None:
    mean = mean_lengths("HPLD").prompt
    sample = sample_workload("HPLD", 400, 3)
    assert sorted(sample) != sample
    assert fmean(prompt for prompt, _ in sample) == pytest.approx(mean, rel=0.01)
    for half in (sample[:200], sample[200:]):
        assert fmean(prompt for prompt, _ in half) == pytest.approx(mean, rel=0.1)
    assert sample == sample_workload("HPLD", 400, 3)


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
    """In at least 75 % of the cells (H10)."""
    wins = []
    for cluster, workload in product(clusters, workloads):
        plan = plan_replicas(PlanProblem(named_cluster(cluster), "llama-2-70b", workload))
        wins.append(plan.best.score.flow >= best_colocated(plan.planner).capacity)
    assert sum(wins) / len(wins) >= 0.75


def test_equal_replicas_are_among_the_plans() -> None:
    problem = PlanProblem(named_cluster("hom4"), "opt-30b", "LPHD")
    planner = problem.make_planner()
    uniform, best = best_uniform(planner), plan_replicas(problem, planner).best
    assert 0 < uniform.score.flow <= best.score.flow * (1 + 1e-9)
    groups = {phase: {group for p, group in uniform.partition if p is phase} for phase in Phase}
    assert all(len(each) <= 1 for each in groups.values())


@pytest.mark.parametrize("num_devices", [2, 3, 5])
def test_equal_replicas_are_the_best_of_all(num_devices: int) -> None:
    cluster = build_cluster({"h100": num_devices})
    planner = PlanProblem(cluster, "llama-2-13b", "HPLD").make_planner()
    evaluator = PlanEvaluator(planner)
    flows = [
        evaluator.evaluate(partition).score.flow
        for partition in all_partitions(cluster.all_devices)
        if all(len({group for p, group in partition if p is phase}) <= 1 for phase in Phase)
    ]
    assert best_uniform(planner).score.flow == pytest.approx(max(flows)) != 0


def test_colocated_division_is_the_best_of_all() -> None:
    problem = PlanProblem(named_cluster("hom4"), "opt-30b", "HPHD")
    planner = problem.make_planner()
    plan = best_colocated(planner)
    totals = [0.0]
    for sizes in ((4,), (3, 1), (2, 2), (2, 1, 1), (1, 1, 1, 1)):
        partition = make_partition([(Phase.MIXED, (size,)) for size in sizes])
        replicas = [planner.best(group, Phase.MIXED) for _, group in partition]
        totals.append(sum(each.capacity for each in replicas if each))
    assert plan.capacity == pytest.approx(max(totals))


def test_colocated_engines_without_stages_serve_their_estimate() -> None:
    problem = PlanProblem(named_cluster("hom4"), "opt-30b", "HPLD")
    planner = problem.make_planner()
    plan = best_colocated(planner, max_stages=1)
    assert all(len(each.stages) == 1 for each in plan.replicas)
    assert plan.capacity <= best_colocated(planner).capacity * (1 + 1e-9)
    run = simulate_throughput(colocated_fleet(problem, plan.replicas), problem.workload)
    # Batches fill before any request decodes; the window begins after that.
    assert abs(run.error) <= 0.1


def test_online_load_is_served_at_its_rate() -> None:
    problem = PlanProblem(named_cluster("case-e"), "opt-30b", "HPHD")
    plan = plan_replicas(problem)
    fleet = plan_fleet(problem, plan.planner, plan.best)
    served = simulate_online(fleet, problem.workload, 0.5 * fleet.estimate, 300)
    assert len(served) == 300
    assert all(each.line.num_tokens == each.max_tokens for each in served)
    span = served[-1].line.arrival - served[0].line.arrival
    assert 300 / span == pytest.approx(0.5 * fleet.estimate, rel=0.15)
