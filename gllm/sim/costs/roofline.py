"""Step times from first principles: arithmetic, memory traffic and communication of a micro-batch.

A roofline with a rounded corner: an operator takes the root of the sum of squares of the time of
its arithmetic and the time of its memory traffic. A layer adds the traffic of its element-wise
operators, a fixed time of its kernels and the sums over the ranks, which do not overlap with the
rest; it takes at least the time in which the host launches its kernels. All constants are the same
for every policy, model and number of ranks; docs/simulator-costs.md shows the errors.

Sources: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", 2009.
Fitted to the operators and whole steps of Vidur's tables (arXiv 2405.05465) and to Splitwise's
measurements (arXiv 2311.18677): `python -m scripts.roofline_error`, `python -m scripts.step_error`.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, hypot, log2
from statistics import median
from typing import NamedTuple

from gllm.scheduler.expert_cache import ExpertCosts
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import NO_TRANSFER, CostModel, TransferCost
from gllm.sim.costs.piecewise_linear import PiecewiseLinear
from gllm.sim.data_tables import read_table
from gllm.sim.hardware.devices import DeviceSpec, NetworkLink
from gllm.sim.hardware.shapes import (
    BYTES_PER_ELEMENT,
    BYTES_PER_LOGIT,
    FLOPS_PER_WEIGHT,
    ModelShape,
)
from gllm.sim.hardware.stages import PipelineSpec, StageSpec

POINTS_PER_DOUBLING = 2
"""Sizes per doubling that measurements are summarized at."""


def all_reduce_seconds(num_bytes: float, ranks: int, link: NetworkLink) -> float:
    """Return the time of an all-reduce in seconds, by measurements or by formulas.

    For a link with a node type, measurements by Vidur on such nodes are used (MLSys 2024, arXiv
    2405.05465, `gllm/sim/data/README.md`). For other links and unmeasured numbers of ranks, it is
    the faster of two algorithms, computed from the link's latency and bandwidth; additions take no
    time. Recursive doubling sends the whole tensor in each of log2(ranks) steps, which is faster
    for decodes (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
    Operations in MPICH", 2005, section 4). The ring sends parts of it in 2 x (ranks - 1) steps,
    which is faster for prefills (Patarasu and Yuan, "Bandwidth optimal all-reduce algorithms for
    clusters of workstations", 2009, section 3).

    Args:
        num_bytes: Size of the tensor on each rank.
        ranks: Number of ranks.
        link: Link between the ranks.
    """
    if ranks == 1:
        return 0.0
    if link.node is not None and (table := _all_reduce_tables(link.node).get(ranks)):
        return table.seconds(num_bytes)
    seconds = num_bytes / link.bandwidth
    doubling = ceil(log2(ranks)) * (link.latency + seconds)
    ring = 2 * (ranks - 1) * (link.latency + seconds / ranks)
    return min(doubling, ring)


def gather_seconds(num_bytes: float, ranks: int, link: NetworkLink) -> float:
    """Return the time in seconds to gather a tensor that is divided among the ranks on rank 0.

    By a binomial tree: log2(ranks) latencies, and all parts but one are sent over the link of rank
    0.

    Args:
        num_bytes: Size of the gathered tensor.
        ranks: Number of ranks.
        link: Link between the ranks.
    """
    if ranks == 1:
        return 0.0
    size = num_bytes * (ranks - 1) / ranks
    return ceil(log2(ranks)) * link.latency + size / link.bandwidth


class CollectiveTable:
    """Measured time of a collective operation by message size in bytes, interpolated linearly.

    Below the smallest measured size the time is constant; above the largest it is proportional to
    the size.

    Args:
        seconds_by_bytes: Measured times in seconds by message size in bytes.
    """

    def __init__(self, seconds_by_bytes: Mapping[int, Sequence[float]]) -> None:
        groups: dict[float, list[float]] = defaultdict(list)
        for size, seconds in seconds_by_bytes.items():
            point = round(POINTS_PER_DOUBLING * log2(size)) / POINTS_PER_DOUBLING
            groups[2**point].extend(seconds)
        sizes = sorted(groups)
        self._line = PiecewiseLinear(sizes, _increasing([median(groups[size]) for size in sizes]))

    def seconds(self, num_bytes: float) -> float:
        """Return the time for a tensor of `num_bytes`."""
        largest = self._line.knots[-1]
        if num_bytes >= largest:
            return self._line.values[-1] * num_bytes / largest
        return self._line(num_bytes)


@cache
def _all_reduce_tables(node: str) -> dict[int, CollectiveTable]:
    """Return the measured all-reduces within one node of a type, by number of ranks."""
    samples: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in read_table("vidur_collectives.csv.gz"):
        ranks = int(row["num_workers"])
        is_inside = int(row["devices_per_node"]) == ranks
        if row["node"] == node and row["collective"] == "all_reduce" and is_inside:
            samples[ranks][int(row["bytes"])].append(float(row["median_ms"]) / 1e3)
    return {ranks: CollectiveTable(times) for ranks, times in samples.items()}


def _increasing(values: Sequence[float]) -> list[float]:
    """Return the closest non-decreasing values by least squares (pool adjacent violators)."""
    pools: list[tuple[float, int]] = []
    for value in values:
        mean, count = value, 1
        while pools and pools[-1][0] > mean:
            before, weight = pools.pop()
            mean = (before * weight + mean * count) / (weight + count)
            count += weight
        pools.append((mean, count))
    return [mean for mean, count in pools for _ in range(count)]


SUMS_PER_LAYER = 2
"""All-reduces of each layer: after attention and after the MLP."""
PLAN_BYTES_PER_ROW = 64
"""Assumed bytes of a plan per row: ids, lengths, new blocks, sampling."""
BYTES_PER_TOKEN_ID = 4
"""Bytes of a token id in a plan or a result."""


@dataclass(frozen=True)
class DeviceEfficiency:
    """Fractions of a device's peak FLOP/s and bandwidth that kernels reach, and fixed overheads."""

    compute: float = 0.70
    """Fraction of the peak FLOP/s that matrix multiplications with weights reach."""
    memory: float = 0.79
    """Fraction of the peak memory bandwidth that kernels reach."""
    attention: float = 0.5
    """Fraction of the peak FLOP/s that attention reaches."""
    collective: float = 0.6
    """Speed of all-reduces within a step as a fraction of their speed alone: ranks do not start
    them at the same time."""
    kernel_seconds: float = 40e-6
    """Fixed time of the kernels of one layer in seconds, without all-reduces."""
    launch_seconds: float = 0.45e-3
    """Time in seconds in which the host launches the kernels of one layer, for devices that have no
    value of their own (DeviceSpec.launch_seconds)."""
    stage_overhead: float = 0.7e-3
    """Time in seconds to prepare the inputs of a step on each stage."""
    plan_overhead: float = 0.2e-3
    """Time in seconds from scheduling until the first stage has its inputs."""
    return_overhead: float = 0.3e-3
    """Time in seconds from the last stage's end until the driver has the sampled tokens."""


NUM_RECENT_BATCHES = 512
"""Micro-batches whose predictions are kept: more than the engines that share a cost model have in
flight, so that few of them meet in one place of the table."""


SMALLEST_WORK = StageWork(
    step=0,
    num_tokens=1,
    prefill_chunks=(),
    num_decodes=1,
    num_decode_context_tokens=0,
    num_sampled_rows=0,
)
"""Work of the fastest possible micro-batch; each part of the time grows with the work."""


class LayerSeconds(NamedTuple):
    """Predicted time of one layer in seconds, broken down by operator class."""

    matrices: float
    """Matrix multiplications with weights, also those that the device waits for the host to do."""
    attention: float
    """Attention and recurrences."""
    elementwise: float
    collectives: float
    """All-reduces over the tensor-parallel ranks."""
    launch: float
    """Fixed time of kernels, and idle time until the host has launched them."""


class RooflineCostModel(CostModel):
    """Cost model that predicts step times from FLOPs, memory traffic and peak rates of the devices.

    Args:
        hardware: Model, stages, devices and links.
        efficiency: Fractions of the peak rates that kernels reach.
        layers: Cache of per-layer predictions, to be shared by pipelines of one model and
            efficiency.
    """

    def __init__(
        self,
        hardware: PipelineSpec,
        efficiency: DeviceEfficiency | None = None,
        layers: "LayerRooflines | None" = None,
    ) -> None:
        self._hardware = hardware
        self._hidden = hardware.model.hidden
        self._efficiency = efficiency or DeviceEfficiency()
        self._recent_plan: tuple[StageWork | None, NetworkLink | None, TransferCost]
        self._recent_plan = None, None, NO_TRANSFER
        """Last plan and link with their cost: stages behind equal links share it."""
        # Stages with equal devices share the prediction of a layer.
        layers = {} if layers is None else layers
        self._stages = []
        for index, stage in enumerate(hardware.stages):
            key = stage.device, stage.tp, stage.rank_link
            if key not in layers:
                layers[key] = LayerRoofline(hardware.model, stage, self._efficiency)
            self._stages.append(_StageRoofline(hardware, index, layers[key]))

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the time of the stage's layers, and on the last stage of the LM head."""
        return self._stages[stage].seconds(work) + self._efficiency.stage_overhead

    def min_stage_seconds(self, stage: int, work: StageWork | None = None) -> float:
        """Return the time of the micro-batch, or of one row without context or output."""
        return self.stage_seconds(stage, work or SMALLEST_WORK)

    def operator_seconds(self, stage: int, work: StageWork) -> dict[str, float]:
        """Return the time of each class of operators, which add up to `stage_seconds`."""
        seconds = self._stages[stage].operator_seconds(work)
        return seconds | {"host": self._efficiency.stage_overhead}

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the cost of one tensor [tokens, hidden] of bf16."""
        size = work.num_tokens * self._hidden * BYTES_PER_ELEMENT
        return _transfer(size, self._hardware.links[stage])

    def plan_seconds(self, work: StageWork) -> float:
        """Return the fixed overhead of a plan."""
        return self._efficiency.plan_overhead

    def plan_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the cost of a plan: token ids, and a constant number of bytes per row."""
        if not self._hardware.plan_links:
            return NO_TRANSFER
        link, (recent, recent_link, cost) = self._hardware.plan_links[stage], self._recent_plan
        if recent is not work or recent_link is not link:
            num_rows = work.num_decodes + len(work.prefill_chunks)
            size = PLAN_BYTES_PER_ROW * num_rows + BYTES_PER_TOKEN_ID * work.num_tokens
            cost = _transfer(size, link)
            self._recent_plan = work, link, cost
        return cost

    def sample_seconds(self, work: StageWork) -> float:
        """Return the same as `return_seconds`, because nothing is planned ahead."""
        return self._efficiency.return_overhead

    def return_seconds(self, work: StageWork) -> float:
        """Return the fixed overhead of sampling and of the return to the driver."""
        return self._efficiency.return_overhead

    def return_transfer(self, work: StageWork) -> TransferCost:
        """Return the cost of one token id per sampled row."""
        return _transfer(BYTES_PER_TOKEN_ID * work.num_sampled_rows, self._hardware.return_link)


class _StageRoofline:
    """Roofline of one stage: its layers, and the embedding or the LM head at the model's ends."""

    def __init__(self, hardware: PipelineSpec, index: int, layer: "LayerRoofline") -> None:
        num_layers = hardware.stages[index].num_layers
        first = sum(hardware.layer_counts[:index])
        self._layer = layer
        self._num_dense = hardware.model.count_dense_layers(first, num_layers)
        self._num_offloaded = hardware.model.count_host_layers(first, num_layers)
        self._num_sparse = num_layers - self._num_dense - self._num_offloaded
        self._is_first = index == 0
        self._is_last = index == len(hardware.stages) - 1

    def seconds(self, work: StageWork) -> float:
        """Return the time of a micro-batch."""
        layer, seconds = self._layer, 0.0
        if self._num_dense:
            seconds += self._num_dense * layer.total_seconds(work, False)
        if self._num_sparse:
            seconds += self._num_sparse * layer.total_seconds(work, True)
        if self._num_offloaded:
            seconds += self._num_offloaded * layer.total_seconds(work, True, True)
        if self._is_first:
            seconds += layer.sum_seconds(work)
        if self._is_last and work.num_sampled_rows:
            seconds += layer.head_seconds(work) + layer.gather_seconds(work)
        return seconds

    def operator_seconds(self, work: StageWork) -> dict[str, float]:
        """Return the time of a micro-batch by class of operators."""
        totals = dict.fromkeys(LayerSeconds._fields, 0.0)
        kinds = (
            (self._num_dense, False, False),
            (self._num_sparse, True, False),
            (self._num_offloaded, True, True),
        )
        for count, is_sparse, is_offloaded in kinds:
            if count:
                parts = self._layer.seconds(work, is_sparse, is_offloaded)._asdict()
                totals = {name: totals[name] + count * value for name, value in parts.items()}
        if self._is_first:
            totals["collectives"] += self._layer.sum_seconds(work)
        if self._is_last and work.num_sampled_rows:
            totals["collectives"] += self._layer.gather_seconds(work)
            totals["lm_head"] = self._layer.head_seconds(work)
        return totals


class LayerRoofline:
    """Predicts the time of one layer, the embedding and the LM head by the roofline model.

    Args:
        model: Shape of the whole model.
        stage: Device, number of tensor-parallel ranks and the link between them.
        efficiency: Fractions of the peak rates that kernels reach.
    """

    def __init__(self, model: ModelShape, stage: StageSpec, efficiency: DeviceEfficiency) -> None:
        self._model, self._shard = model, model.shard(stage.tp)
        self._ranks, self._link = stage.tp, stage.rank_link
        self._collective = efficiency.collective
        device = stage.device
        self._flops = device.flops * efficiency.compute
        self._attention_flops = device.flops * efficiency.attention
        self._bandwidth = device.bandwidth * efficiency.memory
        self._kernel_seconds = efficiency.kernel_seconds
        self._launch_seconds = (
            efficiency.launch_seconds if device.launch_seconds is None else device.launch_seconds
        )
        self._dense_weights = self._shard.layer_weights
        self._kv_bytes = self._shard.kv_bytes
        self._elementwise_bytes = [
            self._shard.elementwise_bytes(is_last) for is_last in (False, True)
        ]
        self._recent: dict[tuple[int, bool, bool], tuple[StageWork, float]] = {}
        """Total times of the last micro-batches, by a hash modulo NUM_RECENT_BATCHES and kind."""

    def total_seconds(self, work: StageWork, is_sparse: bool, is_offloaded: bool = False) -> float:
        """Return the time of one layer in seconds.

        Args:
            work: Size of the batch.
            is_sparse: True for a layer with experts (MoE).
            is_offloaded: True if its routed experts are on the host.
        """
        place = (work.step + work.num_decode_context_tokens) % NUM_RECENT_BATCHES
        key = place, is_sparse, is_offloaded
        recent = self._recent.get(key)
        if recent is None or recent[0] is not work:
            recent = self._recent[key] = work, sum(self.seconds(work, is_sparse, is_offloaded))
        return recent[1]

    def seconds(self, work: StageWork, is_sparse: bool, is_offloaded: bool = False) -> LayerSeconds:
        """Return the time of one layer in seconds, broken down by operator class.

        The arguments are those of `total_seconds`.
        """
        shard, rows = self._shard, work.num_tokens
        if is_offloaded:
            matrices = self._offloaded_seconds(rows)
        elif is_sparse:
            matrices = self._matrix_seconds(shard.active_weights, shard.read_weights(rows), rows)
        else:
            matrices = self._matrix_seconds(self._dense_weights, self._dense_weights, rows)
        attention = self._attention_seconds(work) + self._recurrence_seconds(work)
        elementwise = rows * self._elementwise_bytes[is_sparse] / self._bandwidth
        sums = SUMS_PER_LAYER * self.sum_seconds(work)
        busy = matrices + attention + elementwise + sums
        launch = max(self._kernel_seconds, self._launch_seconds - busy)
        return LayerSeconds(matrices, attention, elementwise, sums, launch)

    def sum_seconds(self, work: StageWork) -> float:
        """Return the time of one all-reduce over the ranks."""
        if self._ranks == 1 or self._link is None:
            return 0.0
        size = work.num_tokens * self._model.hidden * BYTES_PER_ELEMENT
        return all_reduce_seconds(size, self._ranks, self._link) / self._collective

    def gather_seconds(self, work: StageWork) -> float:
        """Return the time in which rank 0 gets the logits of the sampled rows."""
        if self._ranks == 1 or self._link is None:
            return 0.0
        logits = work.num_sampled_rows * self._model.vocabulary * BYTES_PER_LOGIT
        return gather_seconds(logits, self._ranks, self._link) / self._collective

    def head_seconds(self, work: StageWork) -> float:
        """Return the time of the LM head over the sampled rows."""
        weights = self._shard.head_weights
        return self._matrix_seconds(weights, weights, work.num_sampled_rows)

    def _attention_seconds(self, work: StageWork) -> float:
        shard, seconds = self._shard, 0.0
        if work.prefill_chunks:
            read = sum(start + tokens for start, tokens in work.prefill_chunks) * self._kv_bytes
            compute = work.num_query_key_pairs * shard.prefill_pair_flops / self._attention_flops
            seconds += hypot(compute, read / self._bandwidth)
        if work.num_decodes:
            context = work.num_decode_context_tokens
            compute = context * shard.decode_pair_flops / self._attention_flops
            seconds += hypot(compute, context * self._kv_bytes / self._bandwidth)
        return seconds

    def _recurrence_seconds(self, work: StageWork) -> float:
        """Return the time of the recurrences: each sequence's states are read and written once."""
        shard = self._shard
        if shard.recurrent is None:
            return 0.0
        num_sequences = work.num_decodes + len(work.prefill_chunks)
        moved = 2 * num_sequences * shard.state_bytes
        compute = work.num_tokens * shard.state_flops / self._attention_flops
        return hypot(compute, moved / self._bandwidth)

    def _offloaded_seconds(self, rows: int) -> float:
        """Return the time of the products of a layer whose routed experts are on the host.

        Tokens choose all experts equally often. Experts that the device lacks are computed by the
        host while it computes its own ones, or after a copy if it has a cache and that takes less
        time (`gllm.scheduler.expert_cache`). Hidden states cross the link twice.
        """
        shard, experts = self._shard, self._shard.experts
        assert experts is not None, "the layer has experts"
        assert experts.offload is not None, "they are on the host"
        offload, weights, host = experts.offload, shard.expert_weights, experts.offload.host
        resident = offload.num_cached / experts.num_experts
        num_chosen = experts.expected_experts(rows)
        rows_each = rows * experts.num_active / num_chosen
        costs = ExpertCosts(
            weights * shard.bytes_per_weight / host.bandwidth,
            FLOPS_PER_WEIGHT * weights / host.flops,
            weights * shard.bytes_per_weight / host.link.bandwidth,
            weights * shard.bytes_per_weight / self._bandwidth,
            FLOPS_PER_WEIGHT * weights / self._flops,
        )
        missing = costs.host_seconds(rows_each)
        if offload.num_cached:
            missing = min(missing, costs.copy + costs.device_seconds(rows_each))
        on_device = num_chosen * resident * costs.device_seconds(rows_each)
        on_host = num_chosen * (1 - resident) * missing
        crossing = rows * shard.hidden * BYTES_PER_ELEMENT / host.link.bandwidth + host.link.latency
        unrouted = self._matrix_seconds(shard.unrouted_weights, shard.unrouted_weights, rows)
        return unrouted + max(on_device, on_host + 2 * crossing)

    def _matrix_seconds(self, multiplied: float, read: float, rows: int) -> float:
        """Return the time of products of `rows` rows with weights."""
        return hypot(
            FLOPS_PER_WEIGHT * rows * multiplied / self._flops,
            read * self._shard.bytes_per_weight / self._bandwidth,
        )


LayerRooflines = dict[tuple[DeviceSpec, int, NetworkLink | None], LayerRoofline]
"""Predictions of a layer by device, number of ranks and the link between them."""


def _transfer(num_bytes: int, link: NetworkLink | None) -> TransferCost:
    """Return the cost of a message; without a link it takes no time."""
    if link is None:
        return NO_TRANSFER
    return TransferCost(num_bytes / link.bandwidth, link.latency, num_bytes)
