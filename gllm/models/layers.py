"""The decoder layers of a stage, recorded as one native program where every kernel is compiled.

`gllm.kernels.native.program` records and replays; this module decides when to record, and owns the
memory of intermediate results.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from gllm.kernels.attention_plan import AttentionPlan, PagedBatch
from gllm.kernels.native.library import library_for
from gllm.kernels.native.program import NotRecordableError, RecordedProgram, record_kernels
from gllm.kernels.rotary import RotaryAngles
from gllm.models.attention import ForwardContext, LayerCache
from gllm.models.layer import DecoderLayer
from gllm.models.spec import LayerSpec, RopeSpec

MIN_PROGRAM_TOKENS = 128
"""Capacity of the first program in tokens; a larger step records a program of its size."""
WORKSPACE_STREAMS = 64
"""Memory reserved for the intermediate results of a layer, as a multiple of the residual stream.
Pages use memory only once they are written."""


class DecoderLayers:
    """Consecutive decoder layers on one residual stream."""

    def __init__(
        self, layers: list[DecoderLayer], specs: Sequence[LayerSpec], hidden_size: int
    ) -> None:
        """Create from the layers and their specs, in order."""
        self.layers = layers
        self._ropes = {spec.attention.rope for spec in specs if spec.attention.rope}
        self._windows = {spec.attention.window for spec in specs}
        self._hidden_size = hidden_size
        self._delta: Tensor | None = None
        self._program: RecordedProgram | None = None
        self._can_record = True

    @property
    def is_program(self) -> bool:
        """True if steps run as a recorded program; known after the first step."""
        return self._program is not None

    def __call__(
        self,
        hidden: Tensor,
        context: ForwardContext,
        kv: Sequence[LayerCache],
        on_layer: Callable[[int], None] | None = None,
    ) -> Tensor:
        """Return the residual stream [tokens, hidden] after the layers, valid until the next call.

        Args:
            hidden: residual stream [tokens, hidden] before the layers; may be overwritten.
            context: inputs of the step.
            kv: KV cache of each layer, the same at every call until `release_workspace`.
            on_layer: called after each layer with the number of layers whose keys and values are in
                the KV cache; None for no calls.
        """
        tokens = len(hidden)
        is_native = all(plan.backend == "native" for plan in context.attention_plans.values())
        self._can_record = self._can_record and is_native
        if self._can_record and (self._program is None or tokens > self._program.tokens):
            capacity = max(MIN_PROGRAM_TOKENS, 1 << (tokens - 1).bit_length())
            self._program = self._record(capacity, hidden.dtype, kv)
            self._can_record = self._program is not None
        if self._program is None:
            return _add(hidden, self._run(hidden, context, kv, on_layer))
        stream = self._stream[:tokens].copy_(hidden)
        self._program.run(tokens, context.attention_plans, context.angles, on_layer)
        return _add(stream, None if self._delta is None else self._delta[:tokens])

    def release_workspace(self) -> None:
        """Free the program, which is bound to one KV cache, and the memory of its results."""
        self._program = self._delta = None
        self._stream = torch.empty(0)
        self._can_record = True

    def _run(
        self,
        hidden: Tensor,
        context: ForwardContext,
        kv: Sequence[LayerCache],
        on_layer: Callable[[int], None] | None,
    ) -> Tensor | None:
        """Run layer by layer; return the last addend of the residual stream."""
        delta = None
        for count, (layer, cache) in enumerate(zip(self.layers, kv, strict=True), start=1):
            delta = layer(hidden, delta, context, cache)
            if on_layer is not None:
                on_layer(count)
        return delta

    def _record(
        self, tokens: int, dtype: torch.dtype, kv: Sequence[LayerCache]
    ) -> RecordedProgram | None:
        """Return a program for up to `tokens` tokens.

        Returns:
            None if a layer uses other than compiled kernels.
        """
        self._stream = torch.empty(tokens, self._hidden_size, dtype=dtype)
        library = library_for(self._stream, "norm")
        if library is None:
            return None
        memory = torch.empty(WORKSPACE_STREAMS * self._stream.nbytes, dtype=torch.uint8)
        context = self._placeholder_context(tokens)
        self._delta = None
        try:
            with record_kernels(library, tokens, memory) as recorded:
                for layer, cache in zip(self.layers, kv, strict=True):
                    recorded.reuse()
                    self._delta = layer(self._stream, self._delta, context, cache)
                    recorded.end_segment()
        except NotRecordableError:
            return None
        return RecordedProgram(recorded, context.angles)

    def _placeholder_context(self, tokens: int) -> ForwardContext:
        """Return inputs for a step of `tokens` tokens; recording does not read their values."""
        ones = np.ones(tokens, dtype=np.int64)
        rows = PagedBatch(ones[:, None], np.arange(tokens + 1), ones, tokens, 1, 1)
        slots = torch.empty(tokens, dtype=torch.int64)
        plans = {window: AttentionPlan(rows, slots, window, "native") for window in self._windows}
        angles: dict[RopeSpec, RotaryAngles] = {}
        for rope in self._ropes:
            cosine, sine = torch.empty(2, tokens, 1, rope.dim // 2)
            angles[rope] = cosine, sine
        return ForwardContext(plans, angles)


def _add(hidden: Tensor, delta: Tensor | None) -> Tensor:
    return hidden if delta is None else hidden.add_(delta)
