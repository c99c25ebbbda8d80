"""Best parallelism of a group of devices for a phase, and the requests per second that it serves.

Prefill takes the layout with the least latency, decode the one with the most capacity (HexGen-2,
arXiv 2502.07903, section 4.2).
"""

from enum import StrEnum
from typing import NamedTuple

from gllm.plan.hetero.cluster import DeviceCluster, Group
from gllm.plan.hetero.costs import ReplicaCosts
from gllm.plan.hetero.stages import Stages, stage_layouts
from gllm.sim.hardware.shapes import ModelShape


class PipelineCredit(StrEnum):
    """Rule by which stages that work at the same time count for the capacity of a replica."""

    PIPELINED = "pipelined"
    """Every stage has a micro-batch; all micro-batches together are the batch that memory holds."""
    CREDITED = "credited"
    """Every stage has a micro-batch, each as large as the batch that memory holds."""
    LITERAL = "literal"
    """The paper's formula: one batch goes through all stages before the next one."""


class Phase(StrEnum):
    """Work of a replica."""

    PREFILL = "prefill"
    DECODE = "decode"
    MIXED = "mixed"
    """Both, in turn: a replica of the colocated baselines."""


class Replica(NamedTuple):
    """A group of devices as one engine."""

    group: Group
    phase: Phase
    stages: Stages
    latency: float
    """Seconds of a request: of its prompt, or of all its decode steps in a full batch."""
    capacity: float
    """Requests per second."""
    batch: int
    """Requests in memory at a time."""

    @property
    def degrees(self) -> str:
        """Return the parallelism, such as `TP2 PP3`, or `TP2,1` for unequal stages."""
        ranks = [len(stage.devices) for stage in self.stages]
        if len(set(ranks)) == 1:
            return f"TP{ranks[0]} PP{len(ranks)}"
        return "TP" + ",".join(map(str, ranks))


class ReplicaPlanner:
    """Chooses the layout of each group; results are kept.

    Args:
        cluster: Devices and links.
        shape: The model.
        costs: Predicted times and memory.
        rule: Rule of the capacities.
    """

    def __init__(
        self,
        cluster: DeviceCluster,
        shape: ModelShape,
        costs: ReplicaCosts,
        rule: PipelineCredit = PipelineCredit.PIPELINED,
    ) -> None:
        self.cluster, self.shape, self.costs, self.rule = cluster, shape, costs, rule
        self._best: dict[tuple[Group, Phase], Replica | None] = {}
        self._kv_seconds: dict[tuple[Stages, Stages], float] = {}

    def best(self, group: Group, phase: Phase) -> Replica | None:
        """Return the best replica of a group; None if the model does not fit it."""
        key = group, phase
        if key not in self._best:
            replicas = self.candidates(group, phase)
            if phase is Phase.PREFILL:
                best = min(replicas, key=lambda each: (each.latency, -each.capacity), default=None)
            else:
                best = max(replicas, key=lambda each: (each.capacity, -each.latency), default=None)
            self._best[key] = best
        return self._best[key]

    def candidates(self, group: Group, phase: Phase) -> list[Replica]:
        """Return a replica for each layout that holds at least one request."""
        layouts = stage_layouts(self.cluster, group, self.shape.layers, self.shape.heads)
        replicas = []
        for stages in layouts:
            batch = self.costs.max_batch(stages)
            if batch and (replica := self._measure(group, phase, stages, batch)).capacity > 0:
                replicas.append(replica)
        return replicas

    def kv_seconds(self, prefill: Replica, decode: Replica) -> float:
        """Return the time of one request's KV transfer."""
        key = prefill.stages, decode.stages
        if key not in self._kv_seconds:
            self._kv_seconds[key] = self.costs.kv_seconds(*key)
        return self._kv_seconds[key]

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
        seconds, hops = self.costs.prefill_seconds(stages), self.costs.prefill_hops(stages)
        latency = sum(seconds) + sum(hops)
        busy = latency
        if self.rule is PipelineCredit.PIPELINED:
            turn = max([*seconds, *hops]) * self.costs.prefill_spread(len(stages))
            busy = min(latency, turn)
        return latency, self.costs.prompts_per_batch / busy

    def _decode(self, stages: Stages, batch: int) -> tuple[float, float]:
        """Return latency and requests per second of decodes."""
        num_flying = min(len(stages), batch) if self.rule is PipelineCredit.PIPELINED else 1
        size = batch / num_flying
        seconds = self.costs.decode_seconds(stages, size)
        latency = sum(seconds) + sum(self.costs.decode_hops(stages, size))
        if self.rule is PipelineCredit.LITERAL:
            return latency, batch / latency
        if self.rule is PipelineCredit.CREDITED:
            return latency, batch / max(seconds)
        return latency, batch / max(latency, num_flying * max(seconds))
