"""Measurement of written plans, and the cases of the page of planners."""

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from experiments.base import ExperimentOptions
from experiments.planners import (
    NOT_RUN,
    SLO,
    Case,
    CaseResult,
    describe_engines,
    keeps_promise,
    make_cases,
    price_plan,
    result_row,
    run_cases,
    service_key,
    shorten_bound,
)
from experiments.served_plans import PlanLoad, ServedPlan, build_engines, measure_plan
from gllm.plan.attainment import AttainmentVerdict
from gllm.plan.nodes import cluster_names
from gllm.plan.serving_plan import (
    EnginePlan,
    ExpectedFigures,
    LinkPlan,
    NodePlan,
    RouterPlan,
    ServingPlan,
    StagePlan,
)
from gllm.plan.strategies import STRATEGIES
from gllm.sim.hardware.shapes import MODELS

MODEL = "opt-13b"
FLAGS = {"max-model-len": 2048}
MIXED = ServingPlan(
    MODEL,
    {"x": NodePlan("10.0.0.1", ["A100-80G"] * 2, link=LinkPlan(2400, 0.005))},
    {
        "a": EnginePlan([StagePlan("x", 40, [0])], flags=FLAGS),
        "b": EnginePlan([StagePlan("x", 40, [1])], flags=FLAGS),
    },
    router=RouterPlan("x", policy="least-requests"),
    expected=ExpectedFigures("gllm plan", 4.0, attainment=0.95),
)


def at_rate(plan: ServingPlan, rate: float) -> ServingPlan:
    assert plan.expected is not None
    return msgspec.structs.replace(plan, expected=msgspec.structs.replace(plan.expected, rate=rate))


def test_a_plan_is_measured_at_the_rate_of_its_file() -> None:
    measured = measure_plan(MIXED, PlanLoad("fixed:64,4", SLO, 3), 120)
    assert measured.attainment.share == 1
    assert measured.requests_per_second == pytest.approx(4, rel=0.3)
    # Two engines at 2 requests per second have one bottleneck each; at 1000 both are overloaded.
    late = measure_plan(at_rate(MIXED, 1000.0), PlanLoad("fixed:512,64", SLO, 3), 400)
    assert late.requests_per_second < 200
    assert late.attainment.share < 1
    result = CaseResult(Case("scale", "hom4", MODEL, (), 120), "", "none", MIXED, late)
    assert not keeps_promise(result._replace(measured=late._replace(
        attainment=replace(late.attainment, verdict=AttainmentVerdict.OVERLOADED)
    )))  # fmt: skip
    assert keeps_promise(result._replace(measured=measured))
    assert result_row(result)[4] == f"{2 * 1.72:.2f}"


def test_engines_are_those_of_the_file() -> None:
    engines = build_engines(MIXED)
    assert {name: engine.scheduler.max_model_len for name, engine in engines.items()} == {
        "a": 2048,
        "b": 2048,
    }
    small = msgspec.structs.replace(MIXED, nodes={"x": NodePlan("10.0.0.1", ["RTX4090"] * 2)})
    with pytest.raises(ValueError, match="memory for 0 tokens"):
        build_engines(small)


def test_transfers_of_several_engines_share_the_link_of_their_machine() -> None:
    gbit, prompt = 10.0, 1000
    plan = ServingPlan(
        MODEL,
        {node: NodePlan(f"10.0.0.{i}", ["H200"] * 2) for i, node in enumerate("xy", 1)},
        {
            "p0": EnginePlan([StagePlan("x", 40, [0])], "prefill", flags=FLAGS),
            "p1": EnginePlan([StagePlan("x", 40, [1])], "prefill", flags=FLAGS),
            "d0": EnginePlan([StagePlan("y", 40, [0])], "decode", flags=FLAGS),
            "d1": EnginePlan([StagePlan("y", 40, [1])], "decode", flags=FLAGS),
        },
        links={"x-y": LinkPlan(gbit, 0.05)},
        router=RouterPlan("x", preset="flow"),
        routes={"p0": {"d0": 0.5, "d1": 0.5}, "p1": {"d0": 0.5, "d1": 0.5}},
        expected=ExpectedFigures("gllm plan", 1000.0),
    )
    measured = measure_plan(plan, PlanLoad(f"fixed:{prompt},2", SLO, 3), 60)
    shape = MODELS[MODEL]
    most = gbit * 1e9 / 8 / (prompt * shape.layers * shape.kv_bytes)
    assert 0.7 * most < measured.requests_per_second < 1.05 * most


