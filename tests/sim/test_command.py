"""`gllm simulate` from its flags to its files."""

import json
import os
import re
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest

from gllm.commands.simulate import main, make_parser
from gllm.observability.step_log import AddEvent, StepLogWriter, read_step_log
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.capacity import RateTrial
from gllm.sim.costs.profile import build_profile, write_profile
from gllm.sim.deployment import roofline_deployment, simulate, simulate_scheduler_requests
from gllm.sim.description import describe_load
from gllm.sim.metrics.delays import RunLoad
from gllm.sim.metrics.run_record import build_run_record
from gllm.sim.options import SimulationConfig
from gllm.sim.workloads.requests import make_workload
from tests.support.exit_status import exit_status
from tests.support.full_cases import full_but
from tests.support.sim.requests import to_scheduler_requests

SMALL = ["--model", "qwen2.5-14b", "--device", "A100-40G", "--requests", "20"]
TABLE = ["--model", SimulationConfig.model, "--device", SimulationConfig.device]
"""The defaults, as --profile needs them."""


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave the pictures out, which take longer than small simulations."""
    names = ("plot_latencies", "plot_tokens", "plot_gantt", "plot_token_time")
    for name in names:
        monkeypatch.setattr(f"gllm.sim.metrics.plots.{name}", lambda figures, path: path.touch())


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
    for name in ("latencies", "tokens", "gantt", "token-time"):
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


def test_what_is_simulated_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--pp", "2", "--tp", "2", "--workload", "fixed:200,50", "--rate", "3"]
    assert main([*SMALL, *flags]) == 0
    output = capsys.readouterr().out
    for line in (
        "model: qwen2.5-14b, 48 layers in 2 stages of 24,24, tensor parallel 2",
        "devices: 4 x A100-40G, ranks joined by pcie, stages joined by pcie, 8.84 $/h, "
        "power limit 1600 W",
        "workload: fixed:200,50, 20 requests of 200 prompt and 50 output tokens on average, "
        "poisson at 3 requests/s, seed 0",
    ):
        assert line in output
    tokens, blocks = re.search(r"KV cache: (\d+) tokens in (\d+) blocks of 16", output).groups()  # type: ignore[union-attr]
    assert 16 * int(blocks) == int(tokens) > 100_000
    assert re.search(r"load: offered \d\.\d+ requests/s, sustained \d\.\d+ requests/s", output)
    assert "overloaded" not in output
    for words in ("KV cache in use, mean, %", "scheduling delay p99, ms", "FLOP/s utilization, %"):
        assert words in output


def test_an_overloaded_run_says_by_how_much(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--workload", "fixed:3000,5", "--requests", "120", "--rate", "12", "--pp", "1"]
    assert main(["--model", "qwen2.5-14b", "--device", "L20", *flags]) == 0
    output = capsys.readouterr().out
    rates = re.search(r"offered (\S+) requests/s, sustained (\S+) requests/s", output)
    assert rates
    offered, sustained = map(float, rates.groups())
    percent = re.search(r"overloaded by (\d+) %: scheduling delay p99", output)
    assert percent
    assert int(percent[1]) == pytest.approx(100 * (offered / sustained - 1), rel=0.02)
    assert int(percent[1]) > 100


@pytest.mark.full
def test_growing_delays_of_a_short_run_are_no_overload(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--workload", "azure-conv", "--requests", "200", "--rate", "2.6"]
    assert main(flags) == 0
    output = capsys.readouterr().out
    assert "scheduling delays grow: mean 0." in output
    assert "--requests 2000 or more show" in output
    assert "overloaded by" not in output


@pytest.mark.parametrize(
    ("rates", "trial", "words"),
    [
        (
            (3.0, 2.0),
            RateTrial(2000, 6.0, 1.0, 2.0, True),
            "overloaded by 50 %: scheduling delay p99 6 s",
        ),
        (
            (2.0, 2.0),
            RateTrial(2000, 6.0, 1.0, 1.0),
            "requests/s\nscheduling delay p99 6 s, mean 1 s in the first half of the requests, "
            "1 s in the second: the queue does not grow",
        ),
        (
            (2.0, 2.0),
            RateTrial(2000, 4.0, 1.0, 1.5, True),
            "overloaded, delays grow by 50 %: scheduling",
        ),
        (
            (None, 2.0),
            RateTrial(9, inf, 1.0, inf),
            "overloaded, requests are never scheduled: sche",
        ),
    ],
)
def test_overload_has_a_figure(
    rates: tuple[float | None, float], trial: RateTrial, words: str
) -> None:
    assert words in "\n".join(describe_load(RunLoad(*rates, trial)))


@pytest.mark.usefixtures("no_plots")
def test_metrics_json_repeats_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--pp", "2", "--policy", "sarathi", "--seed", "7", "--no-prefix-cache", "--tp", "2,1"]
    flags += ["--priorities", "0:1,1:1", "--slo-classes", "a:1,b:2", "--slo-limits", "a:1:,b::0.1"]
    assert main([*SMALL, *flags, "--output", str(tmp_path / "first")]) == 0
    first = (tmp_path / "first" / "metrics.json").read_bytes()
    (tmp_path / "first" / "metrics.json").rename(tmp_path / "metrics.json")
    again = ["--config", str(tmp_path / "metrics.json"), "--output"]
    assert main([*again, str(tmp_path / "second")]) == 0
    assert (tmp_path / "second" / "metrics.json").read_bytes() == first
    # The command line outranks the file.
    capsys.readouterr()
    assert main(["--config", str(tmp_path / "metrics.json"), "--seed", "8"]) == 0
    assert "seed 8" in capsys.readouterr().out
    configuration = json.loads(first)["configuration"]
    assert configuration["seed"] == 7
    assert configuration["prefix-cache"] is False


@pytest.mark.usefixtures("no_plots")
def test_attainment_by_class(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--slo-classes", "chat:1,batch:1", "--slo-limits", "chat:0.000001:,batch:9000:9000"]
    assert main([*SMALL, *flags, "--output", str(tmp_path)]) == 0
    table = capsys.readouterr().out
    assert re.search(r"SLO attainment of batch, % +\| 100 ", table)
    assert re.search(r"SLO attainment of chat, % +\| 0 ", table)
    classes = json.loads((tmp_path / "metrics.json").read_text())["metrics"]["slo_classes"]
    assert classes["batch"]["requests"] + classes["chat"]["requests"] == 20
    assert classes["chat"]["slo_ttft"] == 1e-6


@pytest.mark.usefixtures("no_plots")
def test_several_engines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--engines", "3", "--routing-policy", "round-robin", "--pp", "2", "--rate", "9"]
    log = ["--step-log", str(tmp_path / "steps.jsonl")]
    assert main([*SMALL, *flags, *log, "--output", str(tmp_path / "first")]) == 0
    output = capsys.readouterr().out
    assert "engines: 3, routing policy round-robin" in output
    assert re.search(r"engine-2 +\| 6 ", output)
    content = (tmp_path / "first" / "metrics.json").read_bytes()
    document = json.loads(content)
    assert [each["requests"] for each in document["engines"].values()] == [7, 7, 6]
    assert document["metrics"]["requests"] == document["metrics"]["finished"] == 20
    for figure in ("steps", "preemptions"):
        total = sum(each[figure] for each in document["engines"].values())
        assert document["metrics"][figure] == total
    for name in document["engines"]:
        run = build_run_record(read_step_log(tmp_path / f"steps.{name}.jsonl"))
        assert run.start.engine == name
        assert len(run.requests) == document["engines"][name]["requests"]
    assert (tmp_path / "first" / "latencies.svg").exists()
    again = ["--config", str(tmp_path / "first" / "metrics.json"), "--output"]
    assert main([*again, str(tmp_path / "second")]) == 0
    assert (tmp_path / "second" / "metrics.json").read_bytes() == content


@pytest.mark.usefixtures("no_plots")
def test_metrics_json_names_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    deployment = roofline_deployment("qwen2.5-14b", "A100-40G", 2, 4096)
    run = simulate(deployment, make_workload("fixed:200,20", 8, 4.0))
    monkeypatch.chdir(tmp_path)
    write_profile(build_profile([run], {}), "profile.json")
    load = ["--workload", "fixed:100,10", "--requests", "4"]
    assert main(["--profile", "profile.json", *load, "--output", "first"]) == 0
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    again = ["--config", str(tmp_path / "first" / "metrics.json"), "--output", "second"]
    assert main(again) == 0
    first = (tmp_path / "first" / "metrics.json").read_bytes()
    assert Path("second", "metrics.json").read_bytes() == first
    assert "has changed" not in capsys.readouterr().err
    write_profile(build_profile([run, run], {}), str(tmp_path / "profile.json"))
    assert main(again) == 0
    assert "profile.json has changed since" in capsys.readouterr().err
    assert Path("second", "metrics.json").read_bytes() != first


PREFILLS = ["--model", "qwen2.5-14b", "--pp", "1", "--workload", "fixed:2000,1", "--rate", "1.2"]
"""Prompts of one micro-batch each: at most about 1.5 per second."""


@pytest.mark.parametrize(
    ("rule", "flags", "num_requests"),
    [
        ("vidur", ["--requests", "150"], 150),
        pytest.param("sustained", ["--jobs", "2"], 2000, marks=pytest.mark.long),
    ],
)
def test_the_capacity_of_a_deployment(
    rule: str,
    flags: list[str],
    num_requests: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main([*PREFILLS, "--capacity", rule, *flags, "--output", str(tmp_path)]) == 0
    output = capsys.readouterr().out
    document = json.loads((tmp_path / "metrics.json").read_text())
    metrics = document["metrics"]
    assert f"capacity ({rule}): {metrics['capacity']:.4g} requests/s" in output
    assert document["configuration"]["capacity"] == rule
    assert {trial["num_requests"] for trial in metrics["trials"]} == {num_requests}
    assert 0.9 < metrics["capacity"] < 1.6
    delays = {trial["rate"]: trial["p99_delay_seconds"] for trial in metrics["trials"]}
    assert delays[metrics["capacity"]] <= 5.0
    # Runs beyond the limit end early, without a figure.
    assert None in [delays[rate] for rate in delays if rate > metrics["capacity"]]


def test_a_capacity_search_has_a_process_per_core() -> None:
    parser = make_parser()
    assert parser.parse_args(["--jobs", "3"]).jobs == 3
    assert parser.parse_args([]).jobs == len(os.sched_getaffinity(0))


def test_a_profile_predicts_and_is_compared(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = SchedulerConfig(policy="throttle")
    made = roofline_deployment("qwen2.5-14b", "A100-40G", 2, 4096, scheduler=config)
    jobs = make_workload("uniform:1,900,1,90", 60, 4.0)
    run, events = simulate_scheduler_requests(made, to_scheduler_requests(jobs))
    profile, log = tmp_path / "profile.json", tmp_path / "log.jsonl"
    # Batches of the prediction may have longer contexts than those of the run.
    longer = simulate(made, make_workload("fixed:1000,100", 5, 4.0))
    write_profile(build_profile([run, longer], {}), profile)
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


@pytest.mark.parametrize("predictor", full_but(["noisy:0.5"], ["oracle", "noisy:0.5", "by-prompt"]))
def test_schedulers_and_routers_read_predicted_lengths(
    predictor: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = [*SMALL, "--workload", "sharegpt-like", "--length-predictor", predictor]
    log = tmp_path / "steps.jsonl"
    reserving = [*flags, "--kv-admission", "reserve-dynamic", "--step-log", str(log)]
    assert main(reserving) == 0
    added = [event for event in read_step_log(log) if isinstance(event, AddEvent)]
    lengths = [(event.predicted_output_tokens, event.max_tokens) for event in added]
    assert len(lengths) == 20
    num_exact = sum(predicted == length for predicted, length in lengths)
    assert (num_exact == 20) == (predictor == "oracle")
    assert all(predicted > 0 for predicted, _ in lengths)
    assert main([*flags, "--engines", "2"]) == 0
    assert main([*flags, "--engines", "2", "--routing-policy", "random"]) == 2
    assert "would change nothing" in capsys.readouterr().err


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
        ([*TABLE, "--profile", "/nowhere.json"], "--profile /nowhere.json: cannot be read"),
        (["--profile", "vidur", "--device", "H100"], "--device chooses a device of the table"),
        (
            [*TABLE, "--profile", "vidur", "--model", "opt-13b"],
            "--model chooses a model of",
        ),
        (["--profile", "vidur", "--compare", "/nowhere.jsonl"], "--compare needs the file of"),
        (["--profile", __file__, "--compare", "x", "--engines", "2"], "--engines"),
        (["--profile", __file__, "--compare", "x", "--capacity", "vidur"], "--capacity"),
        (["--compare", "/nowhere.jsonl"], "--compare needs --profile"),
        (["--profile", __file__, "--compare", "/no.jsonl"], "--compare /no.jsonl: cannot be read"),
        (["--max-model-len", "100"], "max_model_len"),
        (["--max-model-len", "999999999"], "raise --pp or --tp, or lower --max-model-len"),
        (["--slo-limits", "chat:1"], "has to be NAME:TTFT:TPOT"),
        (["--slo-limits", "a:1:1,a:1:1"], "each name once"),
        (["--slo-limits", "a:-1:"], "limits in seconds"),
        (["--slo-classes", "a:1", "--slo-limits", "b:1:"], "'b' is no class of --slo-classes"),
        (["--slo-limits", "b:1:"], "'b' is no class of --slo-classes"),
        (["--slo-classes", "chat"], "--slo-classes chat: 'chat' has to be NAME:SHARE"),
        (["--capacity", "sustained", "--arrivals", "static"], "--capacity needs arrivals"),
        (["--length-predictor", "mean"], "choose oracle, noisy:ACCURACY"),
        (["--length-predictor", "noisy"], "choose oracle, noisy:ACCURACY"),
        (["--length-predictor", "noisy:1.1"], "accuracy has to be a number in [0, 1]"),
        (["--length-predictor", "noisy:x"], "accuracy has to be a number in [0, 1]"),
        (["--length-predictor", "oracle"], "would change nothing: choose --kv-admission"),
        (["--config", "/nowhere.json"], "cannot be read"),
        (["--workload", "file:/nowhere.csv"], "workload file:/nowhere.csv: cannot be read: No"),
        (["--pp", "65"], "choose 1 to 48 (pipeline_parallel_size)"),
        (["--time-scale", "2"], "--time-scale 2 stretches the times of a replay"),
        (["--capacity", "vidur", "--step-log", os.devnull], "--capacity writes no step log"),
        (["--compare", "x", "--step-log", os.devnull], "--compare writes no step log"),
        ([*TABLE, "--profile", "vidur", "--link", "rope"], "--link chooses a link of the table"),
        ([*TABLE, "--profile", "distserve:opt-13b", "--link", "network"], "--link chooses a link"),
        (
            [*TABLE, "--profile", "vidur", "--tp-link", "pcie"],
            "--tensor-parallel-link chooses a link",
        ),
        ([*TABLE, "--profile", "vidur", "--pp", "81"], "80 layers cannot be cut into 81 stages"),
    ],
)
def test_bad_flags_are_told_with_the_fix(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(main, [*SMALL, *flags]) == 2
    assert words in capsys.readouterr().err


def test_the_command_loads_no_torch() -> None:
    code = (
        "import sys; from gllm.__main__ import main; "
        "main(['simulate', '--requests', '8', '--rate', '2']); "
        "print(sorted({'torch', 'transformers', 'sklearn'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.splitlines()[-1] == "[]"
