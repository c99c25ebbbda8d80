"""The benchmark of policies: its figures on a run whose figures are known."""

import pytest

from benchmarks.policies import BASE, POLICIES, Evenness, evenness, measure, table, verdict
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.deployment import roofline_deployment, simulate
from gllm.sim.metrics.run_record import RunRecord
from gllm.sim.workloads.requests import WorkloadRequest, make_workload

pytestmark = pytest.mark.full


def times(base: Evenness, factor: float) -> Evenness:
    variations = base.tokens_variation * factor, base.decodes_variation * factor
    return Evenness(base.steps, base.tokens, base.decodes, *variations, *base[5:])


def serve(policy: str, jobs: list[WorkloadRequest]) -> tuple[RunRecord, list[list[int]]]:
    scheduler = SchedulerConfig(policy=policy)
    run = simulate(
        roofline_deployment("qwen2.5-14b", "A100-40G", 2, 4096, scheduler=scheduler), jobs
    )
    return run, [[1, 2], [3]]


def test_figures_are_those_of_all_micro_batches() -> None:
    run, _ = serve("sarathi", make_workload("uniform:16,400,16,60", 60, 20.0))
    figures = evenness(run)
    assert figures.steps == len(run.micro_batches)
    assert figures.tokens * len(run.micro_batches) == sum(
        step.work.num_tokens for step in run.micro_batches
    )
    assert figures.local_variation <= figures.decodes_variation


def test_policies_side_by_side() -> None:
    measured = measure(serve, 0.7, 40, 2)
    assert len(measured.capacities) == 2
    # What the policies are for: sarathi lumps decodes, throttle does not.
    figures = measured.figures
    assert figures["throttle"].local_variation < figures[BASE].local_variation / 2
    assert table(measured).count("| yes") == len(POLICIES)
    measured.outputs["balance"].add(b"other")
    changed = table(measured).splitlines()
    assert [row.split()[1] for row in changed if "**no**" in row] == ["balance"]


def test_the_verdict() -> None:
    base = evenness(serve(BASE, make_workload("uniform:16,400,16,60", 20, 20.0))[0])
    for factor, word in ((0.5, "(met)"), (0.51, "**missed**")):
        assert verdict({BASE: base, "throttle": times(base, factor)}).count(word) == 2
