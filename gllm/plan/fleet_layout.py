"""Layout of a fleet of equal engines on nodes, as a ServingPlan that `gllm up` starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from gllm.plan.engine_designs import CORE, EngineDesign
from gllm.plan.fleet_forecast import FleetForecast
from gllm.plan.latency_limits import LatencyLimits
from gllm.plan.serving_plan import (
    EnginePlan,
    ExpectedFigures,
    LatencyGoals,
    NodePlan,
    RouterPlan,
    ServingPlan,
    StagePlan,
)
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.hardware.devices import DEVICES

LOCAL_NODE, LOCAL_HOST = "local", "127.0.0.1"
"""Name and address of this machine."""
DEVICES_PER_NODE = 8
"""Devices of each node where none are given."""


class FleetNode(NamedTuple):
    """A machine that engines may use."""

    name: str
    host: str
    device: str
    """A name of DEVICES, or CORE."""
    num_devices: int


@dataclass(frozen=True)
class ServiceFacts:
    """Facts that a plan states besides its engines."""

    model: str
    """Checkpoint that the engines load."""
    layers: Sequence[int]
    """Layers of each stage."""
    scheduler: SchedulerConfig
    """Options of the engines."""
    router: str
    """Routing policy."""
    workload: str
    limits: LatencyLimits
    command: str
    """Command that made the plan."""
    flags: dict[str, Any]
    """Further flags of the engines."""


def parse_nodes(text: str) -> list[FleetNode]:
    """Return the nodes of a text such as `a=10.0.0.1:8xH100,b=10.0.0.2:4xA100-80G`.

    Raises:
        ValueError: A node has another form, an unknown device, or a name twice.
    """
    nodes: list[FleetNode] = []
    for part in text.split(","):
        name, _, rest = part.strip().partition("=")
        host, _, devices = rest.rpartition(":")
        count, _, device = devices.partition("x")
        is_new = all(name != node.name for node in nodes)
        is_count = count.isascii() and count.isdigit() and int(count) > 0
        if not (name and host and is_count and is_new and device in DEVICES):
            raise ValueError(
                f"--nodes {text}: {part!r} has to be NAME=HOST:COUNTxDEVICE, each name once, with "
                f"a device of {', '.join(DEVICES)}, as in a=10.0.0.1:8xH100"
            )
        nodes.append(FleetNode(name, host, device, int(count)))
    return nodes


def assume_nodes(device: str, num_devices: int) -> list[FleetNode]:
    """Return nodes with this many devices in all: of 8 devices each, or this machine's cores."""
    if device == CORE:
        return [FleetNode(LOCAL_NODE, LOCAL_HOST, CORE, num_devices)]
    nodes = []
    for index, first in enumerate(range(0, num_devices, DEVICES_PER_NODE)):
        count = min(DEVICES_PER_NODE, num_devices - first)
        nodes.append(FleetNode(f"node-{index}", f"node-{index}", device, count))
    return nodes


def lay_out_fleet(
    design: EngineDesign,
    forecast: FleetForecast,
    nodes: Sequence[FleetNode],
    facts: ServiceFacts,
    prices: dict[str, float],
) -> ServingPlan:
    """Return the plan of equal engines on nodes.

    The ranks of a stage are on one node. An engine takes the node with the most free devices, and
    the next one where that is full.

    Raises:
        ValueError: The engines do not fit the nodes.
    """
    free = {node.name: list(range(node.num_devices)) for node in nodes}
    usable = [node for node in nodes if node.device == design.device]
    engines = {}
    for index in range(forecast.num_engines):
        stages = _place_engine(design, facts.layers, usable, free)
        scheduler = _changed_options(facts.scheduler)
        engines[f"engine-{index}"] = EnginePlan(stages, "mixed", scheduler, facts.flags)
    used = {stage.node for engine in engines.values() for stage in engine.stages}
    node_plans = {
        node.name: NodePlan(
            node.host,
            [] if node.device == CORE else [node.device] * node.num_devices,
            node.num_devices * prices[node.device] if node.device in prices else None,
        )
        for node in nodes
        if node.name in used
    }
    first = next(iter(node_plans))
    return ServingPlan(
        facts.model,
        node_plans,
        engines,
        router=RouterPlan(first, policy=facts.router),
        slo=_latency_goals(facts.limits),
        workload=facts.workload,
        expected=_expected_figures(forecast, facts.command),
    )


def _place_engine(
    design: EngineDesign,
    layers: Sequence[int],
    nodes: Sequence[FleetNode],
    free: dict[str, list[int]],
) -> list[StagePlan]:
    """Return the stages of one engine, whose devices are no longer free."""
    stages: list[StagePlan] = []
    node = max(nodes, key=lambda each: len(free[each.name]), default=None)
    for count in layers:
        if node is None or len(free[node.name]) < design.ranks:
            able = [each for each in nodes if len(free[each.name]) >= design.ranks]
            node = max(able, key=lambda each: len(free[each.name]), default=None)
        if node is None:
            raise ValueError(
                f"{design} does not fit the nodes: no node has {design.ranks} free devices for a "
                "further stage: add --nodes, or lower --rate or --tp"
            )
        devices = [free[node.name].pop(0) for _ in range(design.ranks)]
        stages.append(StagePlan(node.name, count, [] if design.device == CORE else devices))
    return stages


def _changed_options(config: SchedulerConfig) -> dict[str, Any]:
    """Return the options that differ from their defaults."""
    default = msgspec.to_builtins(SchedulerConfig())
    options = msgspec.to_builtins(config)
    derived = ("stages", "num_blocks", "max_model_len")
    return {
        name: value
        for name, value in options.items()
        if name not in derived and value != default[name]
    }


def _latency_goals(limits: LatencyLimits) -> LatencyGoals:
    ttft, tpot = limits.limit_of("ttft"), limits.limit_of("tpot")
    return LatencyGoals(ttft and ttft[0], tpot and tpot[0])


def _expected_figures(forecast: FleetForecast, command: str) -> ExpectedFigures:
    return ExpectedFigures(
        command,
        forecast.rate,
        forecast.capacity,
        forecast.attainment,
        forecast.ttft_p50,
        forecast.tpot_p50,
    )