def test_flows_of_the_router_come_before_routes() -> None:
    """Routes divide the requests of each prefill engine, flows those of the service too."""
    stages = [[StagePlan("x", 40, [index])] for index in range(3)]
    plan = msgspec.structs.replace(
        MIXED,
        nodes={"x": NodePlan("10.0.0.1", ["A100-80G"] * 3)},
        engines={
            "p0": EnginePlan(stages[0], "prefill", flags=FLAGS),
            "p1": EnginePlan(stages[1], "prefill", flags=FLAGS),
            "d": EnginePlan(stages[2], "decode", flags=FLAGS),
        },
        router=RouterPlan("x", preset="flow"),
        routes={"p0": {"d": 1.0}, "p1": {"d": 1.0}},
    )
    assert plan.router is not None
    skewed = msgspec.structs.replace(plan.router, flags={"routes": "p0:d=1000,p1:d=1"})
    even, uneven = (
        measure_plan(each, PlanLoad("fixed:1000,1", SLO, 3), 40).requests_per_second
        for each in (
            at_rate(plan, 1000.0),
            at_rate(msgspec.structs.replace(plan, router=skewed), 1000.0),
        )
    )
    assert even == pytest.approx(2 * uneven, rel=0.1)


def test_every_planner_has_cases() -> None:
    cases = make_cases(False, 5000)
    assert {case.planner for case in cases} == set(STRATEGIES) - {"pools"}
    assert {case.cluster for case in cases if case.planner == "hetero"} == set(cluster_names())
    assert len({case.model for case in cases}) == 3


def test_texts() -> None:
    assert describe_engines(MIXED) == "2 x (1 A100-80G)"
    assert price_plan(MIXED) == pytest.approx(2 * 1.72)
    line = "Bound: 194 requests/s (relaxation: devices are divisible); this plan has 84% of it."
    assert shorten_bound(line) == "194 /s; this plan has 84% of it"


def test_results_of_cases_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A case that ended is not run again, and one that begins too late is named."""
    cases = [Case("scale", cluster, MODEL, ("--seed", "1"), 120) for cluster in ("hom", "hom4")]
    measured = measure_plan(MIXED, PlanLoad("fixed:64,4", SLO, 3), 40)
    runs: list[Case] = []

    def run(case: Case) -> CaseResult:
        runs.append(case)
        return CaseResult(case, "", "Bound: none", MIXED, measured, seconds=1.5)

    monkeypatch.setattr("experiments.planners.run_case", run)
    services: list[ServingPlan] = []

    def serve(plan: ServingPlan, load: PlanLoad, seconds: float) -> ServedPlan:
        services.append(plan)
        return ServedPlan(0.75, 20, (0.1, 0.2), (0.01, 0.02))

    monkeypatch.setattr("experiments.planners.serve_plan", serve)
    options = ExperimentOptions(progress=False, results=tmp_path)
    late = run_cases(cases, replace(options, seconds=0.0))
    assert [result.note for result in late] == [NOT_RUN] * 2
    first = run_cases(cases, options)
    assert run_cases(cases, options) == first
    assert runs == cases
    # Other flags are another case; a plan that is there is served without a search.
    changed = cases[0]._replace(arguments=())
    run_cases([changed], options)
    (served,) = run_cases([cases[1]._replace(served_seconds=5.0)], options)
    assert served.served == 0.75
    assert runs == [*cases, changed]
    # The plan of the other cluster starts the same processes.
    again = run_cases([case._replace(served_seconds=5.0) for case in reversed(cases)], options)
    assert [result.served for result in again] == [0.75, 0.75]
    assert len(services) == 1


def test_the_same_processes_at_another_rate_are_another_service() -> None:
    renamed = {f"machine-{name}": node for name, node in MIXED.nodes.items()}
    engines = {
        name: msgspec.structs.replace(
            engine,
            stages=[
                msgspec.structs.replace(stage, node=f"machine-{stage.node}")
                for stage in engine.stages
            ],
        )
        for name, engine in MIXED.engines.items()
    }
    assert MIXED.router is not None
    router = msgspec.structs.replace(MIXED.router, node=f"machine-{MIXED.router.node}")
    moved = msgspec.structs.replace(MIXED, nodes=renamed, engines=engines, router=router, links={})
    assert service_key(at_rate(MIXED, 2.0)) != service_key(MIXED)
    assert service_key(moved) == service_key(MIXED)
