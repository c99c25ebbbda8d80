"""A stage's layers one after the other, as one program where they can be recorded.

Owns when they are recorded (gllm/kernels/native/program.py) and the memory between them. Knows
nothing of embeddings and heads.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from gllm.kernels.attention_plan import AttentionPlan, PagedBatch
from gllm.kernels.native.library import library_for
from gllm.kernels.native.program import NotRecordableError, RecordedProgram, record_kernels
from gllm.kernels.rotary import RotaryAngles
from gllm.models import spec
from gllm.models.attention import LayerCache, Step
from gllm.models.layer import Layer

LEAST = 128
"""Tokens that the first program has room for; the next has room for the step that outgrew it."""
ROOM = 64
"""Memory reserved for what a layer makes, in residual streams; pages count when written."""


class Layers:
    """Layers that share a residual stream."""

    def __init__(self, layers: list[Layer], described: Sequence[spec.Layer], hidden: int) -> None:
        self.each = layers
        self._ropes = {layer.attention.rope for layer in described if layer.attention.rope}
        self._windows = {layer.attention.window for layer in described}
        self._hidden = hidden
        self._delta: Tensor | None = None
        self._program: RecordedProgram | None = None
        self._can_record = True

    @property
    def is_program(self) -> bool:
        """Whether steps run at a stroke; to be asked after the first."""
        return self._program is not None

    def __call__(self, hidden: Tensor, step: Step, kv: Sequence[LayerCache]) -> Tensor:
        """The residual stream [tokens, hidden] behind the layers; hidden may be overwritten.

        kv: the cache of each layer, always the same. The result is good until the next call.
        """
        tokens = len(hidden)
        compiled = all(plan.backend == "native" for plan in step.plans.values())
        self._can_record = self._can_record and compiled
        if self._can_record and (self._program is None or tokens > self._program.tokens):
            room = max(LEAST, 1 << (tokens - 1).bit_length())
            self._program = self._recorded(room, hidden.dtype, kv)
            self._can_record = self._program is not None
        if self._program is None:
            return _add(hidden, self._run(hidden, step, kv))
        stream = self._stream[:tokens].copy_(hidden)
        self._program.run(tokens, step.plans, step.angles)
        return _add(stream, None if self._delta is None else self._delta[:tokens])

    def _run(self, hidden: Tensor, step: Step, kv: Sequence[LayerCache]) -> Tensor | None:
        delta = None
        for layer, cache in zip(self.each, kv, strict=True):
            delta = layer(hidden, delta, step, cache)
        return delta

    def _recorded(
        self, tokens: int, dtype: torch.dtype, kv: Sequence[LayerCache]
    ) -> RecordedProgram | None:
        """A program for steps of up to so many tokens; None where layers compute anything but
        compiled kernels."""
        self._stream = torch.empty(tokens, self._hidden, dtype=dtype)
        library = library_for(self._stream, "norm")
        if library is None:
            return None
        memory = torch.empty(ROOM * self._stream.nbytes, dtype=torch.uint8)
        step = self._any_step(tokens)
        self._delta = None
        try:
            with record_kernels(library, tokens, memory) as recorded:
                for layer, cache in zip(self.each, kv, strict=True):
                    recorded.reuse()
                    self._delta = layer(self._stream, self._delta, step, cache)
        except NotRecordableError:
            return None
        return RecordedProgram(recorded, step.angles)

    def _any_step(self, tokens: int) -> Step:
        """Inputs of a step with so many tokens; nobody looks into them."""
        ones = np.ones(tokens, dtype=np.int64)
        rows = PagedBatch(ones[:, None], np.arange(tokens + 1), ones, tokens, 1, 1)
        slots = torch.empty(tokens, dtype=torch.int64)
        plans = {window: AttentionPlan(rows, slots, window, "native") for window in self._windows}
        angles: dict[spec.Rope, RotaryAngles] = {}
        for rope in self._ropes:
            cosine, sine = torch.empty(2, tokens, 1, rope.dim // 2)
            angles[rope] = cosine, sine
        return Step(plans, angles)


def _add(hidden: Tensor, delta: Tensor | None) -> Tensor:
    return hidden if delta is None else hidden.add_(delta)
