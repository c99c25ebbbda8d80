"""Layouts of fleets on nodes: each rank has a device, and the plan can be read again."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.plan.engine_designs import CORE, EngineDesign
from gllm.plan.fleet_forecast import FleetForecast
from gllm.plan.fleet_layout import (
    FleetNode,
    ServiceFacts,
    assume_nodes,
    lay_out_fleet,
    parse_nodes,
)
from gllm.plan.latency_limits import parse_limits
from gllm.plan.serving_plan import ServingPlan, check_plan, read_plan, write_plan
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.hardware.stages import split_layers_evenly
from tests.support.examples import num_examples

LIMITS = parse_limits("ttft:p90=2,tpot=0.1")


def lay_out(design: EngineDesign, num_engines: int, nodes: list[FleetNode]) -> ServingPlan:
    scheduler = SchedulerConfig(policy="sarathi", max_num_batched_tokens=512, max_num_seqs=64)
    facts = ServiceFacts(
        "model",
        split_layers_evenly(32, design.stages),
        scheduler,
        "round-robin",
        "azure-conv",
        LIMITS,
        "gllm plan search",
        {},
    )
    forecast = FleetForecast(num_engines, 3.0, 4.0, 0.95, 0.5, 0.05, True)
    return lay_out_fleet(design, forecast, nodes, facts, {"H100": 4.0})


@settings(max_examples=num_examples(40, 1000), deadline=None)
@given(
    st.integers(1, 4),
    st.sampled_from((1, 2, 4)),
    st.integers(1, 4),
    st.lists(st.integers(1, 8), min_size=1, max_size=4),
)
def test_every_layout_can_be_served(
    stages: int, ranks: int, num_engines: int, sizes: list[int]
) -> None:
    nodes = [FleetNode(f"n{index}", f"h{index}", "H100", n) for index, n in enumerate(sizes)]
    design = EngineDesign("H100", stages, ranks, "sarathi", 512, 64)
    has_places = sum(size // ranks for size in sizes) >= stages * num_engines
    if not has_places:
        with pytest.raises(ValueError, match="does not fit the nodes"):
            lay_out(design, num_engines, nodes)
        return
    plan = lay_out(design, num_engines, nodes)
    check_plan(plan)
    assert [engine.num_devices for engine in plan.engines.values()] == [
        stages * ranks
    ] * num_engines
    for engine in plan.engines.values():
        assert sum(stage.layers for stage in engine.stages) == 32


def test_a_plan_of_this_machine_has_a_core_for_each_stage(tmp_path: Path) -> None:
    design = EngineDesign(CORE, 1, 1, "sarathi", 512, 64)
    plan = lay_out(design, 2, assume_nodes(CORE, 2))
    path = tmp_path / "plan.yaml"
    write_plan(plan, path)
    assert read_plan(path) == plan
    assert list(plan.engines) == ["engine-0", "engine-1"]
    assert plan.nodes["local"].devices == []
    assert plan.router
    assert plan.router.policy == "round-robin"
    engine = plan.engines["engine-0"]
    assert engine.scheduler == {
        "policy": "sarathi",
        "max_num_batched_tokens": 512,
        "max_num_seqs": 64,
    }
    assert (plan.slo.ttft, plan.slo.tpot) == (2.0, 0.1)
    assert plan.expected
    assert (plan.expected.rate, plan.expected.capacity, plan.expected.attainment) == (3, 4, 0.95)


def test_nodes_have_prices_and_eight_devices_by_default() -> None:
    nodes = assume_nodes("H100", 12)
    assert [node.num_devices for node in nodes] == [8, 4]
    plan = lay_out(EngineDesign("H100", 1, 4, "sarathi", 512, 64), 3, nodes)
    assert {name: node.price for name, node in plan.nodes.items()} == {"node-0": 32, "node-1": 16}


def test_only_nodes_with_the_device_are_used() -> None:
    nodes = parse_nodes("a=10.0.0.1:8xL20, b=host:4xH100")
    assert nodes[1] == FleetNode("b", "host", "H100", 4)
    plan = lay_out(EngineDesign("H100", 2, 2, "sarathi", 512, 64), 1, nodes)
    assert list(plan.nodes) == ["b"]


@pytest.mark.parametrize(
    "text", ["a", "a=h:8xX100", "a=h:0xH100", "a=h:xH100", "a=h:1xH100,a=g:1xH100", "=h:1xH100"]
)
def test_wrong_nodes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--nodes"):
        parse_nodes(text)
