"""Times and memory of replicas: by the simulator's roofline, or by Table 1 of HexGen-2.

The roofline makes plans and simulations agree. Table 1 is the paper's: peak rates of the data
sheets, mean lengths, no reads of the KV cache; with grouped-query attention H_kv takes the place of
H in the terms of the KV cache. A stage is a set of devices that hold `layers` layers together.
"""

import itertools
from abc import ABC, abstractmethod
from contextlib import suppress
from functools import cache
from math import floor
from typing import NamedTuple

from gllm.plan.engine_checks import activation_bytes
from gllm.plan.engine_times import EngineTimes, decode_step_work, prefill_work
from gllm.plan.hetero.workload import MeanLengths
from gllm.plan.layout import PlannedStage, Stages
from gllm.plan.nodes import DeviceCluster
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.roofline import LayerRooflines, RooflineCostModel
from gllm.sim.deployment import USABLE_MEMORY_SHARE
from gllm.sim.hardware.devices import DeviceSpec, NetworkLink
from gllm.sim.hardware.shapes import BYTES_PER_ELEMENT, ModelShape
from gllm.sim.hardware.stages import PipelineSpec, StageSpec

SUMS_PER_LAYER = 4
"""Transfers among the ranks per layer: an all-reduce after attention and after the MLP, each a
scatter and a gather."""
MAX_BATCH = 512
"""Largest number of requests that a replica decodes at a time."""
BATCHED_PROMPT_TOKENS = 512
"""Prompt tokens that a prefill engine computes together: L_m of the policy `distserve`."""
BLOCK_SIZE = 16


class PhaseSeconds(NamedTuple):
    """Predicted seconds of a prefill batch, or of all decode steps of a batch, per stage and link.

    All are times without waiting.
    """

    stages: list[float]
    """Compute seconds on each pipeline stage."""
    hops: list[float]
    """Transfer seconds from each stage to the next, and from the last to the first if modeled."""


class ReplicaCosts(ABC):
    """Predicted prefill and decode times of one replica, and its largest batch.

    A replica is a group of devices that runs as one prefill or decode engine.

    Args:
        cluster: Devices and network links.
        shape: Sizes of the model.
        lengths: Mean prompt and output lengths of the workload.
    """

    prompts_per_batch = 1
    """Prompts that a prefill replica computes together."""
    memory_share = 1.0
    """Share of the memory of devices that weights and KV cache may use at most."""

    def __init__(self, cluster: DeviceCluster, shape: ModelShape, lengths: MeanLengths) -> None:
        self._cluster, self._shape, self.lengths = cluster, shape, lengths

    @abstractmethod
    def prefill(self, stages: Stages) -> PhaseSeconds:
        """Return the seconds of a batch of prompts, by stage and link."""

    @abstractmethod
    def decode(self, stages: Stages, batch: float) -> PhaseSeconds:
        """Return the seconds of all output tokens of a batch of requests, by stage and link."""

    @abstractmethod
    def max_batch(self, stages: Stages) -> int:
        """Return how many mean requests fit every stage's memory; 0 if the longest does not."""

    def prefill_spread(self, num_stages: int) -> float:
        """Return the factor by which unequal prompt lengths slow a pipeline of stages down."""
        return 1.0


