"""Times and memory of replicas: by the simulator's roofline, or by Table 1 of HexGen-2.

The roofline makes plans and simulations agree. Table 1 is the paper's: peak rates of the data
sheets, mean lengths, no reads of the KV cache; with grouped-query attention H_kv takes the place of
H in the terms of the KV cache. A stage is a set of devices that hold `layers` layers together.
"""

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import NamedTuple

from gllm.plan.engine_times import EngineTimes, decode_step_work, prefill_work
from gllm.plan.hetero.workload import MeanLengths
from gllm.plan.layout import PlannedStage, Stages
from gllm.plan.nodes import DeviceCluster
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
    """Predicted prefill, decode and KV transfer times of one replica, and its largest batch.

    A replica is a group of devices that runs as one prefill or decode engine.

    Args:
        cluster: Devices and network links.
        shape: Sizes of the model.
        lengths: Mean prompt and output lengths of the workload.
    """

    prompts_per_batch = 1
    """Prompts that a prefill replica computes together."""

    def __init__(self, cluster: DeviceCluster, shape: ModelShape, lengths: MeanLengths) -> None:
        self._cluster, self._shape, self._lengths = cluster, shape, lengths

    @abstractmethod
    def prefill(self, stages: Stages) -> PhaseSeconds:
        """Return the seconds of a batch of prompts, by stage and link."""

    @abstractmethod
    def decode(self, stages: Stages, batch: float) -> PhaseSeconds:
        """Return the seconds of all output tokens of a batch of requests, by stage and link."""

    @abstractmethod
    def max_batch(self, stages: Stages) -> int:
        """Return how many requests fit the memory of every stage; 0 if not even one fits."""

    def prefill_spread(self, num_stages: int) -> float:
        """Return the factor by which unequal prompt lengths slow a pipeline of stages down."""
        return 1.0

    def kv_seconds(self, prefill: Stages, decode: Stages) -> float:
        """Return the seconds of the KV transfer of one request from a prefill to a decode replica.

        Links work in parallel.
        """
        layer_bytes = self._lengths.prompt * self._shape.kv_bytes
        return kv_transfer_seconds(prefill, decode, layer_bytes, self._cluster.link)


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
        size = self._lengths.prompt * self._token_bytes
        return PhaseSeconds(
            [self.prefill_compute(stage) + self.rank_transfers(stage, size) for stage in stages],
            self.hops(stages, size),
        )

    def decode(self, stages: Stages, batch: float) -> PhaseSeconds:
        """Return the times of all decode steps of a batch."""
        size, output = batch * self._token_bytes, self._lengths.output
        return PhaseSeconds(
            [
                self.decode_compute(stage, batch) + self.rank_transfers(stage, size) * output
                for stage in stages
            ],
            [seconds * output for seconds in self.hops(stages, size)],
        )

    def max_batch(self, stages: Stages) -> int:
        """Return the largest batch that fits the memory of every device."""
        most = float(MAX_BATCH)
        for stage in stages:
            weights = self.device_bytes(stage, 0)
            request_bytes = self.device_bytes(stage, 1) - weights
            most = min(most, (self._least(stage, "memory") - weights) / request_bytes)
        return max(0, int(most))

    # Rows of the table.

    def prefill_compute(self, stage: PlannedStage) -> float:
        """Return the compute seconds of a prompt on the slowest device of a stage."""
        flops = 24 * self._lengths.prompt * self._shape.hidden**2 * stage.layers
        return flops / len(stage.devices) / self._least(stage, "flops")

    def decode_compute(self, stage: PlannedStage, batch: float) -> float:
        """Return the seconds of weight reads and arithmetic of all decode steps of a batch."""
        output, ranks = self._lengths.output, len(stage.devices)
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
        tokens = batch * self._lengths.total
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
        rows, output = max(1, round(batch)), self._lengths.output
        if rows not in self._decode_works:
            self._decode_works[rows] = decode_step_work(rows, self._lengths.prompt + output / 2)
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
        spread = self._lengths.spread
        return spread[min(num_stages, len(spread)) - 1] if spread else 1.0

    def max_batch(self, stages: Stages) -> int:
        """Return the most requests of mean length that fit the KV cache; 0 without room for one."""
        if stages not in self._engines:
            self._engines[stages] = None
            with suppress(ValueError):
                hardware = build_pipeline(self._cluster, self._shape, stages)
                model = RooflineCostModel(hardware, layers=self._layers)
                self._engines[stages] = hardware, model
        if (engine := self._engines[stages]) is None:
            return 0
        try:
            blocks = min(engine[0].stage_kv_blocks(BLOCK_SIZE, USABLE_MEMORY_SHARE))
        except ValueError:
            return 0
        return max(0, min(MAX_BATCH, int(blocks * BLOCK_SIZE / self._lengths.total)))

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


def kv_transfer_seconds(
    prefill: Stages, decode: Stages, layer_bytes: float, link: Callable[[int, int], NetworkLink]
) -> float:
    """Return the predicted seconds of the KV transfer of one request between two replicas.

    Each layer's KV heads are sent from the prefill ranks to the decode ranks that need them. All
    links transfer in parallel, so the slowest one determines the time.

    Args:
        prefill: Stages of the sending replica.
        decode: Stages of the receiving replica.
        layer_bytes: Bytes of the request's KV cache in one layer, all heads.
        link: Returns the link between two nodes, given by index.
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
