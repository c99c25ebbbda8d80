"""`gllm bench` against a real server and real engines, whatever their speed."""

import json
import re
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from gllm.commands.bench.command import main
from tests.support.exit_status import exit_status
from tests.support.servers.pool import TINY_TWO_STAGES, share
from tests.support.servers.server import DEADLINE, Server, wait_until

LOAD = ["--workload", "uniform:3,40,2,9", "--num-prompts", "12", "--no-progress"]


server = share(TINY_TWO_STAGES)


@pytest.mark.parametrize(
    "flags",
    [
        ["--request-rate", "50", "--max-concurrency", "4"],
        pytest.param(["--endpoint", "/v1/chat/completions"], marks=pytest.mark.full),
        ["--prompt-kind", "text", "--temperature", "1"],
    ],
)
def test_serve(
    server: Server,
    tiny_model: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
) -> None:
    file = tmp_path / "result.json"
    to = ["--base-url", server.url, "--save-result", str(file), "--save-detailed"]
    assert main(["serve", *LOAD, *to, *flags, "--goodput", "e2el:1e9"]) == 0
    report = capsys.readouterr().out
    assert "Successful requests:                     12" in report
    result = json.loads(file.read_text())
    assert (result["completed"], result["failed"]) == (12, 0)
    assert result["model_id"] == tiny_model.name
    # The server's counts: every output has the planned length, all prompts have tokens.
    assert sum(result["output_lens"]) == result["total_output_tokens"]
    assert all(2 <= tokens <= 9 for tokens in result["output_lens"])
    assert all(tokens >= 3 for tokens in result["input_lens"])
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    assert result["max_concurrent_requests"] <= (4 if "--max-concurrency" in flags else 12)


@pytest.mark.parametrize(
    "flags",
    [
        [],
        pytest.param(["--endpoint", "/v1/chat/completions"], marks=pytest.mark.full),
        pytest.param(["--no-session-header"], marks=pytest.mark.full),
    ],
)
def test_sessions(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    file = tmp_path / "result.json"
    load = ["--workload", "agents:3,3,17,8,4,3", "--pauses", "fixed:0.05", "--rate", "50"]
    to = ["--base-url", server.url, "--save-result", str(file), "--no-progress"]
    assert main(["sessions", *load, *to, *flags]) == 0
    report = capsys.readouterr().out
    assert "sessions: 3, 6 later turns" in report
    result = json.loads(file.read_text())
    assert (result["completed"], result["failed"]) == (9, 0)
    # All of the turn before is in the cache but its last token and the rest of a block of 16.
    assert 0 < result["recomputed_tokens"] <= 16 * 6
    assert result["hit_share"] > 0.4
    assert set(result["later_ttft"]) == {"mean", "p50", "p90", "p99"}
    assert "api_key" not in result["configuration"]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--workload", "sessions"], "has to be agents or"),
        (["--workload", "agents:1"], "agents takes AGENTS,TURNS"),
        (["--pauses", "slow"], "choose fixed:S"),
    ],
)
def test_sessions_refuse_other_loads(
    capsys: pytest.CaptureFixture[str], flags: list[str], message: str
) -> None:
    assert main(["sessions", *flags]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.full
def test_ctrl_c_ends_the_load_with_a_report(server: Server) -> None:
    code = "import sys; from gllm.__main__ import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "bench", "serve", "--request-rate", "20"]
    flags = ["--base-url", server.url, "--workload", "fixed:5,2", "--no-progress"]

    def count_served() -> int:
        with urllib.request.urlopen(server.url + "/metrics") as answer:
            found = re.findall(rb"^gllm:request_success_total.* (\d+)", answer.read(), re.M)
        return sum(map(int, found))

    num_before = count_served()
    with subprocess.Popen([*command, *flags], stdout=subprocess.PIPE, text=True) as process:
        wait_until(lambda: count_served() >= num_before + 4)
        process.send_signal(signal.SIGINT)
        report, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 130
    assert report.startswith("Interrupted")
    completed = re.search(r"Successful requests: +(\d+)", report)
    assert completed is not None
    assert 1 <= int(completed[1]) < 1000


def test_serve_counts_refusals(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["serve", "--base-url", server.url, *LOAD, "--num-warmups", "0"]
    assert main([*command, "--vocab-size", "1000000"]) == 1
    shown = capsys.readouterr()
    assert "12 failed: HTTP 400" in shown.err
    assert "Failed requests:                         12" in shown.out
    assert main([*command, "--extra-body", '{"top_p": 9}', "--num-warmups", "1"]) == 1
    assert "a warm-up request failed: HTTP 400: top_p" in capsys.readouterr().err


def test_serve_without_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--base-url", "http://127.0.0.1:9", "--ready-timeout", "0.2"]) == 1
    assert "no server is ready at http://127.0.0.1:9" in capsys.readouterr().err


@pytest.mark.full
def test_throughput(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    flags = ["--model", str(tiny_model), "--pp", "2", "--output-json", str(file)]
    assert main(["throughput", *LOAD[:4], *flags]) == 0
    report = capsys.readouterr().out
    result = json.loads(file.read_text())
    assert report.startswith(
        f"Throughput: {result['requests_per_second']:.2f} requests/s, "
        f"{result['tokens_per_second']:.2f} total tokens/s, "
        f"{result['output_tokens_per_second']:.2f} output tokens/s\n"
    )
    assert f"Total num output tokens:  {result['total_output_tokens']}" in report
    assert result["num_requests"] == 12


@pytest.mark.full
def test_latency(tiny_model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "result.json"
    batch = ["--input-len", "5", "--output-len", "3", "--batch-size", "2"]
    rounds = ["--num-iters-warmup", "1", "--num-iters", "4", "--output-json", str(file)]
    model = ["--model", str(tiny_model), "--threads", "1"]
    assert main(["latency", *model, *batch, *rounds]) == 0
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(file.read_text())
    assert lines[0] == f"Avg latency: {result['avg_latency']} seconds"
    assert [line.split("%")[0] for line in lines[1:]] == ["10", "25", "50", "75", "90", "99"]
    assert lines[3] == f"50% percentile latency: {result['percentiles']['50']} seconds"
    assert len(result["latencies"]) == 4


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["throughput", "--workload", "nothing"], "workload 'nothing' is none of"),
        (["throughput", "--num-prompts", "0"], "argument --num-prompts: '0' has to be"),
        pytest.param(
            ["throughput", "--workload", "fixed:2000,5", "--num-prompts", "1"],
            "context",
            marks=pytest.mark.full,
        ),
        (["latency", "--batch-size", "0"], "argument --batch-size: '0' has to be"),
        (["latency", "--model", "/nowhere"], "/nowhere"),
        (["serve", "--max-concurrency", "0"], "argument --max-concurrency: '0' has to be"),
        (["nothing"], "unknown benchmark 'nothing'"),
    ],
)
def test_what_cannot_be_is_refused(
    flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert exit_status(main, flags) == 2
    assert words in capsys.readouterr().err


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert "throughput" in capsys.readouterr().out
