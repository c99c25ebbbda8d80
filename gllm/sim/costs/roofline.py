"""A step's time from first principles: what has to be computed, what has to be read.

Owns the roofline, its corner rounded: an operator takes the root of the sum of squares of its
arithmetic's time and its memory traffic's. Knows nothing of kernels beyond two efficiencies, stated
once and the same for every policy.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", 2009.
The rounding: over the token-level operators of Vidur's tables (A100, A40, H100; five models) it is
off by 4 to 8 % on average with each pair's own efficiencies, the sharp corner by 6 to 11 %
(`python -m scripts.roofline_error`).

The ranks of a stage compute their shares at the same time. Their sums, one after attention and one
after the MLP of each layer, and one of the embedding, do not overlap with that.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import hypot

from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import BaseCostModel, TransferCost
from gllm.sim.costs.collectives import all_reduce_seconds, gather_seconds
from gllm.sim.hardware.devices import DeviceSpec
from gllm.sim.hardware.links import NetworkLink
from gllm.sim.hardware.models import BYTES_PER_ELEMENT, BYTES_PER_LOGIT, ModelShape

SUMS_PER_LAYER = 2
"""All-reduces of each layer: after attention and after the MLP."""


@dataclass(frozen=True)
class DeviceEfficiency:
    """Shares of a device's peak rates that kernels reach, and the host's seconds around them."""

    compute: float = 0.68
    memory: float = 0.76
    """Both are near the medians over those tables, 0.70 and 0.76."""
    stage_overhead: float = 0.5e-3
    """Seconds of launches and inputs in each step on each stage."""
    plan_overhead: float = 0.2e-3
    """Seconds from a schedule until the first stage has its inputs."""
    return_overhead: float = 0.3e-3
    """Seconds from the last stage's end to the commit: sampling and the way back."""


class RooflineCostModel(BaseCostModel):
    """A model in stages of one or several devices each, neighbours joined by equal links.

    Args:
        model: The whole model.
        device: Every device.
        link: Between neighbouring stages.
        layer_counts: Number of layers of each stage.
        efficiency: Shares of the peak rates that are reached.
        degrees: Number of tensor-parallel ranks of each stage; default: one each.
        rank_link: Between the ranks of a stage; default: `link`.
    """

    def __init__(
        self,
        model: ModelShape,
        device: DeviceSpec,
        link: NetworkLink,
        layer_counts: list[int],
        efficiency: DeviceEfficiency | None = None,
        degrees: Sequence[int] | None = None,
        rank_link: NetworkLink | None = None,
    ) -> None:
        self._model = model
        self._link = link
        self._rank_link = rank_link or link
        self._layers = layer_counts
        self._degrees = list(degrees or [1] * len(layer_counts))
        self._shards = [model.shard(ranks) for ranks in self._degrees]
        self._efficiency = efficiency or DeviceEfficiency()
        self._flops = device.flops * self._efficiency.compute
        self._bandwidth = device.bandwidth * self._efficiency.memory

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Layers one after the other; on the last stage the LM head over the sampled rows."""
        shard = self._shards[stage]
        seconds = self._layers[stage] * self._layer_seconds(shard, work)
        if stage == len(self._layers) - 1 and work.num_sampled_rows:
            seconds += self._matrix_seconds(shard.head_weights, work.num_sampled_rows)
        return seconds + self._efficiency.stage_overhead + self.collective_seconds(stage, work)

    def collective_seconds(self, stage: int, work: StageWork) -> float:
        """Return the share of `stage_seconds` in which the stage's ranks communicate."""
        model, ranks = self._model, self._degrees[stage]
        size = work.num_tokens * model.hidden * BYTES_PER_ELEMENT
        num_sums = SUMS_PER_LAYER * self._layers[stage] + (stage == 0)
        seconds = num_sums * all_reduce_seconds(size, ranks, self._rank_link)
        if stage == len(self._layers) - 1 and work.num_sampled_rows:
            logits = work.num_sampled_rows * model.vocabulary * BYTES_PER_LOGIT
            seconds += gather_seconds(logits, ranks, self._rank_link)
        return seconds

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the cost of one tensor [tokens, hidden] of bf16."""
        size = work.num_tokens * self._model.hidden * BYTES_PER_ELEMENT
        return TransferCost(size / self._link.bandwidth, self._link.latency, size)

    def plan_seconds(self, work: StageWork) -> float:
        """Constant."""
        return self._efficiency.plan_overhead

    def sample_seconds(self, work: StageWork) -> float:
        """As `return_seconds`: nothing is planned ahead of it."""
        return self._efficiency.return_overhead

    def return_seconds(self, work: StageWork) -> float:
        """Constant."""
        return self._efficiency.return_overhead

    def _layer_seconds(self, model: ModelShape, work: StageWork) -> float:
        """Return the time of one layer on one rank, whose share of the model is `model`."""
        seconds = self._matrix_seconds(model.layer_weights, work.num_tokens)
        # Two products of 2 FLOP for each query-key pair, head and head dimension.
        per_pair = 4 * model.heads * model.head_dim
        if work.prefill_chunks:
            read = sum(start + tokens for start, tokens in work.prefill_chunks) * model.kv_bytes
            seconds += hypot(
                work.num_query_key_pairs * per_pair / self._flops, read / self._bandwidth
            )
        if work.num_decodes:
            compute = work.num_decode_context_tokens * per_pair / self._flops
            seconds += hypot(
                compute, work.num_decode_context_tokens * model.kv_bytes / self._bandwidth
            )
        return seconds

    def _matrix_seconds(self, weights: int, rows: int) -> float:
        return hypot(
            2 * rows * weights / self._flops, weights * BYTES_PER_ELEMENT / self._bandwidth
        )
