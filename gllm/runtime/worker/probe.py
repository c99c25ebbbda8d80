"""Probe of a worker's speed: times some layers of the model and the LM head on its device.

The layers are divided by its result where workers differ. It loads one layer of each kind, three
consecutive layers and the last layer, so it takes a few seconds. The result is kept in the cache
folder.
"""

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import msgspec
import torch

from gllm.messages.reports import StageMeasured
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.models.config import ModelConfig, read_config
from gllm.models.expert_placement import place_experts
from gllm.models.spec.attention import AttentionSpec, LatentAttentionSpec
from gllm.models.spec.layer import LayerSpec
from gllm.runtime.head.assignment import StageAssignment
from gllm.runtime.worker.device import count_gpus
from gllm.runtime.worker.executor import Executor
from gllm.runtime.worker.probe_cache import ProbeCache, create_key
from gllm.runtime.worker.stage_resources import create_backend
from gllm.scheduler.config import STATE_SLOTS_PER_SEQ
from gllm.scheduler.plan import ScheduledRow, StepPlan
from gllm.scheduler.state_slots import create_direct_segments
from gllm.transport.solo_group import create_solo_groups

log = logging.getLogger(__name__)

DECODES_PER_CHUNK = 8
"""Decode steps that weigh as much as one prefill step: with 16 decodes each, there are four prompt
tokens per output token, which is usual for chats (Azure's traces of 2023 have five)."""
MAX_KINDS = 4
"""Kinds of layers that are measured; others are estimated from their numbers of weights."""
SPAN_LAYERS = 3
"""Consecutive layers that are measured together, to separate their time from that of a step."""
MIN_REPETITIONS, MAX_REPETITIONS = 5, 200
WARM_UP_STEPS = 2
"""Steps that are not timed: kernels are chosen and programs recorded in them."""
MEASURED_SECONDS = 0.25
"""Time after which a step is not repeated any more."""


class ProbeCancelledError(Exception):
    """The measurement of a worker's speed was cancelled."""


class SpanCost(NamedTuple):
    """Measured step time and memory of consecutive layers."""

    seconds: float
    """Seconds of a decode step, plus the share of a prefill step."""
    head_seconds: float
    """The same for the LM head; 0 without the last layer."""
    num_bytes: int
    """Bytes of the weights, and of the keys and values of the longest sequence."""


NUM_DECODES = 16
"""Rows of the decode step."""


CONTEXT_TOKENS = 256
"""Context of each decode."""


CHUNK_TOKENS = 512
"""Tokens of the prefill step."""


