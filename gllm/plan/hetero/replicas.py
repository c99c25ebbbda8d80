"""Replicas: ways to run a group of unlike devices as one pipeline, and the best one for a phase.

Prefill takes the layout with the least latency, decode the one with the most capacity (HexGen-2,
arXiv 2502.07903, section 4.2).
"""

from collections.abc import Iterator, Sequence
from enum import StrEnum
from itertools import permutations
from math import floor
from typing import Any, NamedTuple

from gllm.plan.engine_checks import planned_max_model_len
from gllm.plan.hetero.costs import ReplicaCosts, build_pipeline, count_replica_kv_tokens
from gllm.plan.layout import PlannedStage, Stages
from gllm.plan.nodes import DeviceCluster, Group
from gllm.sim.hardware.shapes import ModelShape

MAX_DEGREE = 8
"""Largest number of tensor-parallel ranks per stage."""
MAX_ORDERED_NODES = 4
"""Nodes of a group up to which every order of the nodes is tried."""


def stage_layouts(
    cluster: DeviceCluster, group: Group, num_layers: int, num_heads: int
) -> list[Stages]:
    """Return the candidate divisions of a group of devices into pipeline stages.

    For each tensor-parallel degree, each machine is divided into stages of this many ranks, and its
    remaining devices into smaller stages. All ranks of a stage are on one machine, and their number
    divides the number of attention heads. Layers are divided in proportion to memory.

    Args:
        cluster: Devices and network links.
        group: Number of devices of the replica on each node.
        num_layers: Layers of the model.
        num_heads: Attention heads of the model.
    """
    layouts: dict[Stages, None] = {}
    for order in _machine_orders(cluster, group):
        for cut in _cuts(order, group, num_heads):
            if len(cut) <= num_layers:
                layers = split_by_memory(cluster, cut, num_layers)
                stages = (PlannedStage(*pair) for pair in zip(cut, layers, strict=True))
                layouts[tuple(stages)] = None
    return list(layouts)


def split_by_memory(
    cluster: DeviceCluster, cut: Sequence[tuple[int, ...]], num_layers: int
) -> list[int]:
    """Return the number of layers of each stage, in proportion to its memory, at least one.

    All ranks of a stage hold equal shares of its layers, so the memory of a stage is the smallest
    memory among its devices times their number.

    Args:
        cluster: Devices and their memory.
        cut: Node index of each rank, by stage.
        num_layers: Layers of the model.
    """
    by_devices = {
        devices: len(devices) * min(cluster.nodes[device].spec.memory for device in set(devices))
        for devices in set(cut)
    }
    memory = [by_devices[devices] for devices in cut]
    total = sum(memory)
    shares = [num_layers * stage_memory / total for stage_memory in memory]
    layers = [max(1, floor(share)) for share in shares]
    by_rest = sorted(range(len(cut)), key=lambda stage: layers[stage] - shares[stage])
    while (missing := num_layers - sum(layers)) != 0:
        if missing > 0:
            for stage in by_rest[:missing]:
                layers[stage] += 1
        else:
            layers[layers.index(max(layers))] -= 1
    return layers


def _machine_orders(cluster: DeviceCluster, group: Group) -> Iterator[tuple[int, ...]]:
    """Yield orders of the group's machines along the pipeline."""
    machines = [index for index, count in enumerate(group) if count]
    if len(machines) > MAX_ORDERED_NODES or _links_alike(cluster, machines):
        # With equal links the order changes nothing but which machine holds which layers.
        yield tuple(machines)
        return
    yield from (order for order in permutations(machines) if order[0] <= order[-1])


def _links_alike(cluster: DeviceCluster, machines: Sequence[int]) -> bool:
    links = {cluster.link(a, b) for a in machines for b in machines if a < b}
    return len(links) < 2


def _cuts(
    order: Sequence[int], group: Group, num_heads: int
) -> Iterator[tuple[tuple[int, ...], ...]]:
    for degree in range(1, min(MAX_DEGREE, max(group)) + 1):
        if num_heads % degree:
            continue
        stages: list[tuple[int, ...]] = []
        for machine in order:
            stages += _cut_machine(machine, group[machine], degree, num_heads)
        yield tuple(stages)


def _cut_machine(machine: int, count: int, degree: int, num_heads: int) -> list[tuple[int, ...]]:
    """Return stages within a machine: as many ranks as `degree` allows, then the remainder."""
    stages = []
    while count:
        ranks = min(degree, count)
        while num_heads % ranks:
            ranks -= 1
        stages.append((machine,) * ranks)
        count -= ranks
    return stages


class PipelineCapacityRule(StrEnum):
    """Formula for the requests per second of a pipeline, by the micro-batches in flight."""

    PIPELINED = "pipelined"
    """One micro-batch per stage; together they are as large as the batch that fits memory."""
    CREDITED = "credited"
    """One micro-batch per stage, each as large as the batch that fits memory."""
    LITERAL = "literal"
    """Formula of the paper: one batch passes all stages before the next one starts."""


