"""Every named experiment runs, and its page says what it has to."""

import re
import shlex
from functools import partial
from pathlib import Path
from resource import RUSAGE_CHILDREN, getrusage
from types import ModuleType
from typing import Any

import pytest

import gllm
from experiments import (
    code_size,
    distserve_planning,
    hexgen2_cases,
    hexgen2_claims,
    hexgen2_placements,
    hexgen2_simulated,
    hexgen2_tables,
    real_ablation,
    replay,
    trials,
)
from experiments.__main__ import EXPERIMENTS, MODES, REAL, format_command, main, make_parser
from experiments.ablation import BASE
from experiments.base import ExperimentOptions, ExperimentResult, RunTime, write_result
from experiments.claims import ExpectedChange, PaperClaim
from experiments.latency_vs_rate import slope, turning_point
from experiments.real_ablation import median_figures
from experiments.slo import coverage, interpolate_rate
from experiments.trials import SimulationTrial
from gllm.commands.profile import command as profile
from gllm.config.engine import EngineConfig
from gllm.observability import progress
from gllm.observability.latency import RequestTimeline
from gllm.observability.step_log import StartEvent, StepLogEvent
from gllm.plan.hetero import simulation
from gllm.plan.hetero.planner import plan_replicas
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import StepTime
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import ConstantCostModel
from gllm.sim.deployment import Deployment, simulate_scheduler_requests
from gllm.sim.metrics.micro_batch_table import MicroBatch
from gllm.sim.metrics.run_record import RunRecord, ServedRequest
from gllm.sim.workloads.requests import WorkloadRequest
from scripts import claims_page
from tests.support.full_cases import full_but
from tests.support.sim.requests import to_scheduler_requests

PAGES = Path(__file__).parents[2] / "experiments" / "pages"
MEASURED = (
    "replay",
    "link-encoding",
    "kv-theta",
    "prediction",
    "emulation",
    "pools",
    "two-machines",
    "two-nodes",
    "planners",
    "code-size",
)
SIMULATED = [name for name in EXPERIMENTS if name not in MEASURED]
QUICK_SEARCH = partial(plan_replicas, max_vain_restarts=1)
SMALL: dict[str, list[tuple[ModuleType, str, object]]] = {
    "hexgen2": [
        (hexgen2_simulated, "NUM_ONLINE", 60),
        (hexgen2_simulated, "NUM_TIMED", 60),
        (simulation, "MIN_REQUESTS", 40),
        (simulation, "WINDOW", (0.5, 0.75)),
        (hexgen2_cases, "plan_replicas", QUICK_SEARCH),
        (hexgen2_simulated, "plan_replicas", QUICK_SEARCH),
        *(
            (module, "CHECKPOINTS", (25, 50, 100))
            for module in (hexgen2_cases, hexgen2_claims, hexgen2_tables)
        ),
    ],
    "hexgen2-placements": [(hexgen2_placements, "plan_replicas", QUICK_SEARCH)],
    "hexgen2-opt": [
        (simulation, "MIN_REQUESTS", 40),
        (simulation, "WINDOW", (0.5, 0.75)),
        (hexgen2_cases, "plan_replicas", QUICK_SEARCH),
        (hexgen2_simulated, "plan_replicas", QUICK_SEARCH),
    ],
    "distserve-planning": [(distserve_planning, "NUM_REQUESTS", 20)],
    # Every kind of workload, but fewer requests and tokens of each; progress of each step.
    "prediction": [
        (profile, "DECODE_TOKENS", 10),
        (profile, "REPEATS", 2),
        (profile, "BURST", 6),
        (profile, "SHARES", (0.3, 0.6)),
        (profile, "HOST_SHARES", (0.6,)),
        (progress, "MAX_SECONDS", 0.0),
    ],
}
"""Sizes of simulations, searches and profiles that no flag sets."""
CLOSED_FORMS = ("interference", "weak-links-timeline")
"""Experiments that simulate nothing, or next to nothing in this process."""
QUICK = (*CLOSED_FORMS, "distserve-runs")
"""Experiments of `make test`: fast ones, and one that simulates in several processes."""
OPTIONS = ExperimentOptions(quick=True, progress=False, jobs=1)


