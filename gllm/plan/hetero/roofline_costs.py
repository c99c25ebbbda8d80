"""Costs of replicas by the simulator's roofline, so that plans and simulations agree."""

import itertools
from contextlib import suppress
from functools import cached_property

from gllm.plan.hetero.cluster import DeviceCluster
from gllm.plan.hetero.costs import MAX_BATCH, kv_transfer_seconds
from gllm.plan.hetero.stages import PlannedStage, Stages
from gllm.plan.hetero.workload import MeanLengths
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.roofline import LayerRooflines, RooflineCostModel
from gllm.sim.deployment import USABLE_MEMORY_SHARE
from gllm.sim.hardware.devices import DeviceSpec, NetworkLink
from gllm.sim.hardware.shapes import ModelShape
from gllm.sim.hardware.stages import PipelineSpec, StageSpec

BATCHED_PROMPT_TOKENS = 512
"""Prompt tokens that a prefill engine computes together: L_m of the policy `distserve`."""
BLOCK_SIZE = 16


def build_pipeline(cluster: DeviceCluster, shape: ModelShape, stages: Stages) -> PipelineSpec:
    """Return the hardware of a replica. Ranks on unlike devices run at the slowest one's rates.

    Raises:
        ValueError: Sizes do not divide.
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
    """Return a device with the least rate and memory of each kind among a stage's devices."""
    specs = [cluster.machines[each].spec for each in set(stage.devices)]
    launches = [each.launch_seconds for each in specs]
    known = [each for each in launches if each is not None]
    return DeviceSpec(
        min(each.flops for each in specs),
        min(each.bandwidth for each in specs),
        min(each.memory for each in specs),
        # A host without a value has the typical one of the cost model, which is between the others.
        launch_seconds=max(known) if len(known) == len(launches) else None,
    )


def slowest_link(cluster: DeviceCluster, stage: PlannedStage) -> NetworkLink:
    """Return the link with the least bandwidth between two ranks of a stage."""
    devices = stage.devices
    links = [cluster.link(a, b) for i, a in enumerate(devices) for b in devices[i + 1 :]]
    return min(links, key=lambda each: each.bandwidth)


def best_link(cluster: DeviceCluster, stage: PlannedStage, following: PlannedStage) -> NetworkLink:
    """Return the link with the most bandwidth between two stages."""
    links = [cluster.link(a, b) for a in stage.devices for b in following.devices]
    return max(links, key=lambda each: each.bandwidth)


