"""Layout of engines on nodes, as a ServingPlan that `gllm up` starts: the same for all planners."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec

from gllm.plan.engine_checks import length_flags
from gllm.plan.nodes import CORE, DeviceCluster
from gllm.plan.problem import ServiceProblem
from gllm.plan.serving_plan import (
    ROLES,
    EnginePlan,
    ExpectedFigures,
    LatencyGoals,
    LinkPlan,
    NodePlan,
    RouterPlan,
    ServingPlan,
    StagePlan,
)
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.hardware.devices import GBIT_BYTES, NetworkLink


class Parallelism(NamedTuple):
    """Tensor-parallel (tp) and pipeline-parallel (pp) degree of an engine."""

    tp: int
    pp: int = 1

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of the engine."""
        return self.tp * self.pp

    def split_layers(self, num_layers: int) -> list[int]:
        """Return the number of layers of each stage; the stages divide the layers evenly."""
        return [num_layers // self.pp] * self.pp

    def __str__(self) -> str:
        return f"TP {self.tp} PP {self.pp}"


class PlannedStage(NamedTuple):
    """One pipeline stage of a planned engine: its number of layers and the node of each TP rank."""

    devices: tuple[int, ...]
    """Index of each rank's node in the cluster. Plans have all ranks of a stage on one node."""
    layers: int


Stages = tuple[PlannedStage, ...]


class PlannedEngine(NamedTuple):
    """A planned engine: name, role, flags, and pipeline stages that are assigned to nodes."""

    name: str
    stages: Stages
    role: str = "mixed"
    scheduler: Mapping[str, Any] = {}
    """Fields of SchedulerConfig that differ from their defaults."""
    flags: Mapping[str, Any] = {}
    """Further flags of `gllm serve`."""
    max_model_len: int | None = None
    """Longest sequence in tokens, as in the simulation; None: not set."""


def place_engines(
    cluster: DeviceCluster,
    engines: Sequence[tuple[Parallelism, Sequence[int]]],
    device: str | None = None,
) -> list[Stages]:
    """Assign the pipeline stages of engines to the nodes of a cluster, one engine after another.

    The ranks of a stage share a node. A stage takes the node of the stage before it, or else the
    node with the most free devices. Engines with many ranks per stage should come first.

    Args:
        cluster: Nodes and their devices.
        engines: Parallelism of each engine, and the number of layers of each of its stages.
        device: Only nodes with devices of this name are used; None: all nodes.

    Returns:
        Stages of each engine.

    Raises:
        ValueError: The engines do not fit.
    """
    free = [node.num_devices if device in (None, node.device) else 0 for node in cluster.nodes]
    placed = []
    for parallelism, layers in engines:
        ranks = parallelism.tp
        stages: list[PlannedStage] = []
        for count in layers:
            able = [index for index, left in enumerate(free) if left >= ranks]
            if not able:
                raise ValueError(
                    f"{parallelism} does not fit the nodes: none has {ranks} free devices for a "
                    "further stage: add nodes, or lower the rate or the number of ranks"
                )
            last = stages[-1].devices[0] if stages else -1
            node = last if last in able else max(able, key=lambda index: free[index])
            free[node] -= ranks
            stages.append(PlannedStage((node,) * ranks, count))
        placed.append(tuple(stages))
    return placed


def lay_out(
    problem: ServiceProblem,
    cluster: DeviceCluster,
    engines: Sequence[PlannedEngine],
    router: RouterPlan,
    expected: ExpectedFigures,
    routes: Mapping[str, dict[str, float]] | None = None,
) -> ServingPlan:
    """Convert planned engines into a serving plan, the file that `gllm up` starts.

    Engines get the devices of their nodes in the order of `engines`. The plan lists prefill engines
    before decode engines. Nodes without engines are included only if the links of the cluster are
    known.

    Args:
        problem: Model, workload, latency limits, and prices of devices.
        cluster: Nodes and links.
        engines: Engines with different names.
        router: Options of the router; its node is set to the first node of the plan.
        expected: Rate, capacity and latencies that the planner predicts.
        routes: Share of each prefill engine's requests that go to each decode engine.
    """
    used = [0] * len(cluster.nodes)
    plans: dict[str, EnginePlan] = {}
    for engine in engines:
        stages = []
        for stage in engine.stages:
            index, ranks = stage.devices[0], len(stage.devices)
            node, first = cluster.nodes[index], used[index]
            used[index] += ranks
            devices = [] if node.device == CORE else list(range(first, first + ranks))
            stages.append(StagePlan(node.name, stage.layers, devices))
        flags, length = dict(engine.flags), engine.max_model_len
        if length is not None:
            flags |= length_flags(problem.model, length)
        plans[engine.name] = EnginePlan(stages, engine.role, dict(engine.scheduler), flags)
    nodes = {
        node.name: NodePlan(
            node.host or node.name,
            [] if node.device == CORE else [node.device] * node.num_devices,
            _node_price(problem, cluster, index),
            None if node.inner_link is None else _link_plan(node.inner_link),
        )
        for index, node in enumerate(cluster.nodes)
        if used[index] or cluster.network
    }
    ttft, tpot = problem.limits.limit_of("ttft"), problem.limits.limit_of("tpot")
    return ServingPlan(
        problem.model,
        nodes,
        dict(sorted(plans.items(), key=lambda item: ROLES.index(item[1].role))),
        links=_links(cluster),
        router=msgspec.structs.replace(router, node=next(iter(nodes))),
        routes=dict(routes or {}),
        slo=LatencyGoals(ttft and ttft[0], tpot and tpot[0]),
        workload=problem.workload,
        expected=expected,
    )


def _node_price(problem: ServiceProblem, cluster: DeviceCluster, index: int) -> float | None:
    node = cluster.nodes[index]
    price = problem.prices.get(node.device)
    if node.price is not None or price is None:
        return node.price
    return round(node.num_devices * price, 6)


def _links(cluster: DeviceCluster) -> dict[str, LinkPlan]:
    """Return the links between nodes; none if they are unknown."""
    if cluster.network is None:
        return {}
    links = {}
    for a, first in enumerate(cluster.nodes):
        for b in range(a + 1, len(cluster.nodes)):
            link = cluster.link(a, b)
            links[f"{first.name}-{cluster.nodes[b].name}"] = _link_plan(link)
    return links


def _link_plan(link: NetworkLink) -> LinkPlan:
    return LinkPlan(link.bandwidth / GBIT_BYTES, round(link.latency * 1e3, 6))


def changed_options(config: SchedulerConfig) -> dict[str, Any]:
    """Return the scheduler options that differ from their defaults, by name."""
    default = msgspec.to_builtins(SchedulerConfig())
    derived = ("stages", "num_blocks", "max_model_len")
    return {
        name: value
        for name, value in msgspec.to_builtins(config).items()
        if name not in derived and value != default[name]
    }
