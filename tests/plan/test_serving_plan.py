"""plan.yaml: what is written is read again, and what cannot be served is refused by its path."""

from pathlib import Path
from typing import Any

import msgspec
import pytest

from gllm.plan.serving_plan import (
    EnginePlan,
    ExpectedFigures,
    LatencyGoals,
    LinkPlan,
    NodePlan,
    PlanError,
    RouterPlan,
    ServingPlan,
    StagePlan,
    check_plan,
    read_plan,
    write_plan,
)

PLAN = ServingPlan(
    model="Qwen/Qwen2.5-32B-Instruct",
    nodes={
        "a": NodePlan("10.0.0.1", ["A100-80G", "A100-80G"], 4.42),
        "b": NodePlan("10.0.0.2", ["L20", "L20"]),
    },
    links={"a-b": LinkPlan(25, 0.1)},
    engines={
        "p0": EnginePlan([StagePlan("a", 64, [0, 1])], "prefill", {"policy": "sarathi"}),
        "d0": EnginePlan([StagePlan("b", 32, [0]), StagePlan("b", 32, [1])], "decode"),
    },
    router=RouterPlan("a", policy="round-robin"),
    routes={"p0": {"d0": 1.0}},
    slo=LatencyGoals(2.0, 0.1),
    workload="azure-conv",
    expected=ExpectedFigures("gllm plan hetero --seed 0", 3.1, attainment=0.93),
)


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(PLAN, path)
    assert read_plan(path) == PLAN
    assert "policy: sarathi" in path.read_text()


def test_devices_are_counted() -> None:
    assert [each.num_devices for each in PLAN.engines.values()] == [2, 2]
    assert StagePlan("a", 4).num_ranks == 1


def change(**fields: Any) -> ServingPlan:
    return msgspec.structs.replace(PLAN, **fields)


def change_engine(**fields: Any) -> ServingPlan:
    engine = msgspec.structs.replace(PLAN.engines["p0"], **fields)
    return change(engines={**PLAN.engines, "p0": engine})


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (change(version=2), "version: 2 is not 1"),
        (change(engines={}, routes={}), "engines: empty"),
        (change_engine(role="both"), "engines.p0.role: 'both' is none of mixed"),
        (change_engine(stages=[]), "engines.p0.stages: empty"),
        (change_engine(stages=[StagePlan("c", 4)]), "engines.p0.stages[0].node: 'c' is none of a"),
        (
            change_engine(stages=[StagePlan("a", 0)]),
            "engines.p0.stages[0].layers: 0: a stage has at least 1",
        ),
        (
            change_engine(stages=[StagePlan("a", 4, [2])]),
            "engines.p0.stages[0].devices: 2: node a has 2 devices",
        ),
        (
            change_engine(stages=[StagePlan("a", 4, [0, 0])]),
            "engines.p0.stages[0].devices: 0 of node a belongs to",
        ),
        (
            change_engine(stages=[StagePlan("b", 4, [0])]),
            "engines.d0.stages[0].devices: 0 of node b belongs to engines.p0.stages[0]",
        ),
        (
            change_engine(stages=[StagePlan("b", 2), StagePlan("a", 2), StagePlan("b", 2)]),
            "engines.p0.stages: those on node b are no neighbours",
        ),
        (
            change_engine(stages=[StagePlan("a", 2), StagePlan("a", 2, [0])]),
            "engines.p0.stages: those on node a use its CPU and its devices",
        ),
        (change_engine(port=0), "engines.p0.port (node a): 0 is no port"),
        (
            change_engine(port=7998),
            "engines.p0.port (node a): 8000 of 10.0.0.1 belongs to router.port",
        ),
        (change(links={"a-c": LinkPlan(1, 1)}), "links.a-c: join the names of two nodes"),
        (change(router=RouterPlan("c")), "router.node: 'c' is none of a, b"),
        (change(routes={"p0": {"x": 1.0}}), "routes.p0: 'x' is no engine"),
        (change(routes={"d0": {"p0": 1.0}}), "routes.d0: 'd0' is no engine with a role for it"),
        (change(routes={"p0": {"d0": 0.5}}), "routes.p0: the shares"),
    ],
)
def test_what_cannot_be_served_is_refused_by_its_path(plan: ServingPlan, words: str) -> None:
    with pytest.raises(PlanError) as caught:
        check_plan(plan)
    assert str(caught.value).startswith(words)


def test_a_stage_may_have_one_layer_and_no_device() -> None:
    check_plan(change_engine(stages=[StagePlan("a", 1, [0]), StagePlan("a", 63, [1])]))
    check_plan(change(engines={"e": EnginePlan([StagePlan("a", 1)])}, routes={}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("model: x\nnodes: {}\n", "missing required field `engines`"),
        ("model: x\nnodes: {}\nengines: {}\nmachines: {}\n", "unknown field `machines`"),
        ("model: x\nnodes: {a: {host: 1}}\nengines: {}\n", "`$.nodes[...].host`"),
        ("model: [", "plan.yaml"),
    ],
)
def test_what_is_no_plan_is_refused(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    with pytest.raises(PlanError) as caught:
        read_plan(path)
    assert words in str(caught.value)
