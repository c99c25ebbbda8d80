"""Expected figures of a plan beside those of its engines' step logs."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from gllm.commands.plan.diff import main
from gllm.observability.step_log import StartEvent, StepLogEvent, StepLogWriter
from gllm.plan.plan_diff import (
    FigureComparison,
    compare_with_plan,
    find_exceeding_figures,
    measure_startup,
    read_engine_run,
)
from gllm.plan.serving_plan import (
    EnginePlan,
    ExpectedFigures,
    LatencyGoals,
    NodePlan,
    PlanError,
    ServingPlan,
    StagePlan,
    write_plan,
)
from gllm.sim.deployment import simulate
from gllm.sim.workloads.requests import WorkloadRequest
from tests.support.sim.cluster_parts import make_deployment

STEP = 0.05
"""Seconds of each step: all requests have this TTFT and TPOT while few run."""


def make_plan(*roles: str, slo: LatencyGoals | None = None, **expected: Any) -> ServingPlan:
    return ServingPlan(
        model="made up",
        nodes={"here": NodePlan("127.0.0.1")},
        engines={
            f"e{number}": EnginePlan([StagePlan("here", 1)], role)
            for number, role in enumerate(roles)
        },
        slo=slo or LatencyGoals(),
        expected=ExpectedFigures("a test", **expected) if expected else None,
    )


def make_log(
    gap: float, num_requests: int = 5, num_output: int = 4, start: float = 0.0
) -> list[StepLogEvent]:
    """The log of an engine whose requests arrive at equal intervals."""
    jobs = [WorkloadRequest(start + gap * index, 4, num_output) for index in range(num_requests)]
    events: list[StepLogEvent] = []
    simulate(make_deployment(), jobs, events.append)
    return events


def compare(plan: ServingPlan, *logs: Sequence[StepLogEvent]) -> dict[str, FigureComparison]:
    runs = [read_engine_run(plan, f"e{number}", log) for number, log in enumerate(logs)]
    return {each.name: each for each in compare_with_plan(plan, runs)}


def test_figures_of_one_engine() -> None:
    plan = make_plan(
        "mixed",
        slo=LatencyGoals(0.06, 0.04),
        rate=2.0,
        attainment=0.5,
        ttft_seconds=0.1,
        tpot_seconds=0.04,
    )
    figures = compare(plan, make_log(gap=1.0))
    assert figures["requests/s"].measured == pytest.approx(1.0)
    assert figures["requests/s"].difference == pytest.approx(-0.5)
    assert figures["TTFT median, ms"].measured == pytest.approx(STEP)
    assert figures["TPOT median, ms"].difference == pytest.approx(0.25)
    # No request keeps the limit of further tokens.
    assert figures["SLO attainment, %"].measured == 0.0
    assert figures["SLO attainment, %"].difference == -0.5
    assert figures["startup, s"].measured is None
    assert find_exceeding_figures(figures.values(), 0.3) == [
        "requests/s", "SLO attainment, %", "TTFT median, ms",
    ]  # fmt: skip


def test_rates_of_engines_add_up_whatever_their_clocks_are() -> None:
    figures = compare(
        make_plan("mixed", "mixed", rate=3.0), make_log(gap=1.0), make_log(gap=0.5, start=9e5)
    )
    assert figures["requests/s"].difference == pytest.approx(0.0)
    assert figures["SLO attainment, %"].measured is None


def test_engines_with_a_phase_are_measured_in_it() -> None:
    plan = make_plan("prefill", "decode", slo=LatencyGoals(0.06, 0.04), rate=1.0)
    prefill = make_log(gap=1.0, num_output=1)
    figures = compare(plan, prefill, make_log(gap=0.25))
    assert figures["requests/s"].difference == pytest.approx(0.0)
    # All prompts are in time, no further token is.
    assert figures["SLO attainment, %"].measured == 0.0
    loose = msgspec.structs.replace(plan, slo=LatencyGoals(0.06, 0.06))
    assert compare(loose, prefill, make_log(gap=0.25))["SLO attainment, %"].measured == 1.0


def test_a_log_without_requests_has_no_figures() -> None:
    figures = compare(make_plan("mixed", rate=1.0), make_log(1.0)[:1])
    assert all(each.measured is None and each.difference is None for each in figures.values())


def test_the_log_of_other_stages_is_refused() -> None:
    plan = make_plan("mixed")
    start = make_log(1.0)[0]
    assert isinstance(start, StartEvent)
    other = msgspec.structs.replace(start, layers=[1, 1])
    with pytest.raises(PlanError, match=r"engines.e0.stages: \[1\] layers on \[1\] ranks, but"):
        read_engine_run(plan, "e0", [other])


def test_startup_lasts_until_the_end_of_the_warm_up() -> None:
    events = make_log(gap=1.0)
    start = events[0]
    assert isinstance(start, StartEvent)
    assert measure_startup(events) is None
    # The first request counts as the warm-up: a prompt and three further tokens.
    real = msgspec.structs.replace(start, process_seconds=7.0, warm_ups=1)
    assert measure_startup([real, *events[1:]]) == pytest.approx(7.0 + 4 * STEP)
    assert measure_startup([real]) is None


@pytest.fixture
def files(tmp_path: Path) -> Path:
    write_plan(make_plan("mixed", "mixed", rate=2.0), tmp_path / "plan.yaml")
    for name in ("e0", "other"):
        log = StepLogWriter(tmp_path / f"{name}.jsonl")
        for event in make_log(gap=1.0):
            log.write(event)
        log.close()
    return tmp_path


def test_the_command_prints_a_table(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan, logs = str(files / "plan.yaml"), [f"{files}/e0.jsonl", f"e1={files}/other.jsonl"]
    assert main([plan, *logs, "--tolerance", "0.1"]) == 0
    output = capsys.readouterr().out
    assert "| requests/s        | 2        | 2        | +0.0%      |" in output
    assert "| e1     | mixed | 5        | 1          | 50       | 50       |" in output
    assert main([plan, logs[0], "--tolerance", "0.1", "--json"]) == 1
    captured = capsys.readouterr()
    (rate, *_) = json.loads(captured.out)
    assert rate == {
        "name": "requests/s", "expected": 2.0, "measured": 1.0, "difference": -0.5,
    }  # fmt: skip
    assert "more than 10% from the plan: requests/s" in captured.err


def test_a_log_of_no_engine_is_refused(files: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(files / "plan.yaml"), f"{files}/other.jsonl"]) == 2
    assert f"named as none of e0, e1: write ENGINE={files}/other.jsonl" in capsys.readouterr().err
    assert main([str(files / "plan.yaml"), f"e0={files}/none.jsonl"]) == 2