@pytest.fixture
def name(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the name of the experiment, whose sizes are small."""
    experiment: str = request.param
    for module, constant, value in SMALL.get(experiment, []):
        monkeypatch.setattr(module, constant, value)
    return experiment


@pytest.mark.parametrize("name", full_but(QUICK, SIMULATED), indirect=True)
@pytest.mark.parametrize("requests", ["8", pytest.param("24", marks=pytest.mark.long)])
def test_simulated(name: str, requests: str, tmp_path: Path) -> None:
    cpu_seconds = getrusage(RUSAGE_CHILDREN).ru_utime
    flags = ["--requests", requests, "--jobs", "2", "--output", str(tmp_path)]
    assert main([name, "--quick", *flags]) == 0
    uses_processes = getrusage(RUSAGE_CHILDREN).ru_utime > cpu_seconds
    assert uses_processes == (name not in CLOSED_FORMS)
    page = (tmp_path / f"{name}.md").read_text()
    assert f"`python -m experiments {name} --requests {requests} --quick`" in page
    assert "simulated" in page.lower()
    pictures = [line.split("](")[1].rstrip(")") for line in page.splitlines() if "![" in line]
    assert pictures
    for picture in pictures:
        assert (tmp_path / picture).stat().st_size > 1000
    if name not in ("sensitivity",):
        assert "| claimed |" in " ".join(page.split())


@pytest.mark.full
def test_every_file_has_its_part_of_the_code() -> None:
    parts = code_size.count_parts()
    whole = code_size.count_package(Path(gllm.__file__).parent)
    assert code_size.add_sizes(parts) == whole
    server = code_size.add_sizes(parts, code_size.BESIDE)
    assert set(code_size.BESIDE) < set(parts)
    assert 0 < server.num_code_lines < whole.num_code_lines < whole.num_lines


def test_loss_of_link_encodings(tmp_path: Path) -> None:
    assert main(["link-encoding", "--quick", "--output", str(tmp_path)]) == 0
    page = (tmp_path / "link-encoding.md").read_text()
    (claim,) = (line for line in page.splitlines() if "float32, links encoded: 5" in line)
    assert "aim: <= 0.500 %" in claim
    assert "| yes" in claim
    assert "aim: <= 0.530 x" in page


@pytest.mark.full
@pytest.mark.parametrize("name", ["prediction"], indirect=True)
def test_prediction_of_the_real_engine(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    # How near it comes depends on what else the machine does; that it says so does not.
    assert main([name, "--quick", "--output", str(tmp_path)]) == 0
    page = (tmp_path / "prediction.md").read_text()
    for metric in ("TTFT", "TPOT", "E2EL"):
        assert f"median {metric}, ms" in page
    assert "SLO attainment at speed" in page
    assert "1 stage, Poisson, 60 %: mean TTFT at the client, raw" in page
    lines = re.findall(r"^(.+): (\d+) of (\d+), \d+ s$", capsys.readouterr().err, re.MULTILINE)
    ends = {title: (done, total) for title, done, total in lines}
    assert sorted(ends) == ["parts of the model", "profile"]
    assert all(done == total for done, total in ends.values())


def serve_simulated(config: EngineConfig, jobs: list[WorkloadRequest]) -> list[StepLogEvent]:
    """Return the step log of a simulated pipeline in place of a real engine's."""
    stages = config.pipeline_parallel_size
    scheduler = config.scheduler.resolve(stages, 1000, 1024)
    deployment = Deployment("simulated", [1] * stages, ConstantCostModel(0.01), scheduler)
    return simulate_scheduler_requests(deployment, to_scheduler_requests(jobs))[1]


def test_replay_of_known_times(tmp_path: Path) -> None:
    page = write_result(replay.run(OPTIONS, serve_simulated), "replay", "gllm", tmp_path)
    text = page.read_text()
    assert text.count("100.0 %") == 4  # a row, the aim of the calls, both figures
    assert "**miss**" not in text


@pytest.mark.full
def test_replay_of_the_real_engine(tmp_path: Path) -> None:
    assert main(["replay", "--quick", "--output", str(tmp_path)]) == 0
    lines = (tmp_path / "replay.md").read_text().splitlines()
    # How many plans the times give again depends on what else the machine does.
    (calls,) = (line for line in lines if "recorded calls" in line and "aim:" in line)
    assert "**miss**" not in calls
    assert calls.count("100.0 %") == 2


def test_ablation_of_a_simulated_pipeline() -> None:
    result = real_ablation.run(OPTIONS, serve_simulated)
    assert "demo at --pp 2" in result.text
    assert BASE in result.text
    assert result.plots


@pytest.mark.long
def test_the_real_ablation(tmp_path: Path) -> None:
    assert main(["ablation", "--real", "--quick", "--output", str(tmp_path)]) == 0
    page = (tmp_path / "ablation-real.md").read_text()
    assert "demo at --pp 2" in page
    assert BASE in page


def test_what_cannot_be_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["slo", "--real"]) == 2
    assert "--real supports ablation" in capsys.readouterr().err
    assert main(["slo", "--results", str(tmp_path)]) == 2
    assert "--results supports planners, not slo" in capsys.readouterr().err
    assert main(["planners", "--seconds", "5"]) == 2
    assert "--seconds needs --results" in capsys.readouterr().err
    for arguments in (["slo", "--requests", "2"], ["nothing"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert arguments[-1] in capsys.readouterr().err
    assert set(REAL) <= set(EXPERIMENTS)


def test_a_page_names_its_misses(tmp_path: Path) -> None:
    claims = [
        PaperClaim(name, ExpectedChange(paper), 0.02) for name, paper in (("a", 0.01), ("b", -0.01))
    ]
    result = ExperimentResult("Title", "Text.", claims)
    run_time = RunTime(12.3, 20.1, 2)
    page = write_result(result, "x", "python -m experiments x", tmp_path, run_time)
    text = page.read_text()
    assert text.startswith("# Title")
    assert text.count("**miss**") == 1
    assert "Run time: 12 s with --jobs 2 on " in text
    assert "20 s of CPU time" in text


def made_by(page: Path) -> list[str]:
    """Return the words of the command that made a page."""
    (command,) = re.findall(
        r"^Made by `(python -m experiments .*?)`", page.read_text(), re.MULTILINE
    )
    return shlex.split(command)


@pytest.mark.parametrize(
    "page",
    sorted({*PAGES.glob("[!R]*.md")} - {claims_page.PAGE, PAGES / "misses.md"}),
    ids=lambda page: page.stem,
)
def test_pages_name_valid_commands(page: Path) -> None:
    words = made_by(page)
    values = make_parser().parse_args(words[3:])
    (name,) = values.names
    assert shlex.split(format_command(name, values)) == words
    mode = "".join(f"-{mode}" for mode in MODES if getattr(values, mode))
    assert page.stem == name + mode
    assert re.search(
        r"^Made by .* Run time: \d+ s with --jobs \d+ on", page.read_text(), re.MULTILINE
    )


@pytest.mark.full
def test_made_by_line_repeats_the_page(tmp_path: Path) -> None:
    first, second = tmp_path / "a folder", tmp_path / "second"
    arguments = ["volatility", "weak-links", "--requests", "8", "--quick", "--jobs", "2"]
    assert main([*arguments, "--output", str(first)]) == 0
    flags = ["--requests", "8", "--quick"]
    assert made_by(first / "weak-links.md") == ["python", "-m", "experiments", "weak-links", *flags]
    words = made_by(first / "volatility.md")
    assert words == ["python", "-m", "experiments", "volatility", *flags]
    assert main([*words[3:], "--jobs", "1", "--output", str(second)]) == 0
    texts = [(folder / "volatility.md").read_text() for folder in (first, second)]
    without_time = [re.sub("Run time: .*", "", text) for text in texts]
    assert without_time[0] == without_time[1]


def test_reading_curves() -> None:
    curve = [(1.0, 1.0), (2.0, 0.9), (3.0, 0.5), (4.0, 0.6)]
    assert interpolate_rate(curve, 0.7) == pytest.approx(2.5)
    assert interpolate_rate(curve, 0.1) == 4.0
    assert interpolate_rate([(1.0, 0.2)], 0.8) == 0.0
    assert coverage(curve) == pytest.approx((0.95 + 0.7 + 0.55) / 3)
    assert coverage(curve[:1]) == 1.0
    figures = [(rate, {"ttft": {"mean": t}, "e2el": {"mean": t}}) for rate, t in
               ((1.0, 1.0), (2.0, 1.5), (3.0, 5.0), (4.0, 1.0))]  # fmt: skip
    assert turning_point(figures) == 2.0
    assert slope(figures[:3]) == 2.0


class QueueSimulator:
    """Queue of one server in place of a pipeline: it serves 4 requests per second."""

    service_seconds = 0.25

    def __init__(self) -> None:
        self.num_requests: list[int] = []
        """Of each simulation."""

    def __call__(self, trial: SimulationTrial) -> RunRecord:
        """Return a run with regular arrivals."""
        self.num_requests.append(trial.requests)
        config = SchedulerConfig().resolve(1, 10, 16)
        steps: list[MicroBatch] = []
        start = StartEvent(0.0, "queue", [1], config, "simulator")
        run = RunRecord(start, micro_batches=steps)
        end = 0.0
        for seq in range(trial.requests):
            arrival = 0.0 if trial.arrivals == "static" else seq / trial.rate
            begin = max(end, arrival)
            end = begin + self.service_seconds
            line = RequestTimeline(arrival, [end], 1)
            run.requests[seq] = ServedRequest(1, 1, line, first_scheduled_time=begin)
            work = StageWork(seq, 1, ((0, 1),), 0, 0, 1)
            steps.append(MicroBatch(begin, work, 1, 0, [StepTime(seq, begin, end)], end))
        return run


def test_rates_are_shares_of_capacity() -> None:
    queue = QueueSimulator()
    base = SimulationTrial(trials.L20_32B, "azure-conv", "throttle", 1.0, 100, seed=99)
    options = ExperimentOptions(progress=False, jobs=1)
    ((half, full),) = trials.plan_rates([base], (0.5, 1.0), options, queue)
    assert full.rate == pytest.approx(4.0, rel=0.026)
    assert half.rate == pytest.approx(full.rate / 2)
    assert full.requests == 100
    # The first simulation estimates the capacity.
    assert queue.num_requests[0] == 100
    assert min(queue.num_requests[1:]) == trials.CAPACITY_REQUESTS
    num_simulations = len(queue.num_requests)
    assert trials.plan_rates([base], (1.0,), options, queue) == [[full]]
    assert len(queue.num_requests) == num_simulations  # The capacity is known.
    ((quick,),) = trials.plan_rates([base], (1.0,), OPTIONS, queue)
    assert quick.rate == pytest.approx(4.0, rel=0.1)
    assert len(queue.num_requests) == num_simulations + 1


def test_medians_over_rounds() -> None:
    rounds = [{"a": n, "b": {"c": 10 * n}, "d": [n, -n], "e": {}} for n in (1, 5, 2)]
    assert median_figures(rounds) == {"a": 2, "b": {"c": 20}, "d": [2, -2], "e": {}}


def test_a_count_that_a_round_lacks_is_zero() -> None:
    rounds: list[dict[str, Any]] = [{"n": {"8": 4}}, {"n": {"8": 2, "16": 6}}, {"n": {"16": 2}}]
    assert median_figures(rounds) == {"n": {"8": 2, "16": 2}}