class RooflineCosts:
    """Costs by the simulator's roofline.

    Args:
        cluster: Devices and links.
        shape: The model.
        lengths: Mean lengths of the workload.
    """

    def __init__(self, cluster: DeviceCluster, shape: ModelShape, lengths: MeanLengths) -> None:
        self._cluster, self._shape, self._lengths = cluster, shape, lengths
        self._hardware: dict[Stages, PipelineSpec | None] = {}
        self._models: dict[Stages, RooflineCostModel | None] = {}
        self._layers: LayerRooflines = {}
        """Predictions of a layer by device, which pipelines share."""
        self._decode_works: dict[int, StageWork] = {}
        """Decode steps by their number of rows."""
        self._step = 0

    @cached_property
    def prompts_per_batch(self) -> int:
        """Return the prompts of mean length within L_m; a longer one runs alone."""
        return max(1, int(BATCHED_PROMPT_TOKENS // self._lengths.prompt))

    def prefill_seconds(self, stages: Stages) -> list[float]:
        """Return the time of each stage; infinite for a layout that the model's sizes forbid."""
        return self._stage_seconds(stages, self._prefill_work)

    def prefill_spread(self, num_stages: int) -> float:
        """Return the expected longest of as many prompts as stages, over the mean.

        A pipeline has one prompt per stage in flight, and each waits for the longest of them.
        """
        spread = self._lengths.spread
        return spread[min(num_stages, len(spread)) - 1] if spread else 1.0

    def prefill_hops(self, stages: Stages) -> list[float]:
        """Return the transfers of the activations of a batch of prompts."""
        work = StageWork(0, self.prompts_per_batch * round(self._lengths.prompt), (), 0, 0, 0)
        return self._hop_seconds(stages, work)

    def decode_seconds(self, stages: Stages, batch: float) -> list[float]:
        """Return the time of each stage for all decode steps, at the mean context."""
        seconds = self._stage_seconds(stages, self._decode_work(batch))
        return [self._lengths.output * each for each in seconds]

    def decode_hops(self, stages: Stages, batch: float) -> list[float]:
        """Return the transfers of all decode steps, the way back to the first stage included."""
        hops = self._hop_seconds(stages, self._decode_work(batch))
        model = self._model(stages)
        if model is None:
            return hops
        work = self._decode_work(batch)
        way_back = model.return_transfer(work)
        driver = model.plan_seconds(work) + model.return_seconds(work)
        back = way_back.occupancy_seconds + way_back.propagation_seconds + driver
        return [self._lengths.output * each for each in [*hops, back]]

    def max_batch(self, stages: Stages) -> int:
        """Return the requests of mean length that the KV blocks beside the weights hold."""
        hardware = self._pipeline(stages)
        if hardware is None:
            return 0
        try:
            blocks = min(hardware.stage_kv_blocks(BLOCK_SIZE, USABLE_MEMORY_SHARE))
        except ValueError:
            return 0
        return max(0, min(MAX_BATCH, int(blocks * BLOCK_SIZE / self._lengths.total)))

    def kv_seconds(self, prefill: Stages, decode: Stages) -> float:
        """Return the time of one request's KV transfer; links of device pairs act in parallel."""
        layer_bytes = self._lengths.prompt * self._shape.kv_bytes
        return kv_transfer_seconds(prefill, decode, layer_bytes, self._cluster.link)

    @cached_property
    def _prefill_work(self) -> StageWork:
        num_prompts = self.prompts_per_batch
        prompt = round(self._lengths.prompt)
        chunks = ((0, prompt),) * num_prompts
        return StageWork(self._next_step(), num_prompts * prompt, chunks, 0, 0, num_prompts)

    def _decode_work(self, batch: float) -> StageWork:
        rows = max(1, round(batch))
        if rows not in self._decode_works:
            context = self._lengths.prompt + self._lengths.output / 2
            self._decode_works[rows] = StageWork(
                self._next_step(), rows, (), rows, round(rows * context), rows
            )
        return self._decode_works[rows]

    def _next_step(self) -> int:
        # The roofline keeps predictions by step number.
        self._step += 1
        return self._step

    def _pipeline(self, stages: Stages) -> PipelineSpec | None:
        """Return the hardware of a layout; None if the model's sizes forbid it."""
        if stages not in self._hardware:
            try:
                self._hardware[stages] = build_pipeline(self._cluster, self._shape, stages)
            except ValueError:
                self._hardware[stages] = None
        return self._hardware[stages]

    def _model(self, stages: Stages) -> RooflineCostModel | None:
        if stages not in self._models:
            self._models[stages] = None
            if hardware := self._pipeline(stages):
                with suppress(ValueError):
                    self._models[stages] = RooflineCostModel(hardware, layers=self._layers)
        return self._models[stages]

    def _stage_seconds(self, stages: Stages, work: StageWork) -> list[float]:
        model = self._model(stages)
        if model is None:
            return [float("inf")] * len(stages)
        return [model.stage_seconds(index, work) for index in range(len(stages))]

    def _hop_seconds(self, stages: Stages, work: StageWork) -> list[float]:
        model = self._model(stages)
        if model is None:
            return [0.0] * (len(stages) - 1)
        hops = [model.activation_transfer(index, work) for index in range(len(stages) - 1)]
        return [each.occupancy_seconds + each.propagation_seconds for each in hops]
