"""Layouts of fleets on nodes: each rank has a device, and the plan can be read again."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.options.slo import parse_slo
from gllm.plan.layout import Parallelism
from gllm.plan.nodes import CORE, NO_NODES, DeviceCluster, DeviceNode, parse_nodes
from gllm.plan.problem import ServiceProblem
from gllm.plan.search.designs import EngineDesign
from gllm.plan.search.fleet import FleetForecast, lay_out_fleet
from gllm.plan.serving_plan import (
    ExpectedFigures,
    LinkPlan,
    ServingPlan,
    check_plan,
    read_plan,
    write_plan,
)
from gllm.sim.costs.base import ConstantCostModel
from gllm.sim.deployment import Deployment
from gllm.sim.hardware.devices import NetworkLink
from gllm.sim.hardware.stages import PipelineSpec, build_hardware, split_layers_evenly
from gllm.sim.options import SimulationConfig
from tests.support.examples import num_examples

LIMITS = parse_slo("ttft:p90=2,tpot=0.1")


def lay_out(
    design: EngineDesign,
    num_engines: int,
    cluster: DeviceCluster = NO_NODES,
    hardware: PipelineSpec | None = None,
) -> ServingPlan:
    config = SimulationConfig(workload="azure-conv", routing_policy="round-robin")
    config = design.configure(config)
    resolved = config.scheduler.resolve(design.parallelism.pp, 100, 1000)
    layers = split_layers_evenly(32, design.parallelism.pp)
    cost = ConstantCostModel(0.0)
    deployment = Deployment("model", layers, cost, resolved, hardware=hardware)
    figures = ExpectedFigures("", 3.0, 4.0, 0.95, 0.5, 0.05)
    forecast = FleetForecast(num_engines, figures, True)
    problem = ServiceProblem("model", "azure-conv", cluster, limits=LIMITS, prices={"H100": 4.0})
    return lay_out_fleet(problem, design, deployment, config, forecast)


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
    cluster = DeviceCluster(
        tuple(DeviceNode(f"n{index}", "H100", size) for index, size in enumerate(sizes))
    )
    design = EngineDesign("H100", Parallelism(ranks, stages), "sarathi", 512, 64)
    has_places = sum(size // ranks for size in sizes) >= stages * num_engines
    if not has_places:
        with pytest.raises(ValueError, match="does not fit the nodes"):
            lay_out(design, num_engines, cluster)
        return
    plan = lay_out(design, num_engines, cluster)
    check_plan(plan)
    assert [engine.num_devices for engine in plan.engines.values()] == [
        stages * ranks
    ] * num_engines
    for engine in plan.engines.values():
        assert sum(stage.layers for stage in engine.stages) == 32


def test_a_plan_of_this_machine_has_a_core_for_each_stage(tmp_path: Path) -> None:
    design = EngineDesign(CORE, Parallelism(1, 1), "sarathi", 512, 64)
    plan = lay_out(design, 2)
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


def test_nodes_have_the_link_that_was_simulated() -> None:
    """Unless their own is known; emulated devices use it."""
    design = EngineDesign("H100", Parallelism(1, 2), "sarathi", 512, 64)
    own = NetworkLink(1e9, 1e-3)
    cluster = DeviceCluster(
        (DeviceNode("n0", "H100", 2, own), DeviceNode("n1", "H100", 2), DeviceNode("n2", "H100", 2))
    )
    hardware = build_hardware("llama-3-8b", "H100", 2, "nvlink")
    plan = lay_out(design, 2, cluster, hardware)
    assert [node.link for node in plan.nodes.values()] == [LinkPlan(8, 1), LinkPlan(2000, 0.005)]
    assert lay_out(design, 1).nodes["node-0"].link is None


def test_nodes_have_prices_and_eight_devices_by_default() -> None:
    plan = lay_out(EngineDesign("H100", Parallelism(4, 1), "sarathi", 512, 64), 3)
    assert [len(node.devices) for node in plan.nodes.values()] == [8, 4]
    assert {name: node.price for name, node in plan.nodes.items()} == {"node-0": 32, "node-1": 16}


def test_only_nodes_with_the_device_are_used() -> None:
    cluster = parse_nodes("a=10.0.0.1:8xL20, b=host:4xH100")
    assert cluster.nodes[1] == DeviceNode("b", "H100", 4, host="host")
    plan = lay_out(EngineDesign("H100", Parallelism(2, 2), "sarathi", 512, 64), 1, cluster)
    assert list(plan.nodes) == ["b"]
    assert plan.nodes["b"].host == "host"


@pytest.mark.parametrize(
    "text", ["a", "a=h:8xX100", "a=h:0xH100", "a=h:xH100", "a=h:1xH100,a=g:1xH100", "=h:1xH100"]
)
def test_wrong_nodes_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="--nodes"):
        parse_nodes(text)
