"""A step's time from first principles: what has to be computed, what has to be read.

Owns the roofline, its corner rounded: an operator takes the root of the sum of squares of its
arithmetic's time and its memory traffic's. Knows nothing of kernels beyond two efficiencies, stated
once and the same for every policy.

Source: Williams, Waterman, Patterson, "Roofline: an insightful visual performance model", 2009.
The rounding: over the token-level operators of Vidur's tables (A100, A40, H100; five models) it is
off by 4 to 8 % on average with each pair's own efficiencies, the sharp corner by 6 to 11 %
(`python -m scripts.roofline_error`).
"""

from dataclasses import dataclass
from math import hypot

from gllm.scheduler.stage_work import StageWork
from gllm.sim.hardware import BYTES_PER_ELEMENT, DeviceSpec, ModelShape, NetworkLink


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


class RooflineCostModel:
    """A model in `layer_counts` stages, each on one device, neighbours joined by equal links."""

    def __init__(
        self,
        model: ModelShape,
        device: DeviceSpec,
        link: NetworkLink,
        layer_counts: list[int],
        efficiency: DeviceEfficiency | None = None,
    ) -> None:
        self._model = model
        self._link = link
        self._layers = layer_counts
        self._efficiency = efficiency or DeviceEfficiency()
        self._flops = device.flops * self._efficiency.compute
        self._bandwidth = device.bandwidth * self._efficiency.memory

    def stage_seconds(self, stage: int, work: StageWork) -> float:
        """Layers one after the other; on the last stage the LM head over the sampled rows."""
        seconds = self._layers[stage] * self._layer_seconds(work)
        if stage == len(self._layers) - 1 and work.num_sampled_rows:
            seconds += self._matrix_seconds(self._model.head_weights, work.num_sampled_rows)
        return seconds + self._efficiency.stage_overhead

    def link_seconds(self, stage: int, work: StageWork) -> float:
        """One tensor [tokens, hidden] of bf16."""
        size = work.num_tokens * self._model.hidden * BYTES_PER_ELEMENT
        return self._link.latency + size / self._link.bandwidth

    def plan_seconds(self, work: StageWork) -> float:
        """Constant."""
        return self._efficiency.plan_overhead

    def sample_seconds(self, work: StageWork) -> float:
        """As `return_seconds`: nothing is planned ahead of it."""
        return self._efficiency.return_overhead

    def return_seconds(self, work: StageWork) -> float:
        """Constant."""
        return self._efficiency.return_overhead

    def _layer_seconds(self, work: StageWork) -> float:
        model = self._model
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
