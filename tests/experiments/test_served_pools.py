"""Pools with prefill and decode apart: colocated engines, the search of rates, and the page."""

from pathlib import Path

import msgspec
import pytest

from experiments import served_pools
from experiments.base import ExperimentOptions, write_result
from experiments.distserve_workloads import WORKLOADS
from experiments.served_plans import PlanLoad, ServedPlan, simulate_plan
from experiments.served_pools import SearchTask, Side, find_rate, plan_colocated
from gllm.observability.latency import slo_attainment
from gllm.options.slo import Slo
from gllm.plan.layout import Parallelism
from gllm.plan.serving_plan import ExpectedFigures, ServingPlan, check_plan

SMALL, LARGE = WORKLOADS[:2]


def test_colocated_engines_fill_the_gpus() -> None:
    plan = plan_colocated(LARGE, Parallelism(2, 2), "sarathi", 8)
    assert plan is not None
    check_plan(plan)
    engines = list(plan.engines.values())
    assert [[stage.devices for stage in engine.stages] for engine in engines] == [
        [[0, 1], [2, 3]],
        [[4, 5], [6, 7]],
    ]
    assert all(sum(stage.layers for stage in engine.stages) == 64 for engine in engines)
    assert engines[0].scheduler["max-num-batched-tokens"] == 512
    assert plan_colocated(LARGE, Parallelism(1), "vllm", 8) is None, "132 GB do not fit"
    assert plan_colocated(LARGE, Parallelism(8), "vllm", 7) is None


def test_the_highest_rate_is_found() -> None:
    plan = plan_colocated(SMALL, Parallelism(1), "vllm", 1)
    assert plan is not None
    load = PlanLoad("fixed:256,16", Slo(0.2, 0.1), 3, 2048)
    side = find_rate(SearchTask("vllm", plan, load, 4.0, 60))
    assert side.num_gpus == 1
    assert side.rate_per_gpu == side.rate > 1

    def share(rate: float) -> float:
        at = msgspec.structs.replace(side.plan, expected=ExpectedFigures("a test", rate))
        return slo_attainment(simulate_plan(at, load, 60), load.slo)

    assert share(side.rate) >= 0.9 > share(side.rate * 2 ** (1 / served_pools.STEPS_PER_DOUBLING))
    # A single prompt takes longer than this limit.
    late = load._replace(slo=Slo(1e-3, 0.1))
    assert find_rate(SearchTask("vllm", plan, late, 4.0, 20)).rate == 0


def test_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides are served at the rates that were found."""
    plan = plan_colocated(SMALL, Parallelism(2), "vllm", 2)
    assert plan is not None
    apart = msgspec.structs.replace(plan, expected=ExpectedFigures("a test", 4.0))
    rates: list[float] = []

    def find(task: SearchTask) -> Side:
        rate = {"apart": 4.0, "vllm": 2.0, "sarathi": 1.0}[task.title]
        expected = ExpectedFigures("a test", rate)
        return Side(task.title, msgspec.structs.replace(task.plan, expected=expected))

    def serve(plan: ServingPlan, load: PlanLoad, seconds: float) -> ServedPlan:
        assert plan.expected is not None
        rates.append(plan.expected.rate)
        return ServedPlan(0.5, 20, (0.1, 0.2), (0.01, 0.02))

    monkeypatch.setattr(served_pools, "plan_apart", lambda workload, budget: apart)
    monkeypatch.setattr(served_pools, "serve_plan", serve)
    monkeypatch.setattr(served_pools, "CUTS", {SMALL.model: (Parallelism(2),)})
    monkeypatch.setattr(served_pools, "find_rate", find)
    result = served_pools.run(ExperimentOptions(requests=20, quick=True, progress=False, jobs=1))
    text = write_result(result, "pools", "gllm", tmp_path).read_text()
    assert rates == [4.0, 2.0], "of both sides, of the colocated ones the better"
    gain, _, *shares = result.claims
    assert gain.ours == 1.0
    assert gain.verdict.is_met
    assert [claim.verdict.is_met for claim in shares] == [False, False], "half of them were late"
    assert text.count("| 50.0 % |") == 4, "of each side in the table and in a claim"
