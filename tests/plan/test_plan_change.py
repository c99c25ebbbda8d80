"""Change of a running service: engines that stay, order of starts and stops, misfits."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.plan.plan_change import (
    ChangeAction,
    ChangeRole,
    StartEngine,
    StopEngine,
    adopt_plan,
    change_plan,
    pin_ports,
    undo_actions,
)
from gllm.plan.serving_plan import (
    NUM_ENGINE_PORTS,
    EnginePlan,
    ExpectedFigures,
    NodePlan,
    PlanError,
    RouterPlan,
    ServingPlan,
    StagePlan,
    check_plan,
)
from tests.support.examples import num_examples

NODES = {
    "x": NodePlan("127.0.0.1", ["H100"] * 3 + ["L20"] * 2),
    "y": NodePlan("127.0.0.2", ["H100"] * 2),
    "z": NodePlan("127.0.0.3"),
}


def make_plan(engines: dict[str, EnginePlan], **fields: Any) -> ServingPlan:
    """Return a plan of three nodes with a router."""
    router = fields.pop("router", RouterPlan("z", preset="distserve"))
    return ServingPlan("demo", NODES, engines, router=router, **fields)


def cpu(role: str = "mixed", **fields: Any) -> EnginePlan:
    """Return an engine on the CPU of a node."""
    return EnginePlan([StagePlan("z", 6)], role, **fields)


def gpus(*devices: int, node: str = "x", **fields: Any) -> EnginePlan:
    """Return an engine of one stage."""
    return EnginePlan([StagePlan(node, 6, list(devices))], **fields)


@st.composite
def plans(draw: st.DrawFn) -> ServingPlan:
    """Plans with engines on GPUs of two kinds and on a CPU, with roles and options."""
    free = {name: list(range(len(node.devices))) for name, node in NODES.items()}
    engines = {}
    for number in range(draw(st.integers(1, 6))):
        stages: list[StagePlan] = []
        for _ in range(draw(st.integers(1, 2))):
            node = stages[0].node if stages else draw(st.sampled_from("xyz"))
            ranks = draw(st.integers(1, 2))
            if node == "z":
                stages.append(StagePlan("z", 3))
            elif len(free[node]) >= ranks:
                order = draw(st.permutations(free[node]))
                free[node] = order[ranks:]
                stages.append(StagePlan(node, 3, order[:ranks]))
        stages = stages or [StagePlan("z", 3)]
        engines[f"e{number}"] = EnginePlan(
            stages,
            draw(st.sampled_from(["mixed", "prefill", "decode"])),
            draw(st.sampled_from([{}, {"policy": "sarathi"}])),
            draw(st.sampled_from([{}, {"threads": 1}])),
        )
    return make_plan(engines)


def describe(plan: ServingPlan) -> Counter[str]:
    """Return the engines without their names, ports and choice among devices of one kind."""
    return Counter(
        repr(
            [(s.node, s.layers, [NODES[s.node].devices[d] for d in s.devices]) for s in each.stages]
        )
        + repr((each.role, each.scheduler, sorted(each.flags)))
        for each in plan.engines.values()
    )


def play(
    begin: dict[str, EnginePlan], actions: Sequence[ChangeAction], target: ServingPlan
) -> dict[str, EnginePlan]:
    """Return the engines after actions of a change to a plan; check each moment."""
    running = dict(begin)
    for action in actions:
        match action:
            case StartEngine(name):
                assert name not in running
                running[name] = target.engines[name]
            case StopEngine(name):
                del running[name]
            case ChangeRole(name, role):
                assert running[name].role != role
                running[name] = msgspec.structs.replace(running[name], role=role)
        if running:
            # No device, port or name belongs to two engines.
            check_plan(msgspec.structs.replace(target, engines=running, routes={}))
    return running


@given(plans(), plans())
@settings(max_examples=num_examples(60, 2000), deadline=None)
def test_a_change_ends_at_the_new_plan_and_no_moment_has_a_conflict(
    old: ServingPlan, new: ServingPlan
) -> None:
    change = change_plan(old, new)
    begin = pin_ports(old).engines
    running = play(begin, change.actions, change.plan)
    assert describe(change.plan) == describe(new)
    assert {name: (each.stages, each.role, each.port) for name, each in running.items()} == {
        name: (each.stages, each.role, each.port) for name, each in change.plan.engines.items()
    }
    # After a failure in the midst of it, all engines come back.
    for count in range(len(change.actions) + 1):
        done = change.actions[:count]
        halfway = play(begin, done, change.plan)
        assert play(halfway, undo_actions(done, old), pin_ports(old)) == begin


@given(plans(), plans())
@settings(max_examples=num_examples(60, 2000), deadline=None)
def test_an_engine_stops_early_only_where_its_devices_or_its_name_are_needed(
    old: ServingPlan, new: ServingPlan
) -> None:
    change = change_plan(old, new)
    last_start = max(
        (index for index, each in enumerate(change.actions) if isinstance(each, StartEngine)),
        default=-1,
    )

    def places(engine: EnginePlan) -> set[tuple[str, int]]:
        return {(stage.node, device) for stage in engine.stages for device in stage.devices}

    for index, action in enumerate(change.actions[: last_start + 1]):
        if not isinstance(action, StopEngine):
            continue
        starting = next(each for each in change.actions[index:] if isinstance(each, StartEngine))
        is_in_way = places(old.engines[action.name]) & places(change.plan.engines[starting.name])
        assert is_in_way or action.name == starting.name


@given(plans())
@settings(max_examples=num_examples(40, 500), deadline=None)
def test_a_plan_in_another_order_and_on_other_devices_changes_nothing(plan: ServingPlan) -> None:
    names = list(plan.engines)
    moved = {f"n{number}": plan.engines[name] for number, name in enumerate(reversed(names))}
    change = change_plan(plan, make_plan(moved))
    assert change.actions == ()
    assert change.plan.engines == pin_ports(plan).engines


def test_the_smallest_changes() -> None:
    old = make_plan({"p": cpu("prefill"), "d0": cpu("decode"), "d1": cpu("decode")})
    flipped = make_plan({"p0": cpu("prefill"), "p1": cpu("prefill"), "d": cpu("decode")})
    change = change_plan(old, flipped)
    assert change.actions == (ChangeRole("d1", "prefill"),)
    assert list(change.plan.engines) == ["p", "d0", "d1"]
    more = make_plan({"p0": cpu("prefill"), "d0": cpu("decode"), "d1": cpu("decode"),
                      "d2": cpu("decode")})  # fmt: skip
    change = change_plan(old, more)
    assert change.actions == (StartEngine("d2"),)
    assert change.plan.engines["d2"].port == 29800 + 3 * NUM_ENGINE_PORTS
    assert change_plan(more, old).actions == (StopEngine("d2"),)
    options = make_plan({"p": cpu("prefill"), "d0": cpu("decode", scheduler={"max_num_seqs": 4}),
                         "d1": cpu("decode")})  # fmt: skip
    change = change_plan(old, options)
    # The engine with options may be another one of the same design.
    assert change.actions == (StopEngine("d1"), StartEngine("d1"))


def test_an_engine_on_free_devices_starts_before_one_stops() -> None:
    old = make_plan({"a": gpus(0, 1), "b": gpus(3)})
    change = change_plan(old, make_plan({"a": gpus(0), "b": gpus(1), "c": gpus(2)}))
    # L20 stays until all run; the idle H100 comes first.
    assert change.actions == (
        StartEngine("a-2"), StopEngine("a"), StartEngine("b-2"), StartEngine("c"), StopEngine("b"),
    )  # fmt: skip
    assert change.plan.engines["a-2"].stages[0].devices == [2]


def test_ports_of_new_engines_belong_to_no_other_process() -> None:
    router = RouterPlan("z", 29807, flags={"hub": "127.0.0.1:29810"})
    wide = EnginePlan([StagePlan("y", 3), StagePlan("z", 3)])
    old = make_plan({"a": cpu(port=29800), "b": cpu(port=29816)}, router=router)
    new = make_plan({"a": cpu(), "b": cpu(), "w": wide, "c": cpu(port=29816), "d": cpu(port=30000)},
                    router=router)  # fmt: skip
    change = change_plan(old, new)
    ports = {name: each.port for name, each in change.plan.engines.items()}
    # The block of 29804 has the router, that of 29808 the hub; at 29812 one node finds a place.
    assert ports == {"a": 29800, "b": 29816, "w": 29820, "c": 29812, "d": 30000}


def test_engines_restart_where_the_transfer_of_kv_blocks_begins() -> None:
    router = RouterPlan("z")
    old = make_plan({"a": cpu(), "b": cpu()}, router=router)
    phases = make_plan({"a": cpu("prefill"), "b": cpu("decode")}, router=router)
    change = change_plan(old, phases)
    assert change.actions == (
        StopEngine("a"), StartEngine("a"), StopEngine("b"), StartEngine("b"),
    )  # fmt: skip


def test_flags_of_the_new_plan_outrank_shared_ones() -> None:
    old = make_plan({"a": cpu(flags={"max-model-len": 512, "dtype": "float32", "threads": 1}),
                     "b": cpu(flags={"max-model-len": 512, "dtype": "float32"})})  # fmt: skip
    new = make_plan({"a": cpu(flags={"max_model_len": 1024}), "b": cpu(flags={"dtype": "auto"})})
    adopted = adopt_plan(old, new)
    assert [each.flags for each in adopted.engines.values()] == [
        {"max_model_len": 1024, "dtype": "float32"}, {"max-model-len": 512, "dtype": "auto"},
    ]  # fmt: skip


def test_names_of_routes_follow_the_engines_and_other_fields_stay() -> None:
    old = make_plan(
        {"p": cpu("prefill", flags={"kv-cache-memory": "1GiB"}),
         "d": cpu("decode", flags={"kv-cache-memory": "1GiB"})},
        router=RouterPlan("z", 8123, preset="distserve"),
    )  # fmt: skip
    new = make_plan(
        {"prefill-0": cpu("prefill"), "decode-0": cpu("decode"), "decode-1": cpu("decode")},
        routes={"prefill-0": {"decode-0": 0.5, "decode-1": 0.5}},
        workload="file:observed.csv", expected=ExpectedFigures("gllm plan goodput", 4.0),
    )  # fmt: skip
    change = change_plan(old, adopt_plan(old, new))
    assert change.actions == (StartEngine("decode-1"),)
    assert change.plan.routes == {"p": {"d": 0.5, "decode-1": 0.5}}
    assert change.plan.engines["decode-1"].flags == {"kv-cache-memory": "1GiB"}
    assert change.plan.router == old.router
    assert (change.plan.workload, change.plan.expected) == (new.workload, new.expected)


@pytest.mark.parametrize(
    ("fields", "new", "words"),
    [
        ({"router": None}, {}, "router: none"),
        ({}, {"router": RouterPlan("z", preset="tetri")}, "router.preset: tetri: preset and flows"),
        ({"router": RouterPlan("z", preset="flow")}, {"router": RouterPlan("z", preset="flow")},
         "router.preset: flow"),
        ({}, {"nodes": {**NODES, "w": NodePlan("127.0.0.4", ["H100"])}, "engines":
              {"a": gpus(0, node="w")}}, "engines.a.stages: H100 of node w: the running service"),
        ({}, {"nodes": {"x": NodePlan("127.0.0.1", ["L20"]), "z": NODES["z"]}, "engines":
              {"a": gpus(0)}}, "engines.a.stages: L20 of node x"),
    ],
)  # fmt: skip
def test_changes_that_need_another_router_or_node_are_refused(
    fields: dict[str, Any], new: dict[str, Any], words: str
) -> None:
    old = make_plan({"a": cpu()}, **fields)
    with pytest.raises(PlanError, match=words):
        adopt_plan(old, msgspec.structs.replace(make_plan({"a": cpu()}), **new))
