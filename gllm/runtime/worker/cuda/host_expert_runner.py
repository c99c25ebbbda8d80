"""Runner of experts that the host computes beside a GPU.

For each layer the device routes the tokens and copies hidden states and choices to pinned memory.
The host waits for that copy, while the device goes on with the shared expert. Then it decides where
each expert is computed (`gllm.scheduler.expert_cache`), queues the work of the device, computes its
own experts meanwhile and copies their sum to the device. The host thus waits within a step, which
no CUDA graph can contain.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from gllm.models.expert_placement import ONCE_SLOTS
from gllm.models.host_experts import HostExperts
from gllm.runtime.worker.cuda.expert_slots import ExpertSlots, WeightStaging
from gllm.runtime.worker.cuda.staging import copy_to_device
from gllm.scheduler.expert_cache import ExpertCache, ExpertCosts, ExpertPlan
from gllm.transport.device_streams import DeviceRuntime, DeviceStream

log = logging.getLogger(__name__)

MEASURED_ROWS = 64
"""Rows of an expert whose time is compared with that of one row."""
NUM_MEASUREMENTS = 3
"""Runs of which the fastest counts, each of another expert."""


class CachedLayer(NamedTuple):
    """Experts of one layer that the device has, and the decisions about them."""

    cache: ExpertCache
    slots: ExpertSlots
    once: ExpertSlots
    """Slots for weights that one step uses, shared by layers of one shape."""
    staging: WeightStaging
    """Shared likewise."""


class HostExpertRunner:
    """Runs routed experts of a stage on the host; implements ExpertRunner for a GPU's executor.

    Every layer of a step uses the same pinned memory, in the order of the compute stream.
    """

    def __init__(
        self,
        runtime: DeviceRuntime,
        stream: DeviceStream,
        layers: Sequence[HostExperts],
        top_k: int,
        hidden_size: int,
        dtype: torch.dtype,
        max_tokens: int,
        num_slots: int = 0,
    ) -> None:
        """Allocate pinned memory for the largest step, and the cache on the device.

        Args:
            runtime: device and its streams.
            stream: compute stream of the stage.
            layers: experts of each layer that has them on the host.
            top_k: most experts of a token.
            hidden_size: elements of a token's hidden state.
            dtype: dtype of hidden states.
            max_tokens: most tokens of a step.
            num_slots: experts of each layer that the device can have; 0 for no cache.
        """
        self._runtime, self._stream = runtime, stream
        self._hidden = runtime.allocate_pinned((max_tokens, hidden_size), dtype)
        self._output = runtime.allocate_pinned((max_tokens, hidden_size), dtype)
        self._ids = runtime.allocate_pinned((max_tokens * top_k,), torch.int64)
        self._weights = runtime.allocate_pinned((max_tokens * top_k,), torch.float32)
        self._copied = runtime.event()
        """Hidden states and choices of a layer are in pinned memory."""
        self.costs: ExpertCosts | None = None
        """Times of one expert, once they are measured; until then the host computes all."""
        self._layers: dict[HostExperts, CachedLayer] = {}
        shared: dict[tuple[int, ...], tuple[ExpertSlots, WeightStaging]] = {}
        for experts in layers if num_slots else ():
            shape = tuple(size for tensor in experts.unpack(0) for size in tensor.shape)
            if shape not in shared:
                once = ExpertSlots(runtime, experts, ONCE_SLOTS, dtype)
                shared[shape] = once, WeightStaging(runtime, experts, dtype)
            cache = ExpertCache(len(experts.down), num_slots)
            slots = ExpertSlots(runtime, experts, cache.num_slots, dtype)
            self._layers[experts] = CachedLayer(cache, slots, *shared[shape])

    def run(
        self,
        experts: HostExperts,
        x: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
        run_shared: Callable[[], Tensor | None],
    ) -> Tensor:
        """Return the sum of a layer's experts; see `ExpertRunner`. Has to be called in the stream.

        The result is that of `run_experts`: the shared expert is added to the rounded sum.
        """
        num_tokens, num_choices = len(x), expert_ids.numel()
        hidden, output = self._hidden[:num_tokens], self._output[:num_tokens]
        ids = self._ids[:num_choices].view(expert_ids.shape)
        weights = self._weights[:num_choices].view(expert_weights.shape)
        for pinned, tensor in ((hidden, x), (ids, expert_ids), (weights, expert_weights)):
            pinned.copy_(tensor, non_blocking=True)
        self._stream.record(self._copied)
        # Queued behind the copies, so that the device has work while the host computes.
        shared = run_shared()
        self._copied.synchronize()
        layer = self._layers.get(experts)
        parts = [] if shared is None else [shared]
        plan = None
        if layer is not None:
            plan = self._plan(layer.cache, ids)
            parts += self._queue_device_experts(experts, layer, plan, x, expert_ids, expert_weights)
        if plan is None or plan.on_host:
            skipped = () if plan is None else {*dict(plan.resident), *dict(plan.copied)}
            with self._runtime.host_work():
                experts.compute(hidden, ids, weights, output, skipped)
            result = torch.empty_like(x).copy_(output, non_blocking=True)
        else:
            result = parts.pop()
        for part in parts:
            result = result + part
        return result

    def _plan(self, cache: ExpertCache, ids: Tensor) -> ExpertPlan | None:
        """Return where the chosen experts are computed; None before the times are known.

        ids: [tokens, top_k] int64 in the memory of the host.
        """
        if self.costs is None:
            return None
        with self._runtime.host_work():
            counts = torch.bincount(ids.flatten()).tolist()
        return cache.plan({expert: n for expert, n in enumerate(counts) if n}, self.costs)

    def _queue_device_experts(
        self,
        experts: HostExperts,
        layer: CachedLayer,
        plan: ExpertPlan | None,
        x: Tensor,
        expert_ids: Tensor,
        expert_weights: Tensor,
    ) -> list[Tensor]:
        """Queue the work of the device; return sums [tokens, hidden] of experts.

        Without a plan, as in the example steps of a start, kernels run for no expert and their
        result is dropped.
        """
        choices, stream = (x, expert_ids, expert_weights), self._stream
        if plan is None:
            layer.slots.run(*choices, {}, stream)
            return []
        sums = []
        if plan.resident:
            sums.append(layer.slots.run(*choices, dict(plan.resident), stream))
        # A slot may have been that of a resident expert, which is computed by now.
        kept = {expert: slot for expert, slot in plan.copied if slot is not None}
        for expert, slot in kept.items():
            layer.staging.copy(experts, expert, layer.slots, slot, stream)
        if kept:
            sums.append(layer.slots.run(*choices, kept, stream))
        used_once = [expert for expert, slot in plan.copied if slot is None]
        for begin in range(0, len(used_once), ONCE_SLOTS):
            group = used_once[begin : begin + ONCE_SLOTS]
            slots = {expert: slot for slot, expert in enumerate(group)}
            for expert, slot in slots.items():
                layer.staging.copy(experts, expert, layer.once, slot, stream)
            sums.append(layer.once.run(*choices, slots, stream))
        return sums

    def measure_costs(self) -> None:
        """Measure the times of an expert, after which the device may have some.

        Called once the kernels are compiled.
        """
        if not self._layers:
            return
        experts, layer = next(iter(self._layers.items()))
        one, many = self._hidden[:1].zero_(), self._hidden[:MEASURED_ROWS].zero_()
        host, host_many = (self._time_host(experts, rows) for rows in (one, many))
        stage = layer.staging.copy
        copy = min(
            self._time_device(partial(stage, experts, expert, layer.once, 0, self._stream))
            for expert in range(min(NUM_MEASUREMENTS, len(experts.down)))
        )
        device, device_many = (self._time_device_rows(layer, rows) for rows in (one, many))
        num_more = max(1, len(many) - 1)
        self.costs = ExpertCosts(
            host,
            max(0.0, host_many - host) / num_more,
            copy,
            device,
            max(0.0, device_many - device) / num_more,
        )
        log.info(
            "experts of the host: %.3f ms and %.4f ms per row, %.3f ms on the GPU, which has %d of "
            "each layer, and %.3f ms to move one",
            *(
                1e3 * host,
                1e3 * self.costs.host_row,
                1e3 * device,
                layer.cache.num_slots,
                1e3 * copy,
            ),
        )

    def _time_host(self, experts: HostExperts, rows: Tensor) -> float:
        """Return the seconds in which the host computes an expert of some rows."""
        weights, output = torch.ones(len(rows), 1), self._output[: len(rows)]
        seconds = []
        for expert in range(min(NUM_MEASUREMENTS, len(experts.down))):
            ids = torch.full((len(rows), 1), expert)
            begin = time.perf_counter()
            experts.compute(rows, ids, weights, output)
            seconds.append(time.perf_counter() - begin)
        return min(seconds)

    def _time_device_rows(self, layer: CachedLayer, rows: Tensor) -> float:
        """Return the seconds in which the device computes an expert of some rows."""
        ids = torch.zeros(len(rows), 1, dtype=torch.int64)
        inputs = [
            copy_to_device(each, self._runtime, self._stream)
            for each in (rows, ids, torch.ones(len(rows), 1))
        ]
        x, expert_ids, weights = inputs
        return min(
            self._time_device(lambda: layer.once.run(x, expert_ids, weights, {0: 0}, self._stream))
            for _ in range(NUM_MEASUREMENTS)
        )

    def _time_device(self, work: Callable[[], object]) -> float:
        """Return the seconds until the device has done queued work, with the host's part."""
        begin = time.perf_counter()
        with self._stream.current():
            work()
        done = self._runtime.event()
        self._stream.record(done)
        done.synchronize()
        return time.perf_counter() - begin
