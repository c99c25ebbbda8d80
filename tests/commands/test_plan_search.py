"""`gllm plan capacity` and `gllm plan search`: tables, plans, and errors that name the fix."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gllm.commands.plan.command import main
from gllm.commands.plan.search import EXCLUDED, build_problem, make_parser
from gllm.options.flags import config_from_flags
from gllm.plan.search.objectives import AssessedDesign
from gllm.plan.search.planner import simulate_design
from gllm.plan.serving_plan import read_plan
from gllm.sim.costs.profile import DEBUG_STEP_SECONDS, write_profile
from gllm.sim.options import SimulationConfig
from tests.sim.test_fitted import profile as make_profile

WORKLOAD = ["--workload", "fixed:6000,2", "--requests", "20", "--jobs", "1"]
BRIEF = ["--workload", "fixed:300,1", "--requests", "20", "--jobs", "1"]
"""Requests of one step, for long runs."""
SMALL = ["search", "--model", "qwen2.5-32b", "--max-num-seqs", "32", "--policies", "sarathi:512"]


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    workload = [] if "--workload" in argv else WORKLOAD
    status = main([*argv, *workload])
    return status, *capsys.readouterr()


def test_closed_forms_find_a_design_and_write_its_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_path, picture = tmp_path / "plan.yaml", tmp_path / "designs.svg"
    files = ["--output", str(plan_path), "--plot", str(picture)]
    limits = ["--slo", "ttft:p90=2,tbt:p99=0.2", "--rate", "4"]
    status, text, _ = run(capsys, *SMALL, "--closed-form", *limits, *files)
    assert status == 0
    assert "designs estimated" in text
    assert "| yes    |" in text
    plan = read_plan(plan_path)
    assert f"best: {len(plan.engines)} engine" in text
    assert plan.expected
    assert plan.expected.rate == 4
    assert plan.expected.capacity is not None
    assert plan.expected.capacity >= 4
    assert plan.expected.by.startswith("gllm plan search --model qwen2.5-32b")
    assert picture.read_text().startswith("<?xml")


def test_the_best_designs_are_simulated_and_the_others_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    space = ["--devices", "H100", "--pp", "1", "--tp", "1,2,4", "--simulate", "1", *BRIEF]
    status, text, error = run(capsys, *SMALL, *space, "--objective", "cost", "--rate", "1")
    assert status == 0
    # Before the first simulation.
    assert error.startswith("3 designs, of which at most 1 are simulated, within 600 s\n")
    assert "1 of 3 designs simulated" in text
    assert "bound is below the best candidate" in text
    # A rate above the planned one is not simulated.
    assert "at 1 requests/s: TTFT p50" in text


def test_a_profile_gives_a_plan_of_one_core_engines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile_path, plan_path = tmp_path / "profile.json", tmp_path / "plan.yaml"
    write_profile(make_profile([6]), profile_path)
    local = ["--profile", str(profile_path), "--cores", "2", "--checkpoint", "demo"]
    local += ["--workload", "fixed:600,4"]
    argv = ["search", *local, "--policies", "sarathi:512", "--max-num-seqs", "16"]
    status, text, error = run(
        capsys, *argv, "--pp", "1", "--rate", "45", "--output", str(plan_path), "--closed-form"
    )
    assert status == 0, error
    plan = read_plan(plan_path)
    assert plan.model == "demo"
    assert len(plan.engines) == 2, text
    assert all(
        engine.flags == {"threads": 1, "max-model-len": 1024} for engine in plan.engines.values()
    )
    assert {stage.node for engine in plan.engines.values() for stage in engine.stages} == {"local"}


def test_shorter_runs_need_fewer_requests(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    write_profile(make_profile([8]), path)
    argv = ["--profile", str(path), "--cores", "2", "--rule", "vidur"]

    def num_requests(*flags: str) -> int:
        values = make_parser().parse_args([*argv, *flags])
        config = config_from_flags(SimulationConfig, values, EXCLUDED)
        _, space, rule = build_problem(values, config)
        assert len(space.policies) == 3
        assert space.max_num_seqs == (64, 128, 256)
        return rule.num_requests(50.0, 200)

    assert num_requests() == 3000
    assert num_requests("--run-seconds", "20") == 1000
    assert num_requests("--run-seconds", "1") == 200


def test_a_plan_has_the_flags_with_which_its_profile_was_measured(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    profile_path, plan_path = tmp_path / "profile.json", tmp_path / "plan.yaml"
    machine = {"threads": "1", "dtype": "float32", DEBUG_STEP_SECONDS: "0.05"}
    write_profile(msgspec.structs.replace(make_profile([8]), machine=machine), profile_path)
    argv = ["search", "--profile", str(profile_path), "--cores", "1", "--policies", "sarathi:512"]
    argv += ["--max-num-seqs", "16", "--workload", "fixed:600,4", "--closed-form"]
    status, _, error = run(capsys, *argv, "--output", str(plan_path))
    assert status == 0, error
    (engine,) = read_plan(plan_path).engines.values()
    measured = {"threads": 1, "dtype": "float32", "debug-step-seconds": 0.05}
    assert engine.flags == {**measured, "max-model-len": 1024}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--workload", "fixed:20,8", "--slo", "ttft:p50=0.5"], ""),
        (["--workload", "fixed:20,8", "--slo", "tbt:p99=0.0035"], "the estimate of TBT P99 is"),
        (["--workload", "fixed:5000,8"], "outside of the profile: the profile: "),
    ],
)
def test_closed_forms_use_what_was_measured_and_name_what_binds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], reason: str
) -> None:
    """The profile has at most two prompts per micro-batch, and 1,000 tokens."""
    path = tmp_path / "profile.json"
    profile = make_profile([8])
    write_profile(
        msgspec.structs.replace(
            profile, scheduler=replace(profile.scheduler, max_model_len=8192, num_blocks=4000)
        ),
        path,
    )
    argv = ["search", "--profile", str(path), "--cores", "1", "--policies", "sarathi:512"]
    status, text, error = run(capsys, *argv, "--max-num-seqs", "16", "--closed-form", *flags)
    assert not error
    assert "no rate is in limits" not in text
    assert status == (1 if reason else 0), text
    assert reason in text


def test_policies_have_no_larger_micro_batches_than_the_profile(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has 1,000 tokens; the defaults of vllm and throttle are 4,096 and 2,560."""
    path = tmp_path / "profile.json"
    write_profile(make_profile([8]), path)
    argv = ["search", "--profile", str(path), "--cores", "2", "--max-num-seqs", "16"]
    argv += ["--workload", "fixed:600,4", "--policies", "vllm,sarathi:512,throttle,vllm:2000"]
    status, text, error = run(capsys, *argv, "--closed-form")
    assert status == 0
    assert "6 of 6 designs estimated" in text
    assert "vllm:1000" in text
    assert "sarathi:512" in text
    assert "policy vllm: 1000 instead of 4096 tokens per micro-batch" in error
    assert "`gllm profile --max-num-batched-tokens 2560` measures more" in error
    assert "policy vllm:2000: 1000 instead of 2000" in error


