"""Emulated plans: one machine, the devices and links of the plan, no flags of real devices."""

from typing import Any

import msgspec
import pytest

from gllm.config.engine import EngineConfig
from gllm.config.router import RouterConfig
from gllm.options.flags import config_from_flags
from gllm.plan.emulated_plan import choose_max_model_len, emulate_plan, pin_emulated_ports
from gllm.plan.plan_change import StartEngine, StopEngine, adopt_plan, change_plan
from gllm.plan.processes import check_configurations, commands_for, find_simulated_only
from gllm.plan.serving_plan import (
    EnginePlan,
    LinkPlan,
    NodePlan,
    PlanError,
    RouterPlan,
    ServingPlan,
    StagePlan,
)
from gllm.sim.deployment import roofline_deployment
from gllm.sim.hardware.stages import build_hardware
from tests.plan.test_processes import GPUS, LOCAL, parse

PHASES = msgspec.structs.replace(
    GPUS,
    model="qwen2.5-32b",
    links={"y-x": LinkPlan(25, 0.1)},
    router=RouterPlan("z", preset="distserve", flags={"host": "10.0.0.3", "hub": "10.0.0.3:29711"}),
)


def emulated_specs(plan: ServingPlan) -> dict[str, Any]:
    """The processes of an emulated plan, by name."""
    emulated = emulate_plan(plan)
    check_configurations(emulated)
    assert not find_simulated_only(emulated)
    (node,) = emulated.nodes
    return {spec.name: spec for spec in commands_for(emulated, node)}


def test_all_processes_are_here_and_have_the_devices_of_the_plan() -> None:
    specs = emulated_specs(PHASES)
    assert list(specs) == ["router", "p0", "d0"]
    assert all(
        spec.environment == {} and spec.url.startswith("http://127.0.0.1:")
        for spec in specs.values()
    )
    values = {name: parse(spec) for name, spec in specs.items()}
    router = config_from_flags(RouterConfig, values["router"])
    assert (router.device, router.hub, router.preset) == ("emulated", "29711", "distserve")
    assert values["d0"].router == ("127.0.0.1:29711",)
    p0, d0 = (config_from_flags(EngineConfig, values[name]) for name in ("p0", "d0"))
    assert (p0.device, p0.stage_degrees, p0.layers) == ("emulated:A100-80G", (2,), (64,))
    assert d0.device == "emulated:A100-80G,L20,L20"
    assert (d0.stage_degrees, d0.layers) == ((2, 1, 1), (30, 20, 14))
    # The link of the plan carries activations and, at 25 / 8 GB/s, KV blocks.
    assert d0.emulation.emulated_link == "25gbit+0.1ms,pcie"
    assert d0.emulation.emulated_rank_link == "nvlink,pcie,pcie"
    assert (p0.kv_transfer, d0.kv_transfer) == ("mock:3.125", "mock:3.125")
    assert not d0.emulation.emulated_bytes
    hardware = build_hardware(
        "qwen2.5-32b", d0.device.partition(":")[2], 3, d0.emulation.emulated_link,
        d0.stage_degrees, d0.emulation.emulated_rank_link, d0.layers,
    )  # fmt: skip
    assert [round(link.bandwidth * 8 / 1e9, 2) for link in hardware.links] == [25, 166.32]


def test_links_of_the_plan_come_first() -> None:
    """A link within a machine counts for pairs on it; routes tell which engines form pairs."""
    plan = ServingPlan(
        "llama-3-8b",
        {
            "x": NodePlan("x", ["L20"] * 4, link=LinkPlan(64, 0.01)),
            "y": NodePlan("y", ["L20"] * 2),
        },
        {
            "p": EnginePlan([StagePlan("x", 16, [0]), StagePlan("x", 16, [1])], "prefill"),
            "near": EnginePlan([StagePlan("x", 32, [2])], "decode"),
            "far": EnginePlan([StagePlan("y", 32, [0, 1])], "decode"),
        },
        links={"x-y": LinkPlan(10, 1)},
        router=RouterPlan("x"),
        routes={"p": {"near": 1.0}},
    )
    values = {name: parse(spec) for name, spec in emulated_specs(plan).items()}
    assert values["p"].emulated_link == "64gbit+0.01ms"
    assert values["p"].kv_transfer == values["near"].kv_transfer == "mock:8"
    plan = msgspec.structs.replace(plan, routes={})
    values = {name: parse(spec) for name, spec in emulated_specs(plan).items()}
    assert values["p"].kv_transfer == values["far"].kv_transfer == "mock:1.25"
    assert values["near"].kv_transfer == "mock:8"
    own = msgspec.structs.replace(plan.engines["far"], flags={"kv-transfer": "mock:5"})
    plan = msgspec.structs.replace(plan, engines={**plan.engines, "far": own})
    assert parse(emulated_specs(plan)["far"]).kv_transfer == "mock:5"


def test_flags_stay_unless_they_are_for_real_machines() -> None:
    flags = {
        "host": "0.0.0.0", "attention-backend": "flash-attn", "node-secret-file": "/etc/secret",
        "device": "cuda", "emulated-bytes": True, "max-model-len": 4096,
    }  # fmt: skip
    engine = EnginePlan([StagePlan("x", 32, [0])], flags=flags, port=8000)
    plan = ServingPlan("llama-3-8b", {"x": NodePlan("10.0.0.1", ["L20"])}, {"a": engine})
    values = parse(emulated_specs(plan)["a"])
    config = config_from_flags(EngineConfig, values)
    assert (config.device, config.attention_backend) == ("emulated:L20", "auto")
    assert (config.max_model_len, config.emulation.emulated_bytes) == (4096, True)
    assert (values.node_secret_file, values.kv_transfer) == (None, None)
    assert (values.host, values.port) == ("0.0.0.0", 8000)


