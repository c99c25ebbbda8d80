"""`gllm up`: the node of this machine, its commands, and plans that cannot be started."""

import shlex
from pathlib import Path

import msgspec
import pytest

from gllm.commands.router import make_parser as build_router_parser
from gllm.commands.up import find_own_node, main
from gllm.plan.serving_plan import (
    EnginePlan,
    ExpectedFigures,
    NodePlan,
    PlanError,
    RouterPlan,
    ServingPlan,
    StagePlan,
    write_plan,
)
from gllm.serve import make_parser
from tests.plan.test_processes import CPU_PHASES, GPUS, LOCAL

SEARCHED = msgspec.structs.replace(
    LOCAL, expected=ExpectedFigures("gllm plan search --cores 2 --rate 2", 2.0)
)


def with_hosts(**hosts: str) -> ServingPlan:
    nodes = {name: NodePlan(host) for name, host in hosts.items()}
    return msgspec.structs.replace(LOCAL, nodes=nodes)


def test_the_node_is_the_one_whose_host_is_this_machine() -> None:
    assert find_own_node(with_hosts(here="127.0.0.1", there="203.0.113.7")) == "here"
    # A name that is not known here is that of another machine.
    assert find_own_node(with_hosts(here="localhost", there="no-such-host.invalid")) == "here"


@pytest.mark.parametrize(
    ("hosts", "words"),
    [
        ({"x": "203.0.113.7", "y": "203.0.113.8"}, "none has an address of it: pass --node: x, y"),
        (
            {"x": "127.0.0.1", "y": "127.0.0.2", "z": "203.0.113.7"},
            "several have an address of this machine: pass --node: x, y",
        ),
    ],
)
def test_a_machine_that_is_not_known_is_named(hosts: dict[str, str], words: str) -> None:
    with pytest.raises(PlanError) as caught:
        find_own_node(with_hosts(**hosts))
    assert str(caught.value).endswith(words)


def test_a_dry_run_prints_lines_for_a_shell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(LOCAL, path)
    assert main([str(path), "--dry-run", "--step-logs", str(tmp_path), "--model", "/m"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines] == [["gllm", "router"], *[["gllm", "serve"]] * 2]
    values = [build_router_parser().parse_args(lines[0][2:])]
    values += [make_parser().parse_args(line[2:]) for line in lines[1:]]
    assert {value.model for value in values} == {"/m"}
    logs = [value.step_log for value in values[1:]]
    assert logs == [f"{tmp_path}/a.jsonl", f"{tmp_path}/b.jsonl"]


def test_gpus_and_missing_transfers_are_shown(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, secret = tmp_path / "plan.yaml", tmp_path / "secret"
    mixed = EnginePlan([StagePlan("x", 32, [2]), StagePlan("z", 32)], "prefill")
    write_plan(msgspec.structs.replace(GPUS, engines={**GPUS.engines, "p0": mixed}), path)
    secret.touch()
    flags = ["--node", "y", "--node-secret-file", str(secret), "--dry-run"]
    assert main([str(path), *flags]) == 0
    captured = capsys.readouterr()
    words = shlex.split(captured.out)
    assert words[:3] == ["env", "CUDA_DEVICE_ORDER=PCI_BUS_ID", "CUDA_VISIBLE_DEVICES=1,0"]
    assert captured.err.startswith(
        "gllm up: this plan is simulated only: p0: no KV blocks are passed on"
    )
    engine = msgspec.structs.replace(GPUS.engines["p0"], scheduler={"lanes": "2"})
    write_plan(msgspec.structs.replace(GPUS, engines={**GPUS.engines, "p0": engine}), path)
    assert main([str(path), *flags]) == 2
    assert "gllm serve refuses engine p0: lanes is 2" in capsys.readouterr().err


def test_the_router_of_a_plan_that_is_made_again_detects_shifts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(SEARCHED, path)
    assert main([str(path), "--dry-run", "--replan"]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines if "--detect-shifts" in line] == [["gllm", "router"]]
    build_router_parser().parse_args(lines[0][2:])
    assert main([str(path), "--dry-run"]) == 0
    assert "--detect-shifts" not in capsys.readouterr().out


def test_an_emulated_plan_runs_on_this_machine_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(GPUS, path)
    assert main([str(path), "--emulate", "--dry-run", "--model", "qwen2.5-32b"]) == 0
    captured = capsys.readouterr()
    lines = [shlex.split(line) for line in captured.out.splitlines()]
    assert [line[:3] for line in lines] == [
        ["gllm", "router", "--model=qwen2.5-32b"], *[["gllm", "serve", "--model=qwen2.5-32b"]] * 2
    ]  # fmt: skip
    assert "--device=emulated:A100-80G,L20,L20" in lines[2]
    assert captured.err == ""


def test_an_emulated_plan_can_be_made_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.yaml"
    expected = ExpectedFigures("gllm plan goodput --nodes nodes.yaml --rate 2", 2.0)
    router = RouterPlan("z")
    write_plan(msgspec.structs.replace(GPUS, expected=expected, router=router), path)
    flags = ["--emulate", "--replan", "--dry-run", "--model", "qwen2.5-32b"]
    assert main([str(path), *flags]) == 0
    lines = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    assert [line[1] for line in lines if "--detect-shifts" in line] == ["router"]
    assert "--device=emulated:A100-80G,L20,L20" in lines[2]


@pytest.mark.parametrize(
    ("plan", "flags", "words"),
    [
        (LOCAL, ["--replan"], "expected.by: '': --replan repeats the search"),
        (SEARCHED, ["--replan", "--on", "ray"], "--replan: only `gllm up` of this machine"),
        (SEARCHED, ["--replan", "--emit", "lws", "out"], "--replan: only `gllm up` of this"),
        (CPU_PHASES, ["--node", "x"], "nodes: the machines need a secret"),
        (GPUS, ["--emulate", "--node", "x"], "--node: --emulate starts the whole plan"),
        (GPUS, ["--emulate", "--on", "ray"], "--on ray: --emulate starts the whole plan"),
        (LOCAL, ["--emulate", "--replan"], "expected.by: '': --replan repeats the search"),
        (GPUS, ["--emulate", "--emit", "lws", "out"], "--emit: --emulate starts the whole plan"),
        (LOCAL, ["--emulate"], "engines.a.stages[0].devices: empty: CPUs are not emulated"),
        (LOCAL, ["--node", "there"], "nodes: there is no node 'there'"),
        (LOCAL, ["--emit", "nomad", "out"], "--emit nomad: choose one of"),
        (
            msgspec.structs.replace(LOCAL, nodes={**LOCAL.nodes, "spare": NodePlan("203.0.113.7")}),
            ["--node", "spare"],
            "nodes.spare: no router and no engine of the plan runs on it",
        ),
    ],
)
def test_plans_that_cannot_be_started_are_refused(
    plan: ServingPlan,
    flags: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(plan, path)
    assert main([str(path), *flags]) == 2
    assert capsys.readouterr().err.startswith(f"gllm up: {words}")
    assert main([str(tmp_path / "none.yaml")]) == 2
