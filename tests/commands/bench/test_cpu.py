"""Benchmarks on a CPU: pages that keep their words, verdicts on figures that are known."""

import argparse
from pathlib import Path

import pytest

from benchmarks.cpu import bursts, overhead, pipeline
from benchmarks.cpu.page import BEGIN, END, ForeignCpu, page_path, write_figures
from benchmarks.cpu.rounds import Round
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.deployment import roofline_deployment, simulate
from gllm.sim.metrics.report import summarize_run
from gllm.sim.metrics.run_record import RunRecord
from gllm.sim.workloads.requests import WorkloadRequest

pytestmark = pytest.mark.full


def served(jobs: list[WorkloadRequest], policy: str = "throttle") -> RunRecord:
    scheduler = SchedulerConfig(policy=policy)
    deployment = roofline_deployment("qwen2.5-14b", "A100-40G", 2, 4096, scheduler=scheduler)
    return simulate(deployment, jobs)


def test_words_around_the_figures_stay(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    write_figures(page, "Title", "old figures")
    assert page.read_text() == f"# Title\n\n{BEGIN}\n\nold figures\n\n{END}\n"
    page.write_text(page.read_text() + "\nWhat it means.\n")
    write_figures(page, "Other", "new figures")
    text = page.read_text()
    assert text.startswith("# Title")
    assert "old" not in text
    assert text.endswith("new figures\n\n" + END + "\n\nWhat it means.\n")


def test_results_are_not_written_over_their_page() -> None:
    assert page_path("docs/page.md") == Path("docs/page.md")
    with pytest.raises(argparse.ArgumentTypeError, match=r"name the page, docs/page\.md"):
        page_path("docs/page.json")


def test_own_work_is_not_foreign() -> None:
    foreign = ForeignCpu()
    sum(range(3_000_000))
    assert 0 <= foreign.cores() < 1000


def test_a_pipeline_beside_its_loops() -> None:
    jobs = [WorkloadRequest(0.0, 32, 16)] * 8
    run = served(jobs)
    seconds = run.end_time() - run.begin_time()
    loops = [[seconds / 10] * 6, [seconds / 10] * 8]
    rounds = [Round(jobs, seconds * factor, run, loops, 0.0) for factor in (1.0, 1.25, 0.8)]
    figures = pipeline.figures_of(rounds)
    assert figures["ratio"] == pytest.approx(0.8)
    assert figures["ratios"] == pytest.approx([0.8, 0.64, 1.0])
    assert figures["served_tokens_per_second"] == pytest.approx(8 * 48 / seconds)
    assert figures["loops_tokens_per_second"] == pytest.approx(8 * 48 / seconds / 0.8)
    assert figures["bubble_share"] == [use.bubble_share for use in run.stage_usages()]
    good = figures | {"ratio": 0.95, "bubble_share": [0.0, 0.05]}
    assert pipeline.verdict({"x": good}).count("**missed**") == 0
    assert pipeline.verdict({"x": good | {"ratio": 0.94}}).count("**missed**") == 1
    assert pipeline.verdict({"x": good | {"bubble_share": [0.0, 0.06]}}).count("**missed**") == 1


def test_overhead_is_what_kernels_leave_of_a_served_step() -> None:
    steps = overhead.Steps(served=50.0, computing=49.0, loop=48.0, kernels=48.0)
    assert steps.overhead == pytest.approx(0.04)
    text = overhead.format_page({16: [steps, overhead.Steps(60.0, *steps[1:]), steps]}, 3)
    assert "Aim: at most 5% at 16 decodes: met." in text


def test_policies_under_bursts_show_the_best_of_each_column() -> None:
    jobs = bursts.make_jobs("azure-conv", 40, 20.0, seed=3)
    assert [job.arrival_seconds for job in jobs][:: bursts.BURST] == [0.0, 0.4, 0.8, 1.2, 1.6]
    policies = {}
    for policy in bursts.POLICIES:
        summary = summarize_run(served(jobs, policy))
        policies[policy] = bursts.median_figures([summary, summary])
    measured = {"rate": 20.0, "requests": 40, "rounds": 2, "foreign_cores": 0.0}
    text = bursts.format_page({"azure-conv": measured | {"policies": policies}})
    assert text.count("**") >= 2 * len(bursts.COLUMNS)