@dataclass(frozen=True)
class StepSizes:
    """Batch and context sizes of the decode and prefill steps that a speed measurement times."""

    num_decodes: int
    """Sequences of the decode step."""
    context_tokens: int
    """Context of each sequence in the decode step, in tokens."""
    chunk_tokens: int
    """Tokens of the prefill step."""
    block_size: int
    """Tokens per KV block."""

    @property
    def blocks_per_decode(self) -> int:
        """KV blocks of a decode's sequence."""
        return self.context_tokens // self.block_size + 1

    @property
    def num_blocks(self) -> int:
        """KV blocks of all sequences."""
        return self.num_decodes * self.blocks_per_decode + -(-self.chunk_tokens // self.block_size)

    def decode_rows(self, step: int, should_sample: bool) -> list[ScheduledRow]:
        """Return the rows of a decode step, with their whole block tables."""
        count = self.blocks_per_decode
        return [
            ScheduledRow(
                seq,
                step,
                self.context_tokens,
                1,
                [*range(seq * count, (seq + 1) * count)],
                [],
                should_sample,
            )
            for seq in range(self.num_decodes)
        ]

    def chunk_rows(self, step: int, should_sample: bool) -> list[ScheduledRow]:
        """Return the row of a prefill step, with its whole block table."""
        blocks = [*range(self.num_decodes * self.blocks_per_decode, self.num_blocks)]
        row = ScheduledRow(self.num_decodes, step, 0, self.chunk_tokens, blocks, [], should_sample)
        return [row]


class LayerProbe:
    """Loads a few consecutive layers and times decode and prefill steps of them."""

    def __init__(
        self,
        assignment: StageAssignment,
        model: ModelConfig,
        layers: range,
        clock: Callable[[], float] = time.thread_time,
        num_gpus: int | None = None,
    ) -> None:
        """Choose the device.

        Args:
            assignment: assignment of the worker.
            model: the whole model.
            layers: indices of the layers.
            clock: CPU time of the calling thread in seconds.
            num_gpus: GPUs that the worker may use; None to count them.

        Raises:
            FieldError: the layers cannot be computed as configured.
        """
        if num_gpus is None:
            num_gpus = count_gpus(assignment.config.device)
        # It measures any layers, which would stay in the cache although no stage maps them.
        # The draft of speculation belongs to no layer, and a cache of experts is empty at first.
        scheduler = replace(assignment.config.scheduler, speculative_config=None)
        config = replace(
            assignment.config, weight_cache=None, expert_cache=None, scheduler=scheduler
        )
        measured = msgspec.structs.replace(assignment, config=config)
        self._backend = create_backend(measured, model, num_gpus, layers)
        self._clock = clock
        self._folder = Path(assignment.model_folder)
        self._slowdown = assignment.config.slowdown_of(assignment.stage)
        self._rank, self._num_ranks = assignment.rank, assignment.num_ranks
        self._epoch = 0
        self.available_bytes: int | None = None
        """Bytes for weights and KV cache, once loaded; None in the host's memory."""

    @property
    def executor(self) -> Executor:
        """Executor of the layers."""
        return self._backend.executor

    def load(self) -> None:
        """Load the layers, and allocate everything for steps."""
        backend, executor = self._backend, self.executor
        executor.bind_thread()
        executor.load(self._folder, lambda done, total: None)
        if self._num_ranks > 1:
            device = None if backend.streams is None else executor.device
            executor.join(create_solo_groups(self._rank, self._num_ranks, device))
        config = backend.reserve()
        assert config.max_num_batched_tokens is not None
        max_model_len, max_tokens = config.max_model_len, config.max_num_batched_tokens
        self._sizes = StepSizes(
            min(NUM_DECODES, config.max_num_seqs, max_tokens),
            min(CONTEXT_TOKENS, max_model_len - 1),
            min(CHUNK_TOKENS, max_model_len, max_tokens),
            config.block_size,
        )
        available = backend.available_bytes()
        if available is not None:
            self.available_bytes = available + executor.weight_bytes
        num_slots = self._sizes.num_decodes + 1 if executor.state_bytes else 0
        executor.allocate(self._sizes.num_blocks, config.block_size, num_state_slots=num_slots)
        backend.prepare_steps()
        decode_len = self._sizes.context_tokens + 1
        lengths = [decode_len] * self._sizes.num_decodes + [self._sizes.chunk_tokens]
        for seq, length in enumerate(lengths):
            sampling = SequenceSamplingParams(temperature=0.0)
            executor.register(RegisterSequences(seq, length, [0] * length, sampling))

    def decode(self, should_sample: bool) -> float:
        """Compute a decode step and return its time.

        should_sample: compute the logits of each row too.
        """
        return self._time_step(self._sizes.decode_rows, should_sample)

    def prefill(self, should_sample: bool) -> float:
        """Compute a prefill step and return its time.

        should_sample: compute the logits of the last row too.
        """
        return self._time_step(self._sizes.chunk_rows, should_sample)

    def close(self) -> None:
        """Free everything."""
        self.executor.close()
        self.executor.release_weights()

    def _time_step(
        self, make_rows: Callable[[int, bool], list[ScheduledRow]], should_sample: bool
    ) -> float:
        """Compute a step and return its time."""
        self._epoch += 1
        executor = self.executor
        rows = make_rows(self._epoch, should_sample)
        segments = create_direct_segments(rows) if executor.state_bytes else ()
        batch = executor.prepare(StepPlan(self._epoch, rows, [], state_segments=segments))
        hidden = None
        if not executor.is_first:
            shape = sum(row.num_tokens for row in rows), executor.model.hidden_size
            hidden = torch.ones(shape, dtype=executor.dtype, device=executor.device)
        # CPU time, because other programs would interrupt nearly every step on a busy machine.
        begin = self._clock()
        output = executor.compute(batch, hidden)
        seconds = self._clock() - begin
        if executor.is_asynchronous:
            seconds = executor.wait(batch).busy
        if executor.has_sampler:
            executor.sample(batch, output)
        return seconds * self._slowdown


class StageProbe:
    """Measures a worker's speed per layer and of the LM head, for dividing layers among stages.

    It reuses an earlier measurement of the same hardware, model and options.
    """

    result: StageMeasured
    """Known once `run` has ended without an error."""

    def __init__(
        self,
        assignment: StageAssignment,
        cache: ProbeCache | None = None,
        measured_seconds: float = MEASURED_SECONDS,
        make_probe: Callable[[StageAssignment, ModelConfig, range], LayerProbe] = LayerProbe,
    ) -> None:
        """Create a probe.

        Args:
            assignment: assignment with preliminary layers.
            cache: cache of earlier measurements; None for the default folder.
            measured_seconds: time after which a step is not repeated any more.
            make_probe: loads some layers and times their steps.
        """
        self._assignment = assignment
        self._measured_seconds = measured_seconds
        self._make_probe = make_probe
        self._cache = ProbeCache() if cache is None else cache
        self._is_cancelled = False

    def cancel(self) -> None:
        """End `run` soon, from any thread."""
        self._is_cancelled = True

    def run(self) -> None:
        """Measure, or find an earlier measurement; then `result` has it.

        Raises:
            ModelError: the folder does not have the weights.
            FieldError: weights, KV cache or attention cannot be as configured.
            ProbeCancelledError: `cancel` was called.
        """
        assignment = self._assignment
        # This module imports no torch.
        from gllm.kernels.threads import set_num_threads

        set_num_threads(assignment.num_threads)
        overrides = assignment.config.hf_overrides
        model = read_config(Path(assignment.model_folder), overrides)
        last = model.model.num_layers - 1
        # Without weights: only to know what decides the times.
        numerics = self._make_probe(assignment, model, range(last, last + 1)).executor.numerics
        key = create_key(assignment, numerics)
        cached = self._cache.load(key)
        measured = cached or self._measure(model)
        if cached is None:
            self._cache.store(key, measured)
        self.result = msgspec.structs.replace(
            measured,
            stage=assignment.stage,
            rank=assignment.rank,
            # With a cached measurement nothing was loaded, so there is no memory to free.
            keeps_weights=cached is not None or measured.keeps_weights,
            cache_key=key,
        )
        log.info(
            "measured%s: layers %.3f to %.3f ms, LM head %.3f ms per step",
            "" if cached is None else " at an earlier start",
            1e3 * min(measured.layer_seconds),
            1e3 * max(measured.layer_seconds),
            1e3 * measured.head_seconds,
        )

    def _measure(self, model: ModelConfig) -> StageMeasured:
        """Load some layers, time their steps, and estimate the costs of all layers from them."""
        assignment = self._assignment
        specs = place_experts(model.model, assignment.config.cpu_experts).layers
        kinds = find_kinds(specs)
        consecutive = find_span(specs, kinds)
        has_head = assignment.stage == assignment.num_stages - 1
        last = range(len(specs) - 1, len(specs)) if has_head else None
        # Single layers first: the first one has the device for itself.
        spans = [range(kind, kind + 1) for kind in kinds]
        spans += [span for span in (consecutive, last) if span is not None and span not in spans]
        probes: dict[range, LayerProbe] = {}
        try:
            self._load(model, spans, probes)
            costs = self._measure_spans(probes)
            first = probes[spans[0]]
            keeps_weights, item_bytes = first.executor.keeps_weights, first.executor.dtype.itemsize
        finally:
            for probe in probes.values():
                probe.close()
        kind_of_layer = [_kind_of(specs, kinds, index) for index in range(len(specs))]
        alone = [costs[range(kind, kind + 1)] for kind in kind_of_layer]
        step_seconds = 0.0
        if consecutive is not None:
            step_seconds = _separate_step(alone, consecutive, costs[consecutive].seconds)
        weights = [_count_weights(spec, model.model.hidden_size) for spec in specs]
        shares = [weights[index] / weights[kind] for index, kind in enumerate(kind_of_layer)]
        layers = [*zip(alone, shares, strict=True)]
        return StageMeasured(
            assignment.stage,
            assignment.rank,
            [(cost.seconds - step_seconds) * share for cost, share in layers],
            costs[last].head_seconds if last is not None else 0.0,
            step_seconds,
            [int(cost.num_bytes * share) for cost, share in layers],
            self._count_embedding_bytes(model, item_bytes),
            max(0, costs[last].num_bytes - alone[-1].num_bytes) if last is not None else 0,
            first.available_bytes,
            keeps_weights,
        )

    def _load(
        self, model: ModelConfig, spans: Sequence[range], probes: dict[range, LayerProbe]
    ) -> None:
        """Load several parts of the model at once, so that their steps can take turns.

        probes: gets each part once it is loaded.
        """
        for span in spans:
            self._check_cancelled()
            probe = self._make_probe(self._assignment, model, span)
            probe.load()
            probes[span] = probe

    def _measure_spans(self, probes: dict[range, LayerProbe]) -> dict[range, SpanCost]:
        """Time decode and prefill steps, where the last layer is also without the LM head."""
        variants = [
            (span, should_sample)
            for span, probe in probes.items()
            for should_sample in ([False, True] if probe.executor.is_last else [False])
        ]
        decodes = [partial(probes[span].decode, samples) for span, samples in variants]
        prefills = [partial(probes[span].prefill, samples) for span, samples in variants]
        parts = [
            _repeat(steps, self._check_cancelled, self._measured_seconds)
            for steps in (decodes, prefills)
        ]
        times = {
            variant: decode + prefill / DECODES_PER_CHUNK
            for variant, decode, prefill in zip(variants, *parts, strict=True)
        }
        costs = {}
        for span, probe in probes.items():
            seconds = times[span, False]
            head_seconds = max(0.0, times.get((span, True), seconds) - seconds)
            costs[span] = SpanCost(seconds, head_seconds, self._count_bytes(probe))
        return costs

    def _count_bytes(self, probe: LayerProbe) -> int:
        """Return the bytes of the weights, with the keys and values of the longest sequence."""
        config = self._assignment.config
        assert config.max_model_len is not None
        num_blocks = -(-config.max_model_len // config.scheduler.block_size)
        state_bytes = STATE_SLOTS_PER_SEQ * probe.executor.state_bytes
        cache_bytes = num_blocks * probe.executor.block_bytes + state_bytes
        return probe.executor.weight_bytes + cache_bytes

    def _count_embedding_bytes(self, model: ModelConfig, item_bytes: int) -> int:
        """Return the bytes of this rank's rows of the embedding; 0 except on the first stage."""
        if self._assignment.stage:
            return 0
        num_rows = -(-model.model.vocab_size // self._assignment.num_ranks)
        return num_rows * model.model.hidden_size * item_bytes

    def _check_cancelled(self) -> None:
        if self._is_cancelled:
            raise ProbeCancelledError


def find_kinds(specs: Sequence[LayerSpec]) -> list[int]:
    """Return one layer index per distinct layer configuration, most frequent first.

    At most MAX_KINDS indices are returned. The first and the last layer of the model are avoided,
    because embedding or LM head come with them.

    Args:
        specs: configuration of each layer of the model.
    """
    kinds: list[list[int]] = []
    for index, spec in enumerate(specs):
        # Alone, such a layer would lack its keys and values.
        if isinstance(spec.attention, AttentionSpec) and spec.attention.kv_layers_back:
            continue
        # Alone, such a layer would lack its selected keys.
        if isinstance(spec.attention, LatentAttentionSpec) and spec.attention.follows_selection:
            continue
        same = next((kind for kind in kinds if specs[kind[0]] == spec), None)
        if same is None:
            kinds.append([index])
        else:
            same.append(index)
    kinds.sort(key=len, reverse=True)
    inner = range(1, len(specs) - 1)
    return [next((i for i in kind if i in inner), kind[0]) for kind in kinds[:MAX_KINDS]]


def find_span(specs: Sequence[LayerSpec], kinds: Sequence[int]) -> range | None:
    """Return consecutive layers, not the first, whose configurations are all measured.

    Args:
        specs: configuration of each layer of the model.
        kinds: layers that are measured alone, from `find_kinds`.

    Returns:
        SPAN_LAYERS layers; None if there are no such layers.
    """
    for begin in range(1, len(specs) - SPAN_LAYERS + 1):
        span = range(begin, begin + SPAN_LAYERS)
        if all(specs[_kind_of(specs, kinds, index)] == specs[index] for index in span):
            return span
    return None


def _kind_of(specs: Sequence[LayerSpec], kinds: Sequence[int], index: int) -> int:
    """Return the measured layer of the same kind; the first one if there is none."""
    return next((kind for kind in kinds if specs[kind] == specs[index]), kinds[0])


def _separate_step(alone: Sequence[SpanCost], consecutive: range, seconds: float) -> float:
    """Return the time of a step in addition to that of its layers.

    Args:
        alone: cost of each layer of the model in a step of its own.
        consecutive: layers that are also measured in one step.
        seconds: time of that step.
    """
    separately = sum(alone[index].seconds for index in consecutive)
    overhead = (separately - seconds) / (len(consecutive) - 1)
    # Noise must not leave a layer without a cost.
    return min(max(0.0, overhead), 0.9 * min(cost.seconds for cost in alone))


def _count_weights(spec: LayerSpec, hidden_size: int) -> int:
    """Return the number of weights that a layer reads per token."""
    return spec.weights_per_token(hidden_size)


def _repeat(
    steps: Sequence[Callable[[], float]],
    check_cancelled: Callable[[], None],
    measured_seconds: float,
) -> list[float]:
    """Return the least time of each step over several repetitions, which is disturbed least.

    Steps whose times are compared take turns, so that the load of the machine is the same.

    Args:
        steps: return the time of a step.
        check_cancelled: raises an error to end the measurement.
        measured_seconds: time per step after which it is not repeated any more.
    """
    for _ in range(WARM_UP_STEPS):
        for time_step in steps:
            time_step()
    best, total = [math.inf] * len(steps), 0.0
    for repetition in range(MAX_REPETITIONS):
        check_cancelled()
        seconds = [time_step() for time_step in steps]
        best, total = list(map(min, best, seconds)), total + sum(seconds)
        if repetition + 1 >= MIN_REPETITIONS and total > measured_seconds * len(steps):
            break
    return best
