"""`gllm plan hetero`: its output, its file, its simulation and its errors."""

from pathlib import Path
from statistics import fmean

import pytest

from gllm.commands.plan.command import main
from gllm.commands.up import main as up
from gllm.plan.hetero.planner import plan_replicas
from gllm.plan.hetero.simulation import simulate_plan
from gllm.plan.hetero.workload import CLASSES, mean_lengths, sample_workload
from gllm.plan.nodes import cluster_names, named_cluster, read_cluster
from gllm.plan.problem import ServiceProblem
from gllm.plan.processes import (
    ROUTER_CONFIGS,
    check_configurations,
    find_simulated_only,
    render_flags,
)
from gllm.plan.serving_plan import read_plan

FILE = """
links: {fast: {gbit: 2400, us: 5}, slow: {gbit: 25, us: 50}}
machines:
  a: {device: H100, count: 2, link: fast}
  b: {device: A100-80G, count: 2, link: fast}
network: slow
between: {a-b: fast}
"""
CUT = ("--max-request-tokens", "2048")
"""Context of OPT models."""


@pytest.mark.full
@pytest.mark.parametrize("cluster", cluster_names())
def test_engines_of_shipped_clusters_start_and_pass_blocks_on(cluster: str, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    flags = ["--model", "opt-30b", "--workload", "HPHD", *CUT, "--budget", "5"]
    assert main(["hetero", "--cluster", cluster, *flags, "--output", str(path)]) == 0
    plan = read_plan(path)
    assert not plan.simulated_only
    # As `gllm serve` reads the command line of each engine on each of its machines.
    configs = check_configurations(plan)
    assert {config.kv_transfer for config in configs.values()} == {"auto"}


def test_plan_is_shown_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.yaml"
    cluster = tmp_path / "cluster.yaml"
    cluster.write_text(FILE)
    flags = ["--model", "opt-30b", "--workload", "HPHD", *CUT, "--output", str(path)]
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
    assert plan.simulated_only == find_simulated_only(plan) == ""
    assert read_cluster(cluster).link(0, 1).latency == pytest.approx(5e-6)
    assert "requests of HPHD are cut to 2048 tokens" in text
    assert "; this plan has " in text
    assert "| b       | 2.4e+03" in text or "| b       | -" in text
    first = text.splitlines()[0]
    assert " s  " in first
    assert "requests/s with 1 prefill and" in first


def test_plan_of_machines_with_hosts_is_served_without_edits(tmp_path: Path) -> None:
    cluster, path, folder = (tmp_path / name for name in ("cluster.yaml", "plan.yaml", "compose"))
    text = FILE.replace("count: 2,", "count: 2, host: 10.0.0.1,", 1)
    cluster.write_text(text.replace("count: 2, link", "count: 2, host: 10.0.0.2, link", 1))
    flags = ["--cluster", str(cluster), "--model", "opt-30b", "--workload", "HPHD", *CUT]
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
        (["--model", "opt-30b", "--cluster", "hom"], "cut them by --max-request-tokens 2048"),
        (
            ["--model", "opt-30b", "--cluster", "hom", "--max-request-tokens", "2049"],
            "the context of opt-30b is 2048 tokens: lower it",
        ),
    ],
)
def test_errors_name_the_constraint(
    flags: list[str], error: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["hetero", *flags, "--workload", "HPHD"]) == 2
    assert error in capsys.readouterr().err


SMALL = """
links: {pcie: {gbit: 166, us: 10}, ethernet: {gbit: 25, us: 50}}
machines:
  a: {device: A100-80G, count: 2, link: pcie}
network: ethernet
"""


def test_simulation_measures_the_rate_that_a_plan_promises(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster, path = tmp_path / "cluster.yaml", tmp_path / "plan.yaml"
    cluster.write_text(SMALL)
    flags = ["--cluster", str(cluster), "--model", "llama-3.1-8b", "--workload", "HPLD"]
    assert main(["hetero", *flags, "--requests", "9"]) == 2
    assert "--requests: it is the size of a simulation" in capsys.readouterr().err
    output = ["--output", str(path)]
    assert main(["hetero", *flags, "--simulate", "--requests", "100", *output]) == 0
    text = capsys.readouterr().out
    expected = read_plan(path).expected
    assert expected is not None
    assert expected.capacity is not None
    assert 0.4 * expected.capacity <= expected.rate < expected.capacity
    assert expected.ttft_seconds
    assert f"stable at {expected.rate:.3g} requests/s" in text
    # The command ends within its budget, and says what it did not measure.
    assert main(["hetero", *flags, "--simulate", "--budget", "0.2", *output]) == 0
    assert "The promised rate is not measured" in capsys.readouterr().out
    assert (read_plan(path).expected or expected).ttft_seconds is None


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
    plan = plan_replicas(ServiceProblem(model, workload, named_cluster(cluster)))
    assert abs(simulate_plan(plan).error) <= 0.15


def test_sample_of_a_class_has_its_lengths_all_the_time() -> None:
    mean = mean_lengths("HPLD").prompt
    sample = sample_workload("HPLD", 400, 3)
    assert sorted(sample) != sample
    assert fmean(prompt for prompt, _ in sample) == pytest.approx(mean, rel=0.01)
    for half in (sample[:200], sample[200:]):
        assert fmean(prompt for prompt, _ in half) == pytest.approx(mean, rel=0.1)
    assert sample == sample_workload("HPLD", 400, 3)
