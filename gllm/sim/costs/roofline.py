"""Step times from first principles: arithmetic, memory traffic and communication of a micro-batch.

A roofline with a rounded corner: an operator takes the root of the sum of squares of the time of
its arithmetic and the time of its memory traffic. A layer adds the traffic of its element-wise
operators, a fixed time of its kernels and the sums over the ranks, which do not overlap with the
rest; it takes at least the time in which the host launches its kernels. All constants are the same
for every policy, model and number of ranks; docs/simulator.md shows the errors.

Sources: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", 2009.
Fitted to the operators and whole steps of Vidur's tables (arXiv 2405.05465) and to Splitwise's
measurements (arXiv 2311.18677): `python -m scripts.roofline_error`, `python -m scripts.step_error`.
"""

from dataclasses import dataclass
from math import hypot

from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import NO_TRANSFER, BaseCostModel, TransferCost
from gllm.sim.costs.collectives import all_reduce_seconds, gather_seconds
from gllm.sim.hardware.devices import DeviceSpec
from gllm.sim.hardware.links import NetworkLink
from gllm.sim.hardware.shapes import (
    BYTES_PER_ELEMENT,
    BYTES_PER_LOGIT,
    FLOPS_PER_WEIGHT,
    ModelShape,
)
from gllm.sim.hardware.stages import PipelineSpec, StageSpec

SUMS_PER_LAYER = 2
"""All-reduces of each layer: after attention and after the MLP."""
PLAN_BYTES_PER_ROW = 64
"""Assumed bytes of a plan per row: ids, lengths, new blocks, sampling."""
BYTES_PER_TOKEN_ID = 4
"""Bytes of a token id in a plan or a result."""


@dataclass(frozen=True)
class DeviceEfficiency:
    """Shares of peak rates that kernels reach, and fixed times around them."""

    compute: float = 0.70
    """Share of the peak FLOP/s in products with weights."""
    memory: float = 0.79
    """Share of the memory bandwidth."""
    attention: float = 0.5
    """Share of the peak FLOP/s in attention."""
    collective: float = 0.6
    """Speed of sums over the ranks within a step, as a share of their speed alone: ranks do not
    reach a sum at the same time."""
    kernel_seconds: float = 40e-6
    """Fixed seconds of the kernels of one layer, besides the sums."""
    launch_seconds: float = 0.45e-3
    """Seconds in which a host launches the kernels of one layer; a device's own value outranks it.
    """
    stage_overhead: float = 0.7e-3
    """Seconds in each step on each stage, to prepare its inputs."""
    plan_overhead: float = 0.2e-3
    """Seconds from a schedule until the first stage has its inputs."""
    return_overhead: float = 0.3e-3
    """Seconds from the last stage's end to the commit: sampling and the way back."""


class RooflineCostModel(BaseCostModel):
    """Cost of a model on devices and links that data sheets describe.

    Args:
        hardware: The stages, their devices and links.
        efficiency: Shares of the peak rates that are reached.
    """

    def __init__(self, hardware: PipelineSpec, efficiency: DeviceEfficiency | None = None) -> None:
        self._hardware = hardware
        self._hidden = hardware.model.hidden
        self._efficiency = efficiency or DeviceEfficiency()
        self._stages = [
            _StageRoofline(hardware, index, self._efficiency)
            for index in range(len(hardware.stages))
        ]

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Layers one after the other; on the last stage the LM head over the sampled rows."""
        roofline = self._stages[stage]
        seconds = roofline.compute_seconds(work) + roofline.collective_seconds(work)
        return seconds + self._efficiency.stage_overhead

    def collective_seconds(self, stage: int, work: StageWork) -> float:
        """Return the share of `stage_seconds` in which the stage's ranks communicate."""
        return self._stages[stage].collective_seconds(work)

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the cost of one tensor [tokens, hidden] of bf16."""
        size = work.num_tokens * self._hidden * BYTES_PER_ELEMENT
        return _transfer(size, self._hardware.links[stage])

    def plan_seconds(self, work: StageWork) -> float:
        """Return a constant."""
        return self._efficiency.plan_overhead

    def plan_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the cost of a plan: token ids, and a constant number of bytes per row."""
        if not self._hardware.plan_links:
            return NO_TRANSFER
        num_rows = work.num_decodes + len(work.prefill_chunks)
        size = PLAN_BYTES_PER_ROW * num_rows + BYTES_PER_TOKEN_ID * work.num_tokens
        return _transfer(size, self._hardware.plan_links[stage])

    def sample_seconds(self, work: StageWork) -> float:
        """Return the same as `return_seconds`: nothing is planned ahead of it."""
        return self._efficiency.return_overhead

    def return_seconds(self, work: StageWork) -> float:
        """Return a constant."""
        return self._efficiency.return_overhead

    def return_transfer(self, work: StageWork) -> TransferCost:
        """Return the cost of one token id per sampled row."""
        return _transfer(BYTES_PER_TOKEN_ID * work.num_sampled_rows, self._hardware.return_link)