class Table1Costs(ReplicaCosts):
    """Cost model of Table 1 of the HexGen-2 paper: peak compute and bandwidth, equal lengths.

    Prompts are prefilled one by one.
    """

    def __init__(self, cluster: DeviceCluster, shape: ModelShape, lengths: MeanLengths) -> None:
        super().__init__(cluster, shape, lengths)
        self._token_bytes = shape.hidden * BYTES_PER_ELEMENT
        """Activations of a token."""

    def prefill(self, stages: Stages) -> PhaseSeconds:
        """Return the times of one prompt."""
        size = self.lengths.prompt * self._token_bytes
        return PhaseSeconds(
            [self.prefill_compute(stage) + self.rank_transfers(stage, size) for stage in stages],
            self.hops(stages, size),
        )

    def decode(self, stages: Stages, batch: float) -> PhaseSeconds:
        """Return the times of all decode steps of a batch."""
        size, output = batch * self._token_bytes, self.lengths.output
        return PhaseSeconds(
            [
                self.decode_compute(stage, batch) + self.rank_transfers(stage, size) * output
                for stage in stages
            ],
            [seconds * output for seconds in self.hops(stages, size)],
        )

    def max_batch(self, stages: Stages) -> int:
        """Return the largest batch that fits every device; 0 if the longest request does not."""
        most = float(MAX_BATCH)
        for stage in stages:
            weights = self.device_bytes(stage, 0)
            request_bytes = self.device_bytes(stage, 1) - weights
            most = min(most, (self._least(stage, "memory") - weights) / request_bytes)
        if most * self.lengths.total < self.lengths.longest:
            return 0
        return max(0, int(most))

    # Rows of the table.

    def prefill_compute(self, stage: PlannedStage) -> float:
        """Return the compute seconds of a prompt on the slowest device of a stage."""
        flops = 24 * self.lengths.prompt * self._shape.hidden**2 * stage.layers
        return flops / len(stage.devices) / self._least(stage, "flops")

    def decode_compute(self, stage: PlannedStage, batch: float) -> float:
        """Return the seconds of weight reads and arithmetic of all decode steps of a batch."""
        output, ranks = self.lengths.output, len(stage.devices)
        read = 12 * self._shape.hidden**2 * BYTES_PER_ELEMENT * output * stage.layers
        flops = 24 * batch * output * self._shape.hidden**2 * stage.layers
        seconds = read / ranks / self._least(stage, "bandwidth")
        return seconds + flops / ranks / self._least(stage, "flops")

    def rank_transfers(self, stage: PlannedStage, size: float) -> float:
        """Return the all-reduce seconds of a stage, at the rank with the slowest links."""
        ranks = len(stage.devices)
        worst = 0.0
        for index, device in enumerate(stage.devices):
            links = [
                self._cluster.link(device, other)
                for place, other in enumerate(stage.devices)
                if place != index
            ]
            total = sum(link.latency + size / (ranks * link.bandwidth) for link in links)
            worst = max(worst, total)
        return SUMS_PER_LAYER * worst * stage.layers

    def hops(self, stages: Stages, size: float) -> list[float]:
        """Return the transfer seconds of activations between stages, each over the fastest link."""
        return [
            min(
                link.latency + size / link.bandwidth
                for link in {self._cluster.link(a, b) for a in stage.devices for b in other.devices}
            )
            for stage, other in itertools.pairwise(stages)
        ]

    def device_bytes(self, stage: PlannedStage, batch: float) -> float:
        """Return the bytes that a batch occupies on each device of a stage."""
        tokens = batch * self.lengths.total
        weights = 12 * self._shape.hidden**2 * BYTES_PER_ELEMENT
        kv = tokens * self._shape.kv_bytes
        activations = 4 * tokens * self._token_bytes
        return (weights + kv) * stage.layers / len(stage.devices) + activations

    def _least(self, stage: PlannedStage, field: str) -> float:
        """Return the least value of a field of DeviceSpec among the devices of a stage."""
        return min(getattr(self._cluster.nodes[node].spec, field) for node in stage.devices)


