"""Decoder layer, and the layers of a stage, recorded as one native program if all kernels are.

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
from gllm.models.attention import Attention, ForwardContext, LatentAttention, LayerCache
from gllm.models.basic_layers import Norm, optional_norm
from gllm.models.feed_forward import MLP, Experts
from gllm.models.loader import Weights
from gllm.models.spec import ExpertsSpec, LatentAttentionSpec, LayerSpec, RopeSpec


class DecoderLayer:
    """Decoder layer: attention and feed-forward block with their norms and residual connections."""

    def __init__(self, spec: LayerSpec, weights: Weights, hidden_size: int) -> None:
        """Read the weights from `weights`, which are those of the layer."""
        self.is_parallel = spec.is_parallel
        self.attention_norm = Norm(spec.attention_norm, weights, hidden_size)
        self.attention: Attention | LatentAttention
        if isinstance(spec.attention, LatentAttentionSpec):
            self.attention = LatentAttention(spec.attention, weights, hidden_size)
        else:
            self.attention = Attention(spec.attention, weights, hidden_size)
        self.post_attention_norm = optional_norm(spec.post_attention_norm, weights, hidden_size)
        self.mlp_norm = optional_norm(spec.mlp_norm, weights, hidden_size)
        self.mlp: MLP | Experts
        if isinstance(spec.mlp, ExpertsSpec):
            self.mlp = Experts(spec.mlp, weights, hidden_size)
        else:
            self.mlp = MLP(spec.mlp, weights, hidden_size)
        self.post_mlp_norm = optional_norm(spec.post_mlp_norm, weights, hidden_size)

    def __call__(
        self, hidden: Tensor, delta: Tensor | None, context: ForwardContext, cache: LayerCache
    ) -> Tensor:
        """Return this layer's last addend of the residual stream, [tokens, hidden].

        The next layer adds it, together with its first norm.

        Args:
            hidden: residual stream [tokens, hidden] without `delta`; all other addends of this
                layer are added to it in place.
            delta: last addend of the previous layer; None for the first layer.
            context: inputs of the step.
            cache: KV cache of the layer.
        """
        normed = self.attention_norm.add_and_normalize(hidden, delta)
        attended = self.attention(normed, context, cache)
        if self.post_attention_norm is not None:
            attended = self.post_attention_norm(attended)
        if self.is_parallel:
            return attended + self.mlp(normed if self.mlp_norm is None else self.mlp_norm(hidden))
        assert self.mlp_norm is not None, "a sequential layer has a norm before each block"
        output = self.mlp(self.mlp_norm.add_and_normalize(hidden, attended))
        return output if self.post_mlp_norm is None else self.post_mlp_norm(output)


MIN_PROGRAM_TOKENS = 128
"""Capacity of the first program in tokens; a larger step records a program of its size."""
WORKSPACE_STREAMS = 64
"""Memory reserved for the intermediate results of a layer, as a multiple of the residual stream.
Pages use memory only once they are written."""


class DecoderLayers:
    """Consecutive decoder layers of a stage, run one after another or as a recorded program.

    A recorded program replays the kernel calls of all layers in one call on a CPU, like a CUDA
    graph.
    """

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
        """True if steps replay a recorded program; known after the first step."""
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
        """Free the recorded program, which is bound to one KV cache, and its workspace."""
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