class _StageRoofline:
    """Roofline of one stage: seconds on each of its ranks."""

    def __init__(self, hardware: PipelineSpec, index: int, efficiency: DeviceEfficiency) -> None:
        stage: StageSpec = hardware.stages[index]
        first = sum(hardware.layer_counts[:index])
        self._model: ModelShape = hardware.model
        self._num_layers = stage.num_layers
        self._num_dense = self._model.count_dense_layers(first, stage.num_layers)
        self._is_first = index == 0
        self._has_head = index == len(hardware.stages) - 1
        self._ranks, self._link = stage.tp, stage.rank_link
        self._collective = efficiency.collective
        self._device = _DeviceRoofline(self._model.shard(stage.tp), stage.device, efficiency)

    def compute_seconds(self, work: StageWork) -> float:
        """Return the time of matrices, attention and element-wise operators, or of their launch."""
        sums = SUMS_PER_LAYER * self._sum_seconds(work)
        device, num_sparse = self._device, self._num_layers - self._num_dense
        seconds = 0.0
        if self._num_dense:
            layer = device.layer_seconds(work, False)
            seconds += self._num_dense * max(layer, device.launch_seconds - sums)
        if num_sparse:
            layer = device.layer_seconds(work, True)
            seconds += num_sparse * max(layer, device.launch_seconds - sums)
        if self._has_head and work.num_sampled_rows:
            seconds += device.head_seconds(work.num_sampled_rows)
        return seconds

    def collective_seconds(self, work: StageWork) -> float:
        """Return the time of the sums over the ranks and of the gathered logits."""
        if self._ranks == 1 or self._link is None:
            return 0.0
        num_sums = SUMS_PER_LAYER * self._num_layers + self._is_first
        seconds = num_sums * self._sum_seconds(work)
        if self._has_head and work.num_sampled_rows:
            logits = work.num_sampled_rows * self._model.vocabulary * BYTES_PER_LOGIT
            seconds += gather_seconds(logits, self._ranks, self._link) / self._collective
        return seconds

    def _sum_seconds(self, work: StageWork) -> float:
        """Return the time of one sum over the ranks."""
        if self._ranks == 1 or self._link is None:
            return 0.0
        size = work.num_tokens * self._model.hidden * BYTES_PER_ELEMENT
        return all_reduce_seconds(size, self._ranks, self._link) / self._collective


class _DeviceRoofline:
    """Roofline of one rank's share of a layer."""

    def __init__(self, shard: ModelShape, device: DeviceSpec, efficiency: DeviceEfficiency) -> None:
        self._shard = shard
        self._flops = device.flops * efficiency.compute
        self._attention_flops = device.flops * efficiency.attention
        self._bandwidth = device.bandwidth * efficiency.memory
        self._kernel_seconds = efficiency.kernel_seconds
        self.launch_seconds = (
            efficiency.launch_seconds if device.launch_seconds is None else device.launch_seconds
        )
        """Seconds in which the host launches the kernels of one layer."""

    def layer_seconds(self, work: StageWork, is_sparse: bool) -> float:
        """Return the time of one layer on the device, its sums over the ranks left out."""
        shard, rows = self._shard, work.num_tokens
        if is_sparse:
            seconds = self._matrix_seconds(shard.active_weights, shard.read_weights(rows), rows)
        else:
            seconds = self._matrix_seconds(shard.layer_weights, shard.layer_weights, rows)
        traffic = rows * shard.elementwise_bytes(is_sparse)
        return (
            seconds
            + self._attention_seconds(work)
            + traffic / self._bandwidth
            + self._kernel_seconds
        )

    def head_seconds(self, rows: int) -> float:
        """Return the time of the LM head over the sampled rows."""
        return self._matrix_seconds(self._shard.head_weights, self._shard.head_weights, rows)

    def _attention_seconds(self, work: StageWork) -> float:
        """Return the time of one layer's attention."""
        shard, seconds = self._shard, 0.0
        if work.prefill_chunks:
            read = sum(start + tokens for start, tokens in work.prefill_chunks) * shard.kv_bytes
            compute = work.num_query_key_pairs * shard.prefill_pair_flops / self._attention_flops
            seconds += hypot(compute, read / self._bandwidth)
        if work.num_decodes:
            context = work.num_decode_context_tokens
            compute = context * shard.decode_pair_flops / self._attention_flops
            seconds += hypot(compute, context * shard.kv_bytes / self._bandwidth)
        return seconds

    def _matrix_seconds(self, multiplied: float, read: float, rows: int) -> float:
        """Return the time of products of `rows` rows with weights."""
        return hypot(
            FLOPS_PER_WEIGHT * rows * multiplied / self._flops,
            read * self._shard.bytes_per_weight / self._bandwidth,
        )


def _transfer(num_bytes: int, link: NetworkLink | None) -> TransferCost:
    """Return the cost of a message; without a link it takes no time."""
    if link is None:
        return NO_TRANSFER
    return TransferCost(num_bytes / link.bandwidth, link.latency, num_bytes)
