"""Decoder layer, and the layers of a stage, recorded as one native program.

`gllm.kernels.native.program` records and replays; this module decides when to record, and owns the
memory of intermediate results.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

import numpy as np
import torch
from torch import Tensor

from gllm.kernels.activation import apply_activation, multiply
from gllm.kernels.attention_plan import AttentionPlan, PagedBatch
from gllm.kernels.native.library import library_for
from gllm.kernels.native.program import (
    NotRecordableError,
    RecordedProgram,
    launch_host_function,
    record_kernels,
)
from gllm.kernels.residual import add, add_to, replace, scale
from gllm.kernels.rotary import RotaryAngles
from gllm.kernels.state_plan import StatePlan
from gllm.models.attention import Attention, ForwardContext, LatentAttention, LayerCache
from gllm.models.basic_layers import Linear, Norm, optional_norm
from gllm.models.feed_forward import MLP, Experts
from gllm.models.host_experts import HostExperts
from gllm.models.loader import Weights
from gllm.models.recurrent import (
    DeltaNet,
    KimiDelta,
    Lightning,
    Mamba1,
    Mamba2,
    ParallelMixer,
    ShortConv,
)
from gllm.models.spec.attention import AttentionSpec, LatentAttentionSpec
from gllm.models.spec.feed_forward import ExpertBranchSpec, ExpertsSpec, PerLayerInputSpec
from gllm.models.spec.layer import LayerSpec, NoMixerSpec, ParallelMixerSpec, SequenceMixerSpec
from gllm.models.spec.parts import RopeSpec
from gllm.models.spec.recurrent import (
    DeltaNetSpec,
    KimiDeltaSpec,
    LightningSpec,
    Mamba1Spec,
    Mamba2Spec,
    ShortConvSpec,
)

SequenceMixer = (
    Attention
    | LatentAttention
    | DeltaNet
    | KimiDelta
    | Lightning
    | Mamba1
    | Mamba2
    | ParallelMixer
    | ShortConv
)
SEQUENCE_MIXERS: Mapping[type[SequenceMixerSpec], Callable[..., SequenceMixer]] = MappingProxyType(
    {
        AttentionSpec: Attention,
        DeltaNetSpec: DeltaNet,
        KimiDeltaSpec: KimiDelta,
        LatentAttentionSpec: LatentAttention,
        LightningSpec: Lightning,
        Mamba1Spec: Mamba1,
        Mamba2Spec: Mamba2,
        ParallelMixerSpec: ParallelMixer,
        ShortConvSpec: ShortConv,
    }
)
"""Modules of the blocks that see more than one token, by their specs."""


class DecoderLayer:
    """Decoder layer: attention and feed-forward block with their norms and residual connections."""

    def __init__(self, spec: LayerSpec, weights: Weights, hidden_size: int) -> None:
        """Read the weights from `weights`, which are those of the layer."""
        self.is_parallel, self.residual_scale = spec.is_parallel, spec.residual_scale
        self.stream_factors = spec.stream_factors
        self.attention_norm = optional_norm(spec.attention_norm, weights, hidden_size)
        self.attention: SequenceMixer | None = None
        if not isinstance(spec.attention, NoMixerSpec):
            create = SEQUENCE_MIXERS[type(spec.attention)]
            self.attention = create(spec.attention, weights, hidden_size)
        self.post_attention_norm = optional_norm(spec.post_attention_norm, weights, hidden_size)
        self.mlp_norm = optional_norm(spec.mlp_norm, weights, hidden_size)
        self.mlp: MLP | Experts | None = None
        if isinstance(spec.mlp, ExpertsSpec):
            self.mlp = Experts(spec.mlp, weights, hidden_size)
        elif spec.mlp is not None:
            self.mlp = MLP(spec.mlp, weights, hidden_size)
        self.post_mlp_norm = optional_norm(spec.post_mlp_norm, weights, hidden_size)
        self.experts: ExpertBranch | None = None
        if spec.experts is not None:
            self.experts = ExpertBranch(spec.experts, weights, hidden_size)
        self.per_layer_input: PerLayerInput | None = None
        if spec.per_layer_input is not None:
            self.per_layer_input = PerLayerInput(spec.per_layer_input, weights, hidden_size)
        self.scalar = None if spec.scalar is None else weights.read(spec.scalar, 1)

    def __call__(
        self,
        hidden: Tensor,
        delta: Tensor | None,
        context: ForwardContext,
        cache: LayerCache,
        embedding: Tensor | None = None,
    ) -> Tensor | None:
        """Return the output of the last sublayer, [tokens, hidden]; None if `hidden` includes it.

        The next layer adds it to the residual stream, fused with its first norm.

        Args:
            hidden: residual stream [tokens, hidden] without `delta`, to which the outputs of the
                layer's other sublayers are added in place.
            delta: output of the previous layer's last sublayer, which is not added to `hidden` yet;
                None for the first layer.
            context: inputs of the step.
            cache: KV cache or states of the layer.
            embedding: the layer's part [tokens, size] of the per-layer embedding, if there is one.
        """
        normed = _add_and_normalize(self.attention_norm, hidden, delta)
        if self.attention is None:
            assert self.mlp is not None, "a layer has a block"
            return scale(self.mlp(normed), self.residual_scale)
        if self.stream_factors is not None:
            replace(hidden, normed, self.stream_factors[0])
        attended = self.attention(normed, context, cache)
        if self.post_attention_norm is not None:
            attended = self.post_attention_norm(attended)
        if self.mlp is None:
            return scale(attended, self.residual_scale)
        if self.is_parallel:
            mlp_input = normed if self.mlp_norm is None else self.mlp_norm(hidden)
            return add(attended, self.mlp(mlp_input))
        attended = scale(attended, self.residual_scale)
        normed = _add_and_normalize(self.mlp_norm, hidden, attended)
        if self.stream_factors is not None:
            replace(hidden, normed, self.stream_factors[1])
        output = self.mlp(normed)
        if self.experts is not None:
            output = self.experts(hidden, output)
        if self.post_mlp_norm is not None:
            output = self.post_mlp_norm(output)
        output = scale(output, self.residual_scale)
        if self.per_layer_input is not None:
            assert embedding is not None, "the stage has the per-layer embedding"
            output = self.per_layer_input(add_to(hidden, output), embedding)
        if self.scalar is None:
            return output
        scalar = self.scalar
        launch_host_function(
            lambda stream, addend: stream.add_(addend).mul_(scalar),
            *(hidden, output),
            is_in_place=True,
        )
        return None

    @property
    def host_experts(self) -> HostExperts | None:
        """Routed experts that are in the memory of the host; None without such experts."""
        block = self.mlp if self.experts is None else self.experts.experts
        experts = block.experts if isinstance(block, Experts) else None
        return experts if isinstance(experts, HostExperts) else None


def _add_and_normalize(norm: Norm | None, hidden: Tensor, delta: Tensor | None) -> Tensor:
    """Add `delta` to `hidden` in place; return the norm of the sum, or the sum without a norm."""
    return _add(hidden, delta) if norm is None else norm.add_and_normalize(hidden, delta)


class ExpertBranch:
    """Mixture of experts beside a layer's MLP, and the norms around both."""

    def __init__(self, spec: ExpertBranchSpec, weights: Weights, hidden_size: int) -> None:
        """Read the weights from `weights`, which are those of the layer."""
        self.experts = Experts(spec.experts, weights, hidden_size)
        self.norm = Norm(spec.norm, weights, hidden_size)
        self.router_norm = Norm(spec.router_norm, weights, hidden_size)
        self.post_norm = Norm(spec.post_norm, weights, hidden_size)
        self.post_mlp_norm = Norm(spec.post_mlp_norm, weights, hidden_size)

    def __call__(self, hidden: Tensor, mlp_output: Tensor) -> Tensor:
        """Return the sum of both blocks [tokens, hidden].

        Args:
            hidden: residual stream [tokens, hidden] before the blocks.
            mlp_output: output of the MLP [tokens, hidden].
        """
        output = self.experts(self.norm(hidden), self.router_norm(hidden))
        return add(self.post_mlp_norm(mlp_output), self.post_norm(output))


