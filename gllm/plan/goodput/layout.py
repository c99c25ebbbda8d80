"""Layout of prefill and decode engines on nodes, as a ServingPlan that `gllm up` starts."""

from dataclasses import dataclass
from statistics import median

from gllm.plan.goodput.engines import Parallelism
from gllm.plan.goodput.placement import GpuCluster, PlacementUnit
from gllm.plan.goodput.planner import GoodputPlan
from gllm.plan.goodput.problem import GoodputProblem
from gllm.plan.serving_plan import (
    EnginePlan,
    ExpectedFigures,
    LatencyGoals,
    NodePlan,
    RouterPlan,
    ServingPlan,
    StagePlan,
)
from gllm.sim.hardware.shapes import MODELS

PRESET = "distserve"
"""Preset of the router, which its engines take as well."""


@dataclass
class FreeDevices:
    """Devices of a cluster's nodes that no engine has yet."""

    cluster: GpuCluster

    def __post_init__(self) -> None:
        """Begin with all devices free."""
        devices = list(range(self.cluster.gpus_per_node))
        self._free = [list(devices) for _ in range(self.cluster.num_nodes)]

    def count(self, node: int) -> int:
        """Return the number of free devices of a node."""
        return len(self._free[node])

    def allocate(self, node: int, count: int) -> list[int]:
        """Return devices of a node, which are no longer free."""
        return [self._free[node].pop(0) for _ in range(count)]


def planned_node_name(index: int) -> str:
    """Return the name and the host of a node."""
    return f"node-{index}"


def place_units(
    cluster: GpuCluster, unit: PlacementUnit, count: int, layers: int
) -> list[tuple[list[StagePlan], list[StagePlan]]]:
    """Return the stages of the prefill and the decode engine of each unit.

    Stages with the same layers are on one node. Units fill groups of nodes, one after another.

    Raises:
        ValueError: The cluster does not hold the units.
    """
    free = FreeDevices(cluster)
    per_group = cluster.gpus_per_node // unit.gpus_per_node
    if count > per_group * (cluster.num_nodes // unit.num_nodes):
        raise ValueError(f"{cluster} does not hold {count} units of {unit}: add nodes")
    placed = []
    for index in range(count):
        first = index // per_group * unit.num_nodes
        engines = []
        for engine in (unit.prefill, unit.decode):
            nodes = [first + unit.stage_node(engine, stage) for stage in range(engine.pp)]
            engines.append(_stages(free, engine, nodes, layers))
        placed.append((engines[0], engines[1]))
    return placed


def place_engines(
    cluster: GpuCluster, engines: list[Parallelism], layers: int
) -> list[list[StagePlan]]:
    """Return the stages of engines, the largest ranks first; the ranks of a stage share a node.

    An engine's stages are on as few nodes as possible: each takes the node of the stage before, or
    else the one with the most free devices.

    Raises:
        ValueError: The engines do not fit.
    """
    free = FreeDevices(cluster)
    order = sorted(range(len(engines)), key=lambda index: -engines[index].tp)
    placed: dict[int, list[StagePlan]] = {}
    for index in order:
        engine = engines[index]
        nodes: list[int] = []
        taken = [0] * cluster.num_nodes
        for _ in range(engine.pp):
            able = [
                node
                for node in range(cluster.num_nodes)
                if free.count(node) - taken[node] >= engine.tp
            ]
            if not able:
                raise ValueError(
                    f"{engine} does not fit the free devices of {cluster.num_nodes} nodes: add "
                    "nodes or lower --rate"
                )
            most = max(able, key=lambda node: (free.count(node) - taken[node], -node))
            node = nodes[-1] if nodes and nodes[-1] in able else most
            taken[node] += engine.tp
            nodes.append(node)
        placed[index] = _stages(free, engine, nodes, layers)
    return [placed[index] for index in range(len(engines))]


def _stages(
    free: FreeDevices, engine: Parallelism, nodes: list[int], layers: int
) -> list[StagePlan]:
    return [
        StagePlan(planned_node_name(node), layers // engine.pp, free.allocate(node, engine.tp))
        for node in nodes
    ]


def lay_out(
    plan: GoodputPlan, problem: GoodputProblem, checkpoint: str, command: str
) -> ServingPlan:
    """Return the plan of a service.

    Args:
        plan: Engines of both phases.
        problem: Its cluster, workload and limits.
        checkpoint: Folder or hub name of the model.
        command: Command that made the plan.

    Raises:
        ValueError: The engines do not fit the nodes.
    """
    system, layers = plan.system, MODELS[problem.model].layers
    assert system.decode is not None
    if plan.unit is not None:
        pairs = place_units(problem.cluster, plan.unit, system.num_prefill, layers)
        prefills, decodes = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    else:
        engines = [system.prefill] * system.num_prefill + [system.decode] * system.num_decode
        placed = place_engines(problem.cluster, engines, layers)
        prefills, decodes = placed[: system.num_prefill], placed[system.num_prefill :]
    named = {f"prefill-{i}": EnginePlan(each, "prefill") for i, each in enumerate(prefills)}
    named |= {f"decode-{i}": EnginePlan(each, "decode") for i, each in enumerate(decodes)}
    used = {stage.node for engine in named.values() for stage in engine.stages}
    device = problem.costs.device
    nodes = {
        name: NodePlan(name, [device] * problem.cluster.gpus_per_node)
        for name in map(planned_node_name, range(problem.cluster.num_nodes))
        if name in used
    }
    # KV caches stay within the nodes of a unit.
    routes = {f"prefill-{i}": {f"decode-{i}": 1.0} for i in range(len(prefills))}
    outcome = plan.outcome
    return ServingPlan(
        checkpoint,
        nodes,
        named,
        router=RouterPlan(next(iter(nodes)), preset=PRESET),
        routes=routes if plan.unit is not None else {},
        slo=LatencyGoals(problem.ttft, problem.tpot),
        workload=problem.lengths,
        expected=ExpectedFigures(
            command,
            plan.rate,
            attainment=plan.attainment,
            ttft_seconds=median(outcome.ttft),
            tpot_seconds=median(outcome.tpot),
        ),
    )
