"""`gllm simulate` from its flags to its files."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from gllm.commands.simulate import main
from gllm.observability.step_log import StepLogWriter, read_step_log
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.costs.profile import build_profile, write_profile
from gllm.sim.deployment import roofline_deployment, serve_requests
from gllm.sim.metrics.run_record import build_run_record
from gllm.sim.workloads.requests import make_workload, to_scheduler_requests

SMALL = ["--model", "qwen2.5-14b", "--device", "A100-40G", "--requests", "20"]


def test_a_table_a_document_plots_and_a_log(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = tmp_path / "steps.jsonl"
    more = ["--output", str(tmp_path / "out"), "--step-log", str(log), "--slo-ttft", "60"]
    assert main([*SMALL, "--pp", "2", "--workload", "sharegpt-like", *more]) == 0
    table = capsys.readouterr().out
    for words in ("TTFT mean, ms", "ITL p99, ms", "bubbles, %", "SLO attainment, %"):
        assert words in table
    document = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert document["start"]["layers"] == [24, 24]
    assert document["metrics"]["finished"] == 20
    assert document["metrics"]["slo_attainment"] == 1.0
    assert len(document["metrics"]["bubble_share"]) == 2
    for name in ("latencies", "tokens", "gantt"):
        assert (tmp_path / "out" / f"{name}.svg").read_text().lstrip().startswith("<?xml")
    run = build_run_record(read_step_log(log))
    assert sum(served.line.num_tokens for served in run.requests.values()) > 20
    assert len(run.micro_batches) == document["metrics"]["steps"]


def test_the_same_flags_give_the_same_table(capsys: pytest.CaptureFixture[str]) -> None:
    tables = []
    for seed in ("1", "1", "2"):
        assert main([*SMALL, "--seed", seed, "--policy", "sarathi"]) == 0
        tables.append(capsys.readouterr().out)
    assert tables[0] == tables[1] != tables[2]


def test_a_profile_predicts_and_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = SchedulerConfig(policy="throttle")
    made = roofline_deployment("qwen2.5-14b", "A100-40G", 2, 4096, scheduler=config)
    jobs = make_workload("uniform:1,900,1,90", 60, 4.0)
    run, events = serve_requests(made, to_scheduler_requests(jobs))
    profile, log = tmp_path / "profile.json", tmp_path / "log.jsonl"
    write_profile(build_profile([run], {}), profile)
    assert main(["--profile", str(profile), "--workload", "fixed:100,20", "--requests", "5"]) == 0
    assert "requests/s" in capsys.readouterr().out
    written = StepLogWriter(log)
    for event in events:
        written.write(event)
    written.close()
    assert main(["--profile", str(profile), "--compare", str(log)]) == 0
    table = capsys.readouterr().out
    assert "predicted" in table
    assert "TTFT median error of a request" in table


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--rate", "0"], "argument --rate: '0' has to be a number in (0, "),
        (["--requests", "-3"], "argument --requests: '-3' has to be an integer in [1, "),
        (["--workload", "nothing"], "workload 'nothing' is none of azure-conv"),
        (["--workload", "fixed:5"], "fixed takes LENGTH of the prompt"),
        (["--arrivals", "gamma:x"], "gamma"),
        (["--arrivals", "replay", "--workload", "arxiv-4k"], "no arrivals to replay"),
        (["--model", "llama-100b", "--device", "RTX4090"], "does not fit"),
        (["--pp", "99"], "cannot be cut into 99 stages"),
        (["--kv-threshold", "2"], "argument --kv-threshold: '2' has to be a number in [0, 1)"),
        (["--profile", "/nowhere.json"], "/nowhere.json"),
        (["--compare", "/nowhere.jsonl"], "--compare needs --profile"),
        (["--max-model-len", "100"], "max_model_len"),
    ],
)
def test_bad_flags_are_told_with_the_fix(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status: str | int | None
    try:
        status = main([*SMALL, *flags])
    except SystemExit as end:  # argparse's own way out
        status = end.code
    assert status == 2
    assert words in capsys.readouterr().err


def test_the_command_loads_no_torch() -> None:
    code = (
        "import sys; from gllm.__main__ import main; "
        "main(['simulate', '--requests', '8', '--rate', '2']); "
        "print(sorted({'torch', 'transformers', 'sklearn'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"