class RooflineCosts(ReplicaCosts):
    """Cost model of replicas by the simulator's roofline model of each device.

    Prompts up to BATCHED_PROMPT_TOKENS are prefilled in batches.
    """

    memory_share = USABLE_MEMORY_SHARE

    def __init__(self, cluster: DeviceCluster, shape: ModelShape, lengths: MeanLengths) -> None:
        super().__init__(cluster, shape, lengths)
        # Prompts of mean length within L_m; a longer one runs alone.
        self.prompts_per_batch = max(1, int(BATCHED_PROMPT_TOKENS // lengths.prompt))
        self._prefill_work = prefill_work([round(lengths.prompt)] * self.prompts_per_batch)
        self._decode_works: dict[int, StageWork] = {}
        """Decode steps by their number of rows."""
        self._engines: dict[Stages, tuple[PipelineSpec, RooflineCostModel] | None] = {}
        """Hardware and times of each layout; None for one that the model's sizes forbid."""
        self._layers: LayerRooflines = {}
        """Predictions of a layer by device, which pipelines share."""

    def prefill(self, stages: Stages) -> PhaseSeconds:
        """Return the times of a batch of prompts of mean length."""
        times = EngineTimes(self._model(stages), len(stages))
        return PhaseSeconds(times.stages(self._prefill_work), times.hops(self._prefill_work))

    def decode(self, stages: Stages, batch: float) -> PhaseSeconds:
        """Return the seconds of all decode steps at the mean context, by stage and link."""
        rows, output = max(1, round(batch)), self.lengths.output
        if rows not in self._decode_works:
            self._decode_works[rows] = decode_step_work(rows, self.lengths.prompt + output / 2)
        work, model = self._decode_works[rows], self._model(stages)
        times, way_back = EngineTimes(model, len(stages)), model.return_transfer(work).total_seconds
        driver = model.plan_seconds(work) + model.return_seconds(work)
        back = way_back + driver
        return PhaseSeconds(
            [output * seconds for seconds in times.stages(work)],
            [output * seconds for seconds in [*times.hops(work), back]],
        )

    def prefill_spread(self, num_stages: int) -> float:
        """Return the expected longest of as many prompts as stages, divided by the mean length.

        A pipeline has one prompt per stage in flight, and each waits for the longest of them.
        """
        spread = self.lengths.spread
        return spread[min(num_stages, len(spread)) - 1] if spread else 1.0

    def max_batch(self, stages: Stages) -> int:
        """Return the most mean requests that fit the KV cache; 0 if the longest does not."""
        if stages not in self._engines:
            self._engines[stages] = None
            with suppress(ValueError):
                hardware = build_pipeline(self._cluster, self._shape, stages)
                model = RooflineCostModel(hardware, layers=self._layers)
                self._engines[stages] = hardware, model
        if (engine := self._engines[stages]) is None:
            return 0
        try:
            num_tokens = count_replica_kv_tokens(engine[0])
        except ValueError:
            return 0
        if num_tokens < self.lengths.longest:
            return 0
        return min(MAX_BATCH, int(num_tokens / self.lengths.total))

    def _model(self, stages: Stages) -> RooflineCostModel:
        """Return the cost model of a layout. Raises ValueError if the model does not fit it."""
        if not self.max_batch(stages) or (engine := self._engines[stages]) is None:
            raise ValueError(f"the model does not fit {stages}")
        return engine[1]


def build_pipeline(cluster: DeviceCluster, shape: ModelShape, stages: Stages) -> PipelineSpec:
    """Return the hardware description of a replica's pipeline for the roofline model.

    A stage with different devices runs at the compute, bandwidth and memory of the slowest ones.

    Args:
        cluster: Devices and network links.
        shape: Sizes of the model.
        stages: Devices and layers of each stage.

    Raises:
        ValueError: The model's heads or hidden size cannot be divided among the ranks of a stage.
    """
    # Stages of equal devices and layers share their description.
    specs = {
        stage: StageSpec(
            stage.layers,
            slowest_device(cluster, stage),
            len(stage.devices),
            slowest_link(cluster, stage) if len(stage.devices) > 1 else None,
        )
        for stage in set(stages)
    }
    hops = tuple(best_link(cluster, a, b) for a, b in itertools.pairwise(stages))
    return PipelineSpec(
        shape,
        tuple(specs[stage] for stage in stages),
        hops,
        (None, *hops),
        hops[-1] if hops else None,
    )


@cache
def largest_step() -> SchedulerConfig:
    """Return the scheduler options with which engines of a plan need most memory for a step."""
    return SchedulerConfig(preset="flow", max_num_seqs=MAX_BATCH).resolve(1, 1, 1)


def count_replica_kv_tokens(pipeline: PipelineSpec) -> int:
    """Return the tokens for whose KV entries every device has space beside weights and activations.

    Args:
        pipeline: Model and devices of a replica.

    Raises:
        ValueError: The model's heads cannot be divided among the ranks of a stage.
    """
    blocks = []
    for index, count in enumerate(pipeline.stage_kv_blocks(BLOCK_SIZE, USABLE_MEMORY_SHARE)):
        shard = pipeline.model.shard(pipeline.stages[index].tp)
        used = activation_bytes(shard, largest_step())
        blocks.append(count - used / pipeline.rank_block_bytes(index, BLOCK_SIZE))
    return max(0, floor(min(blocks))) * BLOCK_SIZE


def slowest_device(cluster: DeviceCluster, stage: PlannedStage) -> DeviceSpec:
    """Return a device with the lowest rates and the least memory among the devices of a stage.

    The values may come from different devices.
    """
    specs = [cluster.nodes[node].spec for node in set(stage.devices)]
    launches = [spec.launch_seconds for spec in specs]
    known = [seconds for seconds in launches if seconds is not None]
    return DeviceSpec(
        min(spec.flops for spec in specs),
        min(spec.bandwidth for spec in specs),
        min(spec.memory for spec in specs),
        # A host without a value has the typical one of the cost model, which is between the others.
        launch_seconds=max(known) if len(known) == len(launches) else None,
    )


def slowest_link(cluster: DeviceCluster, stage: PlannedStage) -> NetworkLink:
    """Return the link with the lowest bandwidth between any two ranks of a stage."""
    devices = stage.devices
    links = [cluster.link(a, b) for i, a in enumerate(devices) for b in devices[i + 1 :]]
    return min(links, key=lambda link: link.bandwidth)


def best_link(cluster: DeviceCluster, stage: PlannedStage, following: PlannedStage) -> NetworkLink:
    """Return the link with the highest bandwidth between the devices of two stages.

    Activations are assumed to take this link.
    """
    links = [cluster.link(a, b) for a in stage.devices for b in following.devices]
    return max(links, key=lambda link: link.bandwidth)


def layer_overlaps(prefill: Stages, decode: Stages) -> list[tuple[int, int, int]]:
    """Return the stages of two engines that have layers in common, and the number of these.

    Args:
        prefill: Stages of the sending replica.
        decode: Stages of the receiving replica.

    Returns:
        (index of the sending stage, index of the receiving stage, number of layers).
    """
    pairs, first = [], 0
    for i, source in enumerate(prefill):
        start = 0
        for j, target in enumerate(decode):
            end = min(first + source.layers, start + target.layers)
            num_layers = end - max(first, start)
            if num_layers > 0:
                pairs.append((i, j, num_layers))
            start += target.layers
        first += source.layers
    return pairs
