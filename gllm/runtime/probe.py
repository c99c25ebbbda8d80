"""Probe of a worker's speed: times some layers of the model and the LM head on its device.

The layers are divided by it where workers differ. Only layers of different kinds are loaded, one of
each, so a probe takes a few seconds; its result is kept in the cache folder.
"""

import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec

from gllm.messages.measurement import StageMeasured
from gllm.models.config import ModelConfig, read_config
from gllm.models.spec import LayerSpec
from gllm.runtime.assignment import StageAssignment
from gllm.runtime.device import set_num_threads
from gllm.runtime.layer_probe import LayerProbe
from gllm.runtime.probe_cache import ProbeCache, create_key

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
    """Nobody needs the measurement."""


class StageProbe:
    """Measurement of a worker, on one thread."""

    result: StageMeasured
    """Known once `run` has ended without an error."""

    def __init__(self, assignment: StageAssignment, cache: ProbeCache | None = None) -> None:
        """Create a probe.

        Args:
            assignment: with preliminary layers.
            cache: of earlier measurements; None for the default folder.
        """
        self._assignment = assignment
        self._cache = ProbeCache() if cache is None else cache
        self._is_cancelled = False
        self._keeps_weights = True
        self._available_bytes: int | None = None

    def cancel(self) -> None:
        """End `run` soon, from any thread."""
        self._is_cancelled = True

    def run(self) -> None:
        """Measure, or find an earlier measurement; then `result` has it.

        Raises:
            ModelError: the folder does not have the weights.
            FieldError: weights, KV cache or attention cannot be as configured.
            ProbeCancelledError: nobody needs the measurement.
        """
        assignment = self._assignment
        set_num_threads(assignment.num_threads)
        model = read_config(Path(assignment.model_folder))
        last = model.model.num_layers - 1
        # Without weights: only to know what decides the times.
        numerics = LayerProbe(assignment, model, range(last, last + 1)).executor.numerics
        key = create_key(assignment, numerics)
        measured = self._cache.load(key)
        if measured is None:
            measured = self._measure(model)
            self._cache.store(key, measured)
        self.result = msgspec.structs.replace(
            measured, stage=assignment.stage, rank=assignment.rank, cache_key=key
        )
        log.info(
            "measured%s: layers %.3f to %.3f ms, LM head %.3f ms per step",
            " at an earlier start" if measured.is_cached else "",
            1e3 * min(measured.layer_seconds),
            1e3 * max(measured.layer_seconds),
            1e3 * measured.head_seconds,
        )

    def _measure(self, model: ModelConfig) -> StageMeasured:
        assignment, specs = self._assignment, model.model.layers
        kinds = find_kinds(specs)
        singles = [range(first, first + 1) for first in kinds]
        together = find_span(specs, kinds)
        last = range(len(specs) - 1, len(specs))
        has_head = assignment.stage == assignment.num_stages - 1
        spans = {*singles, *([] if together is None else [together]), *([last] if has_head else [])}
        # Single layers first: the first one has the device for itself.
        order = sorted(spans, key=lambda span: (span not in singles, span.start))
        probes: dict[range, LayerProbe] = {}
        try:
            self._load(model, order, probes)
            times = self._time_steps(probes)
            sizes = {span: self._count_bytes(probe) for span, probe in probes.items()}
            executor = probes[singles[0]].executor
            self._keeps_weights, item_bytes = executor.keeps_weights, executor.dtype.itemsize
        finally:
            for probe in probes.values():
                probe.close()
        seconds = {first: times[span, False] for first, span in zip(kinds, singles, strict=True)}
        step_seconds = 0.0
        if together is not None:
            alone = sum(seconds[_kind_of(specs, kinds, index)] for index in together)
            overhead = (alone - times[together, False]) / (SPAN_LAYERS - 1)
            step_seconds = min(max(0.0, overhead), 0.9 * min(seconds.values()))
        head_seconds, head_bytes = 0.0, 0
        if has_head:
            head_seconds = max(0.0, times[last, True] - times[last, False])
            kind = _kind_of(specs, kinds, last.start)
            head_bytes = max(0, sizes[last] - sizes[range(kind, kind + 1)])
        embedding_bytes = 0
        if assignment.stage == 0:
            num_rows = -(-model.model.vocab_size // assignment.num_ranks)
            embedding_bytes = num_rows * model.model.hidden_size * item_bytes
        layers = [_kind_of(specs, kinds, index) for index in range(len(specs))]
        weights = [_count_weights(spec, model.model.hidden_size) for spec in specs]
        return StageMeasured(
            assignment.stage,
            assignment.rank,
            [
                (seconds[kind] - step_seconds) * weights[index] / weights[kind]
                for index, kind in enumerate(layers)
            ],
            head_seconds,
            step_seconds,
            [
                sizes[range(kind, kind + 1)] * weights[index] // weights[kind]
                for index, kind in enumerate(layers)
            ],
            embedding_bytes,
            head_bytes,
            self._available_bytes,
            self._keeps_weights,
        )

    def _load(
        self, model: ModelConfig, spans: Sequence[range], probes: dict[range, LayerProbe]
    ) -> None:
        """Load several parts of the model at once, so that their steps can take turns.

        probes: gets each part once it is loaded.
        """
        for span in spans:
            self._check_cancelled()
            probe = LayerProbe(self._assignment, model, span)
            probe.load()
            probes[span] = probe
        self._available_bytes = probes[spans[0]].available_bytes

    def _time_steps(self, probes: dict[range, LayerProbe]) -> dict[tuple[range, bool], float]:
        """Return the time of a decode step plus the share of a prefill step.

        Returns:
            By the layers, and whether logits are computed too, which only the last layer has.
        """
        variants = [
            (span, should_sample)
            for span, probe in probes.items()
            for should_sample in ([False, True] if probe.executor.is_last else [False])
        ]
        parts = []
        for name in ("decode", "prefill"):
            steps = [partial(getattr(probes[span], name), each) for span, each in variants]
            parts.append(_repeat(steps, self._check_cancelled))
        return {
            variant: decode + prefill / DECODES_PER_CHUNK
            for variant, decode, prefill in zip(variants, *parts, strict=True)
        }

    def _count_bytes(self, probe: LayerProbe) -> int:
        """Return the bytes of the weights, with the keys and values of the longest sequence."""
        config = self._assignment.config
        assert config.max_model_len is not None
        num_blocks = -(-config.max_model_len // config.scheduler.block_size)
        return probe.executor.weight_bytes + num_blocks * probe.executor.block_bytes

    def _check_cancelled(self) -> None:
        if self._is_cancelled:
            raise ProbeCancelledError


def find_kinds(specs: Sequence[LayerSpec]) -> list[int]:
    """Return a layer of each kind, the most frequent kinds first and at most MAX_KINDS.

    The first and the last layer of the model are avoided, because embedding or head come with them.
    """
    kinds: list[list[int]] = []
    for index, spec in enumerate(specs):
        same = next((kind for kind in kinds if specs[kind[0]] == spec), None)
        if same is None:
            kinds.append([index])
        else:
            same.append(index)
    kinds.sort(key=len, reverse=True)
    inner = range(1, len(specs) - 1)
    return [next((i for i in kind if i in inner), kind[0]) for kind in kinds[:MAX_KINDS]]


def find_span(specs: Sequence[LayerSpec], kinds: Sequence[int]) -> range | None:
    """Return consecutive layers whose kinds are measured, without the first one of the model."""
    for begin in range(1, len(specs) - SPAN_LAYERS + 1):
        span = range(begin, begin + SPAN_LAYERS)
        if all(specs[_kind_of(specs, kinds, index)] == specs[index] for index in span):
            return span
    return None


def _kind_of(specs: Sequence[LayerSpec], kinds: Sequence[int], index: int) -> int:
    """Return the measured layer of the same kind; the first one if there is none."""
    return next((kind for kind in kinds if specs[kind] == specs[index]), kinds[0])


def _count_weights(spec: LayerSpec, hidden_size: int) -> int:
    """Return the number of weights that a layer reads per token."""
    attention = spec.attention.weights_per_token(hidden_size)
    return attention + spec.mlp.weights_per_token(hidden_size)


def _repeat(
    steps: Sequence[Callable[[], float]], check_cancelled: Callable[[], None]
) -> list[float]:
    """Return the least time of each step over several repetitions, which is disturbed least.

    Steps whose times are compared take turns, so that the load of the machine is the same.
    """
    for _ in range(WARM_UP_STEPS):
        for time_step in steps:
            time_step()
    best, total = [math.inf] * len(steps), 0.0
    for repetition in range(MAX_REPETITIONS):
        check_cancelled()
        seconds = [time_step() for time_step in steps]
        best, total = list(map(min, best, seconds)), total + sum(seconds)
        if repetition + 1 >= MIN_REPETITIONS and total > MEASURED_SECONDS * len(steps):
            break
    return best
