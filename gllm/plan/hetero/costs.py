"""Costs of replicas by Table 1 of HexGen-2: compute, communication, memory and KV transfers.

Times are seconds at the peak rates of the data sheets; with grouped-query attention H_kv takes the
place of H in the terms of the KV cache. A stage is a set of devices that hold `layers` layers
together; B is the bytes per element, s_in and s_out are the mean lengths.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Protocol

from gllm.plan.hetero.cluster import DeviceCluster
from gllm.plan.hetero.stages import PlannedStage, Stages
from gllm.plan.hetero.workload import MeanLengths
from gllm.sim.hardware.devices import NetworkLink
from gllm.sim.hardware.shapes import BYTES_PER_ELEMENT, ModelShape

SUMS_PER_LAYER = 4
"""Transfers among the ranks per layer: an all-reduce after attention and after the MLP, each a
scatter and a gather."""
MAX_BATCH = 512
"""Largest number of requests that a replica decodes at a time."""


class ReplicaCosts(Protocol):
    """Predicted times of one replica in seconds, and its memory."""

    @property
    def prompts_per_batch(self) -> int:
        """Return the prompts that a prefill replica computes together."""

    def prefill_seconds(self, stages: Stages) -> list[float]:
        """Return the time of each stage for the prompts of a batch."""

    def prefill_spread(self, num_stages: int) -> float:
        """Return the factor by which unlike prompts prolong the turns of a pipeline's stages."""

    def prefill_hops(self, stages: Stages) -> list[float]:
        """Return the time from each stage but the last to the next one."""

    def decode_seconds(self, stages: Stages, batch: float) -> list[float]:
        """Return the time of each stage for all output tokens of a batch of requests."""

    def decode_hops(self, stages: Stages, batch: float) -> list[float]:
        """Return the time of all output tokens from each stage but the last to the next one."""

    def max_batch(self, stages: Stages) -> int:
        """Return the requests that the memory of every stage holds; 0 if the model does not fit."""

    def kv_seconds(self, prefill: Stages, decode: Stages) -> float:
        """Return the time of the KV transfer of one request between two replicas."""