def test_a_capacity_within_limits_is_written_as_a_plan(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan_path = tmp_path / "plan.yaml"
    argv = [
        "capacity",
        "--model",
        "qwen2.5-32b",
        "--device",
        "H100",
        "--pp",
        "1",
        "--rule",
        "vidur",
    ]
    status, text, _ = run(capsys, *argv, "--slo", "ttft:p90=2", "--output", str(plan_path))
    assert status == 0
    assert "capacity, requests/s" in text
    plan = read_plan(plan_path)
    assert plan.expected
    assert plan.expected.capacity == plan.expected.rate > 0
    assert plan.slo.ttft == 2
    status, text, _ = run(capsys, *argv, "--slo", "ttft:p90=0.0001")
    assert status == 1
    assert "no rate is within the limits" in text


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["search", "--slo", "ttft"], "--slo ttft"),
        (["search", "--devices", "X1"], "--devices X1"),
        (["search", "--cores", "2"], "--profile and --cores belong together"),
        (["search", "--objective", "power"], "needs a rate to serve: add --rate"),
        (["search", "--devices", "L20", "--objective", "qps-per-dollar"], "needs a price of L20"),
        (["search", "--model", "llama-3-70b", "--max-devices", "1"], "no design fits; the largest"),
        (["search", "--devices", "L20", "--nodes", "a=h:1xH100"], "none of --nodes has it"),
        (["search", "--prices", "gold"], "prices 'gold'"),
        (["search", "--arrivals", "static"], "or --objective makespan"),
        (["search", "--policies", "best"], "--policies best"),
        (["capacity", "--arrivals", "static"], "a capacity needs arrivals at a rate"),
        (["capacity", "--slo", "tbt=1"], "limit a percentile"),
        (["capacity", "--bytes-per-weight", "1", "--output", "p.yaml"], "leave --output out"),
        (["search", "--bytes-per-weight", "1", "--output", "p.yaml"], "leave --output out"),
        (["search", "--checkpoint", "demo"], "add --output"),
        (["capacity", "--tp-link", "nvlink"], "one rank has no such link"),
        (["search", "--tp", "1", "--tp-link", "nvlink"], "one rank has no such link"),
        (
            ["hetero", "--cluster", "c", "--model", "m", "--workload", "w", "--checkpoint", "demo"],
            "add --output",
        ),
    ],
)
def test_errors_name_the_flag_and_the_fix(
    argv: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, _, error = run(capsys, *argv)
    assert status == 2
    assert error.splitlines()[-1].startswith(f"gllm plan {argv[0]}: ")
    assert message in error


def test_planners_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    text = capsys.readouterr().out
    assert "capacity" in text
    assert "search" in text


def test_requests_beyond_the_context_are_refused_or_cut_and_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Half of the requests have 3,000 tokens, OPT has 2,048 positions."""
    argv = ["search", "--model", "opt-13b", "--devices", "H100", "--pp", "1", "--tp", "1"]
    argv += ["--policies", "vllm", "--closed-form", "--workload", "uniform:2999,3000,1,1"]
    status, _, error = run(capsys, *argv)
    assert status == 2
    assert "has a request of 3001 tokens, but the context of opt-13b is 2048" in error
    assert "--max-request-tokens 2048" in error
    status, text, error = run(capsys, *argv, "--max-request-tokens", "2048")
    assert status == 0, error
    assert "1000 of 1000 requests (100.0 %) are cut to 2048 tokens" in text
    capacity = ["capacity", "--model", "opt-13b", "--device", "H100", "--pp", "1"]
    status, _, error = run(capsys, *capacity, "--max-model-len", "4000")
    assert status == 2
    assert "opt-13b is 2048" in error


def test_the_bound_is_beside_the_answer_and_what_was_not_tried_is_named(
    capsys: pytest.CaptureFixture[str],
) -> None:
    space = ["--devices", "H100", "--pp", "1", "--tp", "1,2", "--rate", "1", *BRIEF]
    status, text, error = run(capsys, *SMALL, *space, "--slo", "ttft=2")
    assert status == 0, error
    assert "best so far: " in error
    assert "bound by closed forms, of equal engines: at most " in text
    assert "designs that were not tried" not in text
    status, text, error = run(
        capsys, *SMALL[:3], *space, "--policies", "sarathi:512", "--max-num-seqs", "32",
        "--objective", "power", "--rate", "3", "--closed-form",
    )  # fmt: skip
    assert status == 0, error
    assert "bound by closed forms, of equal engines: at least " in text


def test_an_interrupt_writes_the_plan_so_far(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the second simulation leaves the result of the first."""
    path, num_calls = tmp_path / "plan.yaml", 0

    def interrupt(*arguments: Any) -> AssessedDesign:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 2:
            raise KeyboardInterrupt
        return simulate_design(*arguments)

    monkeypatch.setattr("gllm.plan.search.planner.simulate_design", interrupt)
    space = ["--devices", "H100", "--pp", "1", "--tp", "1,2", "--policies", "sarathi:512,vllm"]
    argv = [*SMALL[:3], *space, "--max-num-seqs", "32", "--exhaustive", "--run-seconds", "5"]
    argv += [*BRIEF, "--rule", "vidur"]
    status, text, error = run(capsys, *argv, "--output", str(path))
    assert status == 0, error
    assert "1 stopped by Ctrl-C" in text
    assert "not tried: " in text
    assert "stopped by Ctrl-C: latencies are estimated by closed forms" in text
    assert len(read_plan(path).engines) == 1