def test_ports_of_several_machines_do_not_clash() -> None:
    engine = EnginePlan([StagePlan("x", 32, [0])], port=8000)
    plan = ServingPlan(
        "llama-3-8b",
        {name: NodePlan(name, ["L20"]) for name in "xy"},
        {"a": engine, "b": EnginePlan([StagePlan("y", 32, [0])], port=8001)},
        router=RouterPlan("x", 8003, flags={"hub": 8009}),
    )
    plan = msgspec.structs.replace(plan, router=RouterPlan("y", 7999, flags={"hub": 8009}))
    specs = emulated_specs(plan)
    assert [spec.url.rpartition(":")[2] for spec in specs.values()] == ["7999", "8000", "8004"]
    plan = msgspec.structs.replace(plan, router=RouterPlan("y", 7999, flags={"hub": 8002}))
    specs = emulated_specs(plan)
    assert [spec.url.rpartition(":")[2] for spec in specs.values()] == ["7999", "8003", "8007"]


def test_a_later_plan_leaves_running_engines_as_they_are() -> None:
    """The plan for real machines changes; its engines have one machine's ports from the start."""
    small, large = ["A100-40G"] * 4, ["H100"] * 4
    nodes = {"x": NodePlan("10.0.0.1", small), "y": NodePlan("10.0.0.2", small + large)}
    gone, kept, added = (
        EnginePlan([StagePlan(node, 20, [first + index]) for index in range(4)], port=port)
        for node, first, port in (("x", 0, 8000), ("y", 0, 8000), ("y", 4, None))
    )
    plan = ServingPlan("llama-2-70b", nodes, {"a": gone, "b": kept}, router=RouterPlan("x", 7999))
    running, length = pin_emulated_ports(plan), choose_max_model_len(plan)
    later = msgspec.structs.replace(plan, engines={"c": kept, "d": added})
    change = change_plan(running, adopt_plan(running, later))
    assert change.actions == (StartEngine("d"), StopEngine("a"))
    first, second = (
        {spec.name: spec for spec in commands_for(emulate_plan(each, length), "emulated")}
        for each in (running, change.plan)
    )
    assert list(second) == ["router", "b", "d"]
    assert [second[name] for name in ("router", "b")] == [first[name] for name in ("router", "b")]
    assert len({spec.url for spec in (*first.values(), second["d"])}) == 4
    assert parse(second["d"]).max_model_len == parse(first["a"]).max_model_len == length
    assert choose_max_model_len(msgspec.structs.replace(plan, engines={"d": added})) != length


def test_router_and_engines_serve_what_the_least_memory_holds() -> None:
    """Planners do not write the context of a shape; the table takes it to be long."""
    stages = [StagePlan("x", 20, [index]) for index in range(4)]
    nodes = {"x": NodePlan("x", ["A100-40G"] * 4), "y": NodePlan("y", ["H100"] * 4)}
    wide = [StagePlan("y", 20, [index]) for index in range(4)]
    engines = {"a": EnginePlan(stages), "b": EnginePlan(wide)}
    plan = ServingPlan("llama-2-70b", nodes, engines, router=RouterPlan("x"))
    values = [parse(spec) for spec in emulated_specs(plan).values()]
    (length,) = {value.max_model_len for value in values}
    assert 4096 < length < 32768
    roofline_deployment("llama-2-70b", "A100-40G", 4, length)
    with pytest.raises(ValueError, match="lower --max-model-len"):
        roofline_deployment("llama-2-70b", "A100-40G", 4, length + 1)
    short = msgspec.structs.replace(engines["b"], flags={"max-model-len": 2048})
    plan = msgspec.structs.replace(plan, engines={**engines, "b": short})
    values = [parse(spec) for spec in emulated_specs(plan).values()]
    assert [value.max_model_len for value in values] == [2048] * 3
    plan = msgspec.structs.replace(plan, engines={"b": engines["b"]})
    assert [parse(spec).max_model_len for spec in emulated_specs(plan).values()] == [None] * 2


def test_measured_times_have_a_device_of_their_own() -> None:
    for profile, device in (
        ("distserve:opt-13b", "emulated"),
        ("vidur:llama-2-7b", "emulated:A100-80G"),
    ):
        engine = EnginePlan([StagePlan("x", 40, [0])], flags={"emulated-profile": profile})
        plan = ServingPlan("opt-13b", {"x": NodePlan("x", ["A100-80G"])}, {"a": engine})
        values = parse(emulated_specs(plan)["a"])
        assert (values.device, values.emulated_profile) == (device, profile)
        assert values.emulated_rank_link is None


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        (LOCAL, r"engines.a.stages\[0\].devices: empty: CPUs are not emulated"),
        (
            msgspec.structs.replace(
                GPUS, nodes={**GPUS.nodes, "y": NodePlan("y", ["L20", "L40"])},
                engines={"e": EnginePlan([StagePlan("y", 64, [0, 1])])},
            ),
            r"engines.e.stages\[0\].devices: L20, L40: an emulated stage has equal devices",
        ),
        (
            msgspec.structs.replace(
                GPUS, nodes={**GPUS.nodes, "y": NodePlan("y", ["B200"])},
                engines={"e": EnginePlan([StagePlan("y", 64, [0])])},
            ),
            "nodes.y.devices: 'B200' has no data sheet: name one of L20",
        ),
    ],
)  # fmt: skip
def test_devices_without_a_data_sheet_are_refused(plan: ServingPlan, words: str) -> None:
    with pytest.raises(PlanError, match=words):
        emulate_plan(plan)