class PerLayerInput:
    """Addend of the residual stream from the layer's part of the per-layer embedding."""

    def __init__(self, spec: PerLayerInputSpec, weights: Weights, hidden_size: int) -> None:
        """Read the weights from `weights`, which are those of the layer."""
        self.activation = spec.activation
        self.gate = Linear(spec.gate, weights, [spec.size], hidden_size)
        self.projection = Linear(spec.projection, weights, [hidden_size], spec.size)
        self.norm = Norm(spec.norm, weights, hidden_size)

    def __call__(self, hidden: Tensor, embedding: Tensor) -> Tensor:
        """Return the addend [tokens, hidden].

        Args:
            hidden: residual stream [tokens, hidden].
            embedding: the layer's part [tokens, size] of the per-layer embedding.
        """
        gate = apply_activation(self.activation, self.gate(hidden))
        return self.norm(self.projection(multiply(gate, embedding)))


MIN_PROGRAM_TOKENS = 128
"""Capacity of the first program in tokens; a larger step records a program of its size."""
WORKSPACE_STREAMS = 128
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
        self._embeddings: Tensor | None = None
        """Per-layer embedding [layers, tokens, size] that a program reads, if the model has one."""
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
            self._program = self._record(capacity, hidden.dtype, kv, context.layer_embeddings)
            self._can_record = self._program is not None
        if self._program is None:
            return _add(hidden, self._run(hidden, context, kv, on_layer))
        stream = self._stream[:tokens].copy_(hidden)
        if context.layer_embeddings is not None:
            assert self._embeddings is not None, "the recorded steps had the embeddings"
            self._embeddings[:, :tokens] = context.layer_embeddings
        self._program.run(
            *(tokens, context.attention_plans, context.angles, context.states, on_layer, context)
        )
        return _add(stream, None if self._delta is None else self._delta[:tokens])

    def release_workspace(self) -> None:
        """Free the recorded program, which is bound to one KV cache, and its workspace."""
        self._program = self._delta = self._embeddings = None
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
        rows = zip(self.layers, kv, self._split(context.layer_embeddings), strict=True)
        for count, (layer, cache, embedding) in enumerate(rows, start=1):
            delta = layer(hidden, delta, context, cache, embedding)
            if on_layer is not None:
                on_layer(count)
        return delta

    def _split(self, embeddings: Tensor | None) -> Sequence[Tensor | None]:
        """Return each layer's part [tokens, size] of the per-layer embedding; None without one."""
        return [None] * len(self.layers) if embeddings is None else embeddings.unbind()

    def _record(
        self,
        tokens: int,
        dtype: torch.dtype,
        kv: Sequence[LayerCache],
        embeddings: Tensor | None,
    ) -> RecordedProgram | None:
        """Return a program for up to `tokens` tokens.

        Args:
            tokens: largest number of tokens.
            dtype: dtype of the residual stream.
            kv: KV cache of each layer.
            embeddings: per-layer embedding of a step; None if the model has none.

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
        if embeddings is not None:
            self._embeddings = embeddings.new_empty(len(kv), tokens, embeddings.shape[2])
        rows = list(zip(self.layers, kv, self._split(self._embeddings), strict=True))
        try:
            with record_kernels(library, tokens, memory) as recorded:
                for layer, cache, embedding in rows:
                    recorded.reuse()
                    self._delta = layer(self._stream, self._delta, context, cache, embedding)
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
        segments = torch.zeros(1, 4, dtype=torch.int32)
        return ForwardContext(plans, angles, StatePlan(segments, segments[0, :2]))


def _add(hidden: Tensor, delta: Tensor | None) -> Tensor:
    return hidden if delta is None else add_to(hidden, delta)
