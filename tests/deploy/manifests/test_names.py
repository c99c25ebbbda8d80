"""Names of processes and objects are unique over engines and the router, or the plan is refused."""

from collections import Counter
from collections.abc import Callable

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.deploy.up.engine_manager import EngineManager
from gllm.plan.emit.registry import emit_manifests
from gllm.plan.processes import LaunchOptions, commands_for
from gllm.plan.serving_plan import (
    EnginePlan,
    NodePlan,
    PlanError,
    RouterPlan,
    ServingPlan,
    StagePlan,
    check_plan,
)
from tests.deploy.manifests.test_emitted import OPTIONS
from tests.support.examples import num_examples

NAMES = st.lists(
    st.sampled_from(["router", "router-hub", "router-0", "a", "a-0", "b"]),
    min_size=1,
    max_size=4,
    unique=True,
)


def make_plan(names: list[str], has_router: bool) -> ServingPlan:
    return ServingPlan(
        model="demo",
        nodes={"x": NodePlan("10.0.0.1"), "y": NodePlan("10.0.0.2")},
        engines={name: EnginePlan([StagePlan("x", 3), StagePlan("y", 3)]) for name in names},
        router=RouterPlan("x") if has_router else None,
    )


def refusal_of(check: Callable[[], object]) -> str:
    """Return the message of a PlanError; empty without one."""
    try:
        check()
    except PlanError as error:
        return str(error)
    return ""


@given(NAMES, st.booleans())
@settings(max_examples=num_examples(4, 200), deadline=None)
def test_every_process_of_a_checked_plan_has_a_name_of_its_own(
    names: list[str], has_router: bool
) -> None:
    plan = make_plan(names, has_router)
    if refusal := refusal_of(lambda: check_plan(plan)):
        assert refusal.startswith("engines.router: this is the name of the router")
        assert has_router
        return
    num_processes = len(names) + has_router
    specs = commands_for(plan, "x", LaunchOptions("secret"))
    assert len({spec.name for spec in specs}) == len(specs) == num_processes
    document = yaml.safe_load(emit_manifests("compose", plan, OPTIONS)["compose.x.yaml"])
    assert len(document["services"]) == num_processes
    if refusal := refusal_of(lambda: emit_manifests("lws", plan, OPTIONS)):
        assert "give the engine another name" in refusal
        return
    text = emit_manifests("lws", plan, OPTIONS)["gllm.yaml"]
    created: Counter[tuple[str, str]] = Counter()
    for each in yaml.safe_load_all(text):
        kind, name = each["kind"], each["metadata"]["name"]
        created[kind, name] += 1
        if kind == "LeaderWorkerSet":
            # Its controller creates these.
            for implied in (("Service", name), ("StatefulSet", name), ("StatefulSet", f"{name}-0")):
                created[implied] += 1
    assert max(created.values()) == 1


def test_an_engine_with_the_name_of_the_router_is_refused() -> None:
    plan = make_plan(["router"], True)
    with pytest.raises(PlanError, match=r"engines\.router: this is the name of the router"):
        check_plan(plan)
    check_plan(make_plan(["router"], False))
    specs = commands_for(plan, "x", LaunchOptions("secret"))
    for start in (
        lambda: EngineManager(specs, lambda spec: None, lambda ready: None),  # type: ignore[arg-type, return-value]
        lambda: emit_manifests("compose", plan, OPTIONS),
    ):
        with pytest.raises(PlanError, match=r"have the same name: give the engine another name"):
            start()


@pytest.mark.parametrize(
    ("names", "has_router", "words"),
    [
        (["router-hub"], True, "engines.router-hub: .* both have a Service gllm-router-hub"),
        (["a", "a-0"], False, "engines.a-0: .* both have a StatefulSet gllm-a-0"),
    ],
)
def test_objects_of_one_kind_with_one_name_are_refused(
    names: list[str], has_router: bool, words: str
) -> None:
    with pytest.raises(PlanError, match=words):
        emit_manifests("lws", make_plan(names, has_router), OPTIONS)