class Phase(StrEnum):
    """Phase that a replica computes: prefill, decode, or both."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    """Both phases in turn, for baselines without disaggregation."""


class Replica(NamedTuple):
    """A group of devices that runs as one engine, with its predicted latency and capacity."""

    group: Group
    phase: Phase
    stages: Stages
    latency: float
    """Predicted seconds of a request's prefill, of its decode steps in a full batch, or of both."""
    capacity: float
    """Requests per second."""
    batch: int
    """Largest number of requests whose KV cache fits memory."""

    @property
    def options(self) -> dict[str, Any]:
        """Scheduler options of the engine, for its simulation and for the serving plan.

        A prefill engine needs sequences for prompts that wait for their transfer.
        """
        options: dict[str, Any] = {} if self.phase is Phase.MIXED else {"preset": "flow"}
        if self.phase is not Phase.PREFILL:
            options["max_num_seqs"] = self.batch
        return options

    @property
    def degrees(self) -> str:
        """Return the parallelism, such as `TP2 PP3`, or `TP2,1` for unequal stages."""
        ranks = [len(stage.devices) for stage in self.stages]
        if len(set(ranks)) == 1:
            return f"TP{ranks[0]} PP{len(ranks)}"
        return "TP" + ",".join(map(str, ranks))


class ReplicaPlanner:
    """Chooses the best pipeline stages for each group of devices; results are cached.

    Prefill replicas minimize the latency, other replicas maximize the capacity.

    Args:
        cluster: Devices and network links.
        shape: Sizes of the model.
        costs: Predicted times and memory of replicas.
        rule: Formula for the capacity of a pipeline.
    """

    def __init__(
        self,
        cluster: DeviceCluster,
        shape: ModelShape,
        costs: ReplicaCosts,
        rule: PipelineCapacityRule = PipelineCapacityRule.PIPELINED,
    ) -> None:
        self.cluster, self.shape, self.costs, self.rule = cluster, shape, costs, rule
        self._best: dict[tuple[Group, Phase], Replica | None] = {}

    def best(self, group: Group, phase: Phase) -> Replica | None:
        """Return the best replica of a group; None if the model does not fit it."""
        key = group, phase
        if key not in self._best:
            is_prefill = phase is Phase.PREFILL

            def cost(replica: Replica) -> tuple[float, float]:
                figures = replica.latency, -replica.capacity
                return figures if is_prefill else figures[::-1]

            self._best[key] = min(self.candidates(group, phase), key=cost, default=None)
        return self._best[key]

    def candidates(self, group: Group, phase: Phase) -> list[Replica]:
        """Return a replica for each layout of a group that fits at least one request."""
        layouts = stage_layouts(self.cluster, group, self.shape.layers, self.shape.heads)
        replicas = []
        for stages in layouts:
            batch = self.costs.max_batch(stages)
            if batch and (replica := self._measure(group, phase, stages, batch)).capacity > 0:
                replicas.append(replica)
        return replicas

    def _measure(self, group: Group, phase: Phase, stages: Stages, batch: int) -> Replica:
        if phase is Phase.PREFILL:
            latency, capacity = self._prefill(stages)
        elif phase is Phase.DECODE:
            latency, capacity = self._decode(stages, batch)
        else:
            prefill, decode = self._prefill(stages), self._decode(stages, batch)
            latency = prefill[0] + decode[0]
            capacity = 1 / (1 / prefill[1] + 1 / decode[1]) if prefill[1] and decode[1] else 0.0
        return Replica(group, phase, stages, latency, capacity, batch)

    def _prefill(self, stages: Stages) -> tuple[float, float]:
        """Return latency and requests per second of prompts."""
        seconds, hops = self.costs.prefill(stages)
        latency = sum(seconds) + sum(hops)
        busy = latency
        if self.rule is PipelineCapacityRule.PIPELINED:
            turn = max([*seconds, *hops]) * self.costs.prefill_spread(len(stages))
            busy = min(latency, turn)
        return latency, self.costs.prompts_per_batch / busy

    def _decode(self, stages: Stages, batch: int) -> tuple[float, float]:
        """Return latency and requests per second of decodes."""
        num_flying = min(len(stages), batch) if self.rule is PipelineCapacityRule.PIPELINED else 1
        size = batch / num_flying
        seconds, hops = self.costs.decode(stages, size)
        latency = sum(seconds) + sum(hops)
        if self.rule is PipelineCapacityRule.LITERAL:
            return latency, batch / latency
        if self.rule is PipelineCapacityRule.CREDITED:
            return latency, batch / max(seconds)
        return latency, batch / max(latency, num_flying * max(seconds))


def max_model_len_of(planner: ReplicaPlanner, replicas: Sequence[Replica]) -> int:
    """Return the longest sequence that engines serve, in tokens: what all of their memories hold.

    It is at most the model's context, unless the workload has longer requests.

    Args:
        planner: Model, devices and workload.
        replicas: The engines.
    """
    shape, longest = planner.shape, planner.costs.lengths.longest
    pipelines = (build_pipeline(planner.cluster, shape, replica.stages) for replica in replicas)
    num_tokens = min(count_replica_kv_tokens(pipeline) for pipeline in pipelines)
    return planned_max_model_len(longest, num_tokens, shape.max_context)