class Table1Costs:
    """Table 1 of HexGen-2.

    Args:
        cluster: Devices and links.
        shape: The model.
        lengths: Mean lengths of the workload.
    """

    prompts_per_batch = 1

    def __init__(self, cluster: DeviceCluster, shape: ModelShape, lengths: MeanLengths) -> None:
        self._cluster, self._lengths, self._shape = cluster, lengths, shape
        self._hidden = shape.hidden
        self._kv_width = shape.kv_heads * shape.head_dim
        self._bytes = BYTES_PER_ELEMENT

    # Rows of the table.

    def prefill_compute(self, stage: PlannedStage, batch: float = 1) -> float:
        """Return the arithmetic of a batch of prompts on the slowest device."""
        flops = 24 * batch * self._lengths.prompt * self._hidden**2 * stage.layers
        return flops / len(stage.devices) / min(self._flops(stage))

    def decode_compute(self, stage: PlannedStage, batch: float) -> float:
        """Return the reads of the weights and the arithmetic of all decode steps of a batch."""
        output, ranks = self._lengths.output, len(stage.devices)
        read = 12 * self._hidden**2 * self._bytes * output * stage.layers
        flops = 24 * batch * output * self._hidden**2 * stage.layers
        bandwidth = min(self._cluster.machines[each].spec.bandwidth for each in stage.devices)
        return read / ranks / bandwidth + flops / ranks / min(self._flops(stage))

    def prefill_rank_transfers(self, stage: PlannedStage, batch: float = 1) -> float:
        """Return the sums over the ranks for a batch of prompts."""
        size = batch * self._lengths.prompt * self._hidden * self._bytes
        return self._sums(stage, size) * stage.layers

    def decode_rank_transfers(self, stage: PlannedStage, batch: float) -> float:
        """Return the sums over the ranks for all decode steps of a batch."""
        size = batch * self._hidden * self._bytes
        return self._sums(stage, size) * self._lengths.output * stage.layers

    def prefill_hop(self, stage: PlannedStage, following: PlannedStage, batch: float = 1) -> float:
        """Return the transfer of a batch of prompts to the next stage, over the best link."""
        size = batch * self._lengths.prompt * self._hidden * self._bytes
        return self._best_transfer(stage, following, size)

    def decode_hop(self, stage: PlannedStage, following: PlannedStage, batch: float) -> float:
        """Return the transfers of all decode steps to the next stage, over the best link."""
        size = batch * self._hidden * self._bytes
        return self._best_transfer(stage, following, size) * self._lengths.output

    def device_bytes(self, stage: PlannedStage, batch: float) -> float:
        """Return the memory that a batch needs on each device of a stage."""
        tokens = batch * self._lengths.total
        weights = 12 * self._hidden**2 * self._bytes
        kv = 2 * tokens * self._kv_width * self._bytes
        activations = 4 * tokens * self._hidden * self._bytes
        return (weights + kv) * stage.layers / len(stage.devices) + activations

    # Replicas.

    def prefill_seconds(self, stages: Stages) -> list[float]:
        """Return arithmetic and sums of each stage for one prompt."""
        return [self.prefill_compute(each) + self.prefill_rank_transfers(each) for each in stages]

    def prefill_spread(self, num_stages: int) -> float:
        """Return 1: all prompts are alike."""
        return 1.0

    def prefill_hops(self, stages: Stages) -> list[float]:
        """Return the transfers of one prompt between the stages."""
        return [self.prefill_hop(a, b) for a, b in itertools.pairwise(stages)]

    def decode_seconds(self, stages: Stages, batch: float) -> list[float]:
        """Return the time of each stage for all decode steps of a batch."""
        return [
            self.decode_compute(each, batch) + self.decode_rank_transfers(each, batch)
            for each in stages
        ]

    def decode_hops(self, stages: Stages, batch: float) -> list[float]:
        """Return the transfers of all decode steps between the stages."""
        pairs = itertools.pairwise(stages)
        return [self.decode_hop(a, b, batch) for a, b in pairs]

    def max_batch(self, stages: Stages) -> int:
        """Return the largest batch that the memory of every device holds."""
        most = float(MAX_BATCH)
        for stage in stages:
            memory = min(self._cluster.machines[each].spec.memory for each in stage.devices)
            weights = self.device_bytes(stage, 0)
            most = min(most, (memory - weights) / (self.device_bytes(stage, 1) - weights))
        return max(0, int(most))

    def kv_seconds(self, prefill: Stages, decode: Stages) -> float:
        """Return the time of one request's KV transfer; links of device pairs act in parallel."""
        layer_bytes = 2 * self._lengths.prompt * self._kv_width * self._bytes
        return kv_transfer_seconds(prefill, decode, layer_bytes, self._cluster.link)

    def _flops(self, stage: PlannedStage) -> list[float]:
        return [self._cluster.machines[each].spec.flops for each in stage.devices]

    def _sums(self, stage: PlannedStage, size: float) -> float:
        """Return the sums of one layer over the ranks, at the rank with the worst links."""
        ranks = len(stage.devices)
        worst = 0.0
        for index, device in enumerate(stage.devices):
            links = [
                self._cluster.link(device, other)
                for place, other in enumerate(stage.devices)
                if place != index
            ]
            total = sum(each.latency + size / (ranks * each.bandwidth) for each in links)
            worst = max(worst, total)
        return SUMS_PER_LAYER * worst

    def _best_transfer(self, stage: PlannedStage, following: PlannedStage, size: float) -> float:
        links = {self._cluster.link(a, b) for a in stage.devices for b in following.devices}
        return min(each.latency + size / each.bandwidth for each in links)


def kv_transfer_seconds(
    prefill: Stages, decode: Stages, layer_bytes: float, link: Callable[[int, int], NetworkLink]
) -> float:
    """Return the time in which the KV cache of a request moves between two replicas.

    Each layer's shards go to the ranks that hold the same heads; the link of each pair of devices
    carries its shards of all layers, and the slowest one counts.

    Args:
        prefill: Stages that have the KV cache.
        decode: Stages that get it.
        layer_bytes: KV cache of one layer, all heads.
        link: Returns the link between two machines.
    """
    slowest = 0.0
    for source, num_layers, target in _overlaps(prefill, decode):
        for share, a, b in _shared_heads(source.devices, target.devices):
            way = link(a, b)
            slowest = max(slowest, way.latency + num_layers * layer_bytes * share / way.bandwidth)
    return slowest


def _overlaps(prefill: Stages, decode: Stages) -> list[tuple[PlannedStage, int, PlannedStage]]:
    """Return pairs of stages with layers in common, and the number of these."""
    pairs, first = [], 0
    for source in prefill:
        start = 0
        for target in decode:
            end = min(first + source.layers, start + target.layers)
            num_layers = end - max(first, start)
            if num_layers > 0:
                pairs.append((source, num_layers, target))
            start += target.layers
        first += source.layers
    return pairs


def _shared_heads(a: Sequence[int], b: Sequence[int]) -> list[tuple[float, int, int]]:
    """Return the share of the heads that each pair of ranks has in common, and their machines."""
    shares = []
    for i, source in enumerate(a):
        for j, target in enumerate(b):
            common = min((i + 1) / len(a), (j + 1) / len(b)) - max(i / len(a), j / len(b))
            if common > 1e-12:
                shares.append((common, source, target))
    return shares
