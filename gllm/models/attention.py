"""Self-attention modules with their weights: grouped-query and multi-head latent attention.

They map the hidden states to queries, keys and values and back. The arithmetic is in gllm/kernels.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from gllm.kernels.activation import multiply_by_sigmoid, sigmoid, softplus
from gllm.kernels.alibi import compute_alibi_slopes
from gllm.kernels.attention import paged_attention, store
from gllm.kernels.attention_backends import HeadShape
from gllm.kernels.attention_plan import AttentionPlan
from gllm.kernels.attention_scaling import AttentionScaling
from gllm.kernels.attention_window import AttentionChunk, AttentionWindow, SymmetricWindow
from gllm.kernels.head_linear import multiply_heads, prepare_heads
from gllm.kernels.native.program import launch_host_function
from gllm.kernels.qkv import rotate_and_store
from gllm.kernels.qkv_layout import QKVLayout
from gllm.kernels.rotary import RotaryAngles, apply_rotary
from gllm.kernels.state_plan import StatePlan
from gllm.kernels.token_selection import TokenSelection
from gllm.models.basic_layers import Linear, Norm, optional_norm, read_projections
from gllm.models.indexer import Indexer
from gllm.models.loader import Weights
from gllm.models.spec.attention import AttentionSpec, LatentAttentionSpec
from gllm.models.spec.layer import SequenceMixerSpec
from gllm.models.spec.parts import QueryScaleSpec, RopeSpec

LayerCache = tuple[Tensor, ...]
"""Keys and values of a layer, each [blocks, block_size, kv_heads, elements], and its index keys if
it has an indexer; of a recurrent layer the parts of its state instead, each [slots, *shape]
float32."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Inputs of one step that all layers of a stage share: attention plans and rotary angles."""

    attention_plans: Mapping[AttentionWindow, AttentionPlan]
    """Attention plan for each window that layers have; the key None is full attention."""
    angles: Mapping[RopeSpec, RotaryAngles]
    """Rotary angles of the step's positions."""
    query_scales: Mapping[QueryScaleSpec, Tensor] = field(default_factory=dict, kw_only=True)
    """Factors [tokens, 1, 1] float32 of the step's queries, unless all are 1."""
    layer_embeddings: Tensor | None = field(default=None, kw_only=True)
    """Per-layer embedding [layers, tokens, size] of the stage's layers, if the model has one."""
    selection: TokenSelection | None = field(default=None, kw_only=True)
    """Keys that tokens of sparse attention see; None if the stage has no such layer."""
    states: StatePlan | None = None
    """States that recurrent layers read and write; None if the stage has no such layer."""

    @property
    def token_selection(self) -> TokenSelection:
        """The same as `selection`, for a layer with sparse attention."""
        assert self.selection is not None, "a stage with sparse attention has a selection"
        return self.selection

    @property
    def state_plan(self) -> StatePlan:
        """The same, for a recurrent layer."""
        assert self.states is not None, "a stage with recurrent layers has states"
        return self.states


class Attention:
    """Grouped-query self-attention of one layer, with its projections and rotary embedding."""

    def __init__(self, spec: AttentionSpec, weights: Weights, hidden_size: int) -> None:
        """Read the weights from `weights`, which are those of the layer."""
        self.spec = spec
        num_heads, num_kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        value_dim = spec.value_dim or head_dim
        outputs = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * value_dim]
        if spec.kv_layers_back:
            outputs = outputs[:1]
        orders: list[Tensor | None] = []
        self.gate_size = 0
        """Outputs of qkv_proj before the queries: the gates of the heads' outputs."""
        if spec.is_grouped_by_kv_head:
            orders = [_order_by_projection(num_heads, num_kv_heads, head_dim)]
        if spec.has_output_gate:
            self.gate_size = outputs[0]
            if spec.has_gate_proj:
                outputs.insert(0, outputs[0])
            else:
                outputs[0] *= 2
                pairs = torch.arange(outputs[0]).view(num_heads, 2, head_dim)
                orders = [pairs.transpose(0, 1).flip(0).flatten(), None, None]
        self.qkv_proj = Linear(spec.qkv_proj, weights, outputs, hidden_size, orders)
        self.out_proj = Linear(spec.out_proj, weights, [hidden_size], num_heads * value_dim)
        self.gate_proj: Linear | None = None
        if spec.gate_proj is not None:
            self.gate_proj = Linear(spec.gate_proj, weights, [num_heads], hidden_size)
        query_shape, key_shape = [head_dim], [head_dim]
        if spec.has_norm_per_head:
            query_shape, key_shape = [num_heads, head_dim], [num_kv_heads, head_dim]
        if spec.has_projection_norm:
            query_shape, key_shape = [num_heads * head_dim], [num_kv_heads * head_dim]
        query_norm = optional_norm(spec.query_norm, weights, *query_shape)
        key_norm = optional_norm(spec.key_norm, weights, *key_shape)
        self._ranks = weights.ranks
        self.norms: tuple[Norm, Norm] | None = None
        """Norms of queries and keys that rotate_and_store does not compute."""
        is_interleaved = spec.rope is not None and spec.rope.is_interleaved
        self.qkv_layout = QKVLayout(num_heads, num_kv_heads, is_interleaved)
        is_separate = spec.has_norm_per_head or spec.has_projection_norm or spec.norm_follows_rope
        if query_norm is not None and key_norm is not None:
            if query_norm.kind == "rms" and not is_separate:
                scales = query_norm.weight, key_norm.weight
                self.qkv_layout = QKVLayout(
                    num_heads, num_kv_heads, is_interleaved, *scales, query_norm.eps
                )
            else:
                self.norms = query_norm, key_norm
        self.value_norm = optional_norm(spec.value_norm, weights, head_dim)
        self._prepares_heads = (
            self.norms is not None
            or self.value_norm is not None
            or spec.qkv_limit is not None
            or (spec.norm_follows_rope and spec.rope is not None)
        )
        self.query_norm = query_norm
        slopes = None
        if spec.alibi_scale is not None:
            slopes = compute_alibi_slopes(spec.total_num_heads or num_heads) * spec.alibi_scale
            slopes = slopes[spec.first_head : spec.first_head + num_heads]
        sinks = None if spec.sinks is None else weights.read_float32(spec.sinks, num_heads)
        self.scaling = AttentionScaling(spec.scale, spec.softcap, slopes, sinks)

    def __call__(self, x: Tensor, context: ForwardContext, cache: LayerCache) -> Tensor:
        """Return the attention output [tokens, hidden] of x [tokens, hidden].

        Writes the keys and values of the tokens to the cache, unless they are another layer's.
        """
        if self.spec.kv_layers_back:
            return self._attend_to_other_layer(x, context, cache)
        if self.spec.value_dim:
            return self._attend_with_other_values(x, context, cache)
        spec = self.spec
        num_heads = spec.num_heads + 2 * spec.num_kv_heads
        projected = self.qkv_proj(x)
        qkv = projected[:, self.gate_size :].view(len(x), num_heads, spec.head_dim)
        if self._prepares_heads:
            launch_host_function(self._prepare_heads, qkv, context=context, is_in_place=True)
        plan = context.attention_plans[spec.window]
        angles = None
        if spec.rope is not None and not spec.norm_follows_rope:
            angles = context.angles[spec.rope]
        keys, values = cache
        query = rotate_and_store(qkv, self.qkv_layout, angles, (keys, values), plan.slots)
        if spec.query_scale is not None:
            query = _scale_queries(spec.query_scale, query, context)
        attended = paged_attention(query, keys, values, plan, self.scaling)
        if self.gate_proj is not None:
            activate = sigmoid if spec.gate_activation == "sigmoid" else softplus
            scale_heads = partial(_scale_heads, activate)
            attended = launch_host_function(scale_heads, attended, self.gate_proj(x))
        output = attended.flatten(1)
        if self.gate_size:
            output = multiply_by_sigmoid(output, projected[:, : self.gate_size])
        return self.out_proj(output)

    def _prepare_heads(self, context: ForwardContext, qkv: Tensor) -> Tensor:
        """Apply in place what rotate_and_store does not: norms, a rotation before them, limits.

        qkv: [tokens, heads + 2 * kv_heads, head_dim], which is returned.
        """
        spec = self.spec
        if self.value_norm is not None:
            values = qkv[:, -spec.num_kv_heads :]
            values.copy_(self.value_norm(values))
        if spec.norm_follows_rope and spec.rope is not None:
            rotated = qkv[:, : spec.num_heads + spec.num_kv_heads]
            angles = context.angles[spec.rope]
            rotated.copy_(apply_rotary(rotated, angles, self.qkv_layout.interleaved))
        if self.norms is not None:
            self._normalize(qkv, *self.norms)
        if spec.qkv_limit is not None:
            qkv.clamp_(-spec.qkv_limit, spec.qkv_limit)
        return qkv

    def _normalize(self, qkv: Tensor, query_norm: Norm, key_norm: Norm) -> None:
        """Normalize queries and keys of qkv [tokens, heads + 2 * kv_heads, head_dim] in place."""
        num_heads = self.spec.num_heads
        query, key = qkv[:, :num_heads], qkv[:, num_heads : num_heads + self.spec.num_kv_heads]
        if not self.spec.has_projection_norm:
            query.copy_(query_norm(query))
            key.copy_(key_norm(key))
        elif self._ranks.size == 1:
            query.copy_(query_norm(query.flatten(1)).view(query.shape))
            key.copy_(key_norm(key.flatten(1)).view(key.shape))
        else:
            self._normalize_over_ranks((query, key), (query_norm, key_norm))

    def _normalize_over_ranks(self, parts: tuple[Tensor, Tensor], norms: tuple[Norm, Norm]) -> None:
        """Normalize queries and keys in place by the mean squares over all ranks.

        parts: [tokens, heads, head_dim] each; several ranks may have the same keys.
        """
        squares = []
        for part in parts:
            # In float64, so that the order of the sums does not show.
            sums = part.to(torch.float64).square().mean(dim=(1, 2))
            squares.append((sums / self._ranks.size).to(torch.float32))
        means = self._ranks.layers.sum(torch.stack(squares, dim=1), None, torch.float32)
        for part, norm, mean in zip(parts, norms, means.unbind(1), strict=True):
            scaled = part.flatten(1) * torch.rsqrt(mean + norm.eps)[:, None] * norm.weight
            part.copy_(scaled.view(part.shape))

    def _attend_with_other_values(
        self, x: Tensor, context: ForwardContext, cache: LayerCache
    ) -> Tensor:
        """Return the attention output [tokens, hidden] of values with other sizes than the keys."""
        spec, plan = self.spec, context.attention_plans[self.spec.window]
        key_cache, value_cache = cache
        query = launch_host_function(
            lambda step, rows: self._store_pairs(step, rows, key_cache, value_cache),
            self.qkv_proj(x),
            context=context,
            shape=(len(x), spec.num_heads, spec.head_dim),
        )
        attended = paged_attention(query, key_cache, value_cache, plan, self.scaling).flatten(1)
        if spec.value_scale != 1:
            attended = launch_host_function(lambda rows: rows * spec.value_scale, attended)
        return self.out_proj(attended)

    def _store_pairs(
        self, context: ForwardContext, projected: Tensor, key_cache: Tensor, value_cache: Tensor
    ) -> Tensor:
        """Write the keys and values of the tokens to the cache, and return their queries.

        Args:
            context: inputs of the step.
            projected: [tokens, outputs of qkv_proj].
            key_cache: keys of the layer.
            value_cache: values of the layer.

        Returns:
            [tokens, heads, head_dim].
        """
        spec, plan = self.spec, context.attention_plans[self.spec.window]
        width = (spec.num_heads + spec.num_kv_heads) * spec.head_dim
        rotated = projected[:, :width].unflatten(1, (-1, spec.head_dim))
        values = projected[:, width:].unflatten(1, (spec.num_kv_heads, -1))
        if spec.rope is not None:
            rotated = apply_rotary(rotated, context.angles[spec.rope], spec.rope.is_interleaved)
        query, keys = rotated.split((spec.num_heads, spec.num_kv_heads), dim=1)
        store(keys, key_cache, plan.slots)
        store(values, value_cache, plan.slots)
        return query.contiguous()

    def _attend_to_other_layer(
        self, x: Tensor, context: ForwardContext, cache: LayerCache
    ) -> Tensor:
        """Return the attention output [tokens, hidden] for the keys and values in the cache."""
        spec, plan = self.spec, context.attention_plans[self.spec.window]
        query = self.qkv_proj(x).view(len(x), spec.num_heads, spec.head_dim)
        if self.query_norm is not None:
            query = self.query_norm(query)
        if (rope := spec.rope) is not None:
            query = launch_host_function(
                lambda step, rows: apply_rotary(rows, step.angles[rope], rope.is_interleaved),
                query,
                context=context,
            )
        keys, values = cache
        return self.out_proj(paged_attention(query, keys, values, plan, self.scaling).flatten(1))


class LatentAttention:
    """Multi-head latent attention (MLA) of one layer, computed on the compressed keys and values.

    The up projections of keys and values are absorbed: they are applied to queries and outputs, so
    that all heads read the same compressed vectors. Source: DeepSeek-AI, "DeepSeek-V2" (2024),
    section 2.1.2.
    """

    def __init__(self, spec: LatentAttentionSpec, weights: Weights, hidden_size: int) -> None:
        """Read the weights from `weights`, which are those of the layer."""
        self.spec = spec
        num_heads, rank, rope_dim = spec.num_heads, spec.kv_lora_rank, spec.rope_head_dim
        self.q_down_proj: Linear | None = None
        if spec.q_down_proj is not None:
            self.q_down_proj = Linear(spec.q_down_proj, weights, [spec.q_input_size], hidden_size)
        self.q_norm = optional_norm(spec.q_norm, weights, spec.q_input_size)
        query_size = num_heads * (spec.nope_head_dim + rope_dim)
        self.q_proj = Linear(spec.q_proj, weights, [query_size], spec.q_input_size)
        self.kv_down_proj = Linear(spec.kv_down_proj, weights, [rank + rope_dim], hidden_size)
        self.kv_norm = Norm(spec.kv_norm, weights, rank)
        dims = spec.nope_head_dim, spec.value_dim
        kv_up = torch.cat(read_projections(spec.kv_up_proj, weights, [num_heads * sum(dims)], rank))
        parts = kv_up.view(num_heads, -1, rank).split(dims, dim=1)
        # [heads, rank, nope_head_dim] maps queries, [heads, value_dim, rank] maps outputs.
        self.k_up_proj = prepare_heads(parts[0].transpose(1, 2))
        self.v_up_proj = prepare_heads(parts[1])
        self.out_proj = Linear(spec.out_proj, weights, [hidden_size], num_heads * spec.value_dim)
        self.gate_proj: Linear | None = None
        if spec.gate_proj is not None:
            self.gate_proj = Linear(spec.gate_proj, weights, [num_heads], hidden_size)
        self.indexer: Indexer | None = None
        if spec.indexer is not None:
            self.indexer = Indexer(spec.indexer, weights, hidden_size, spec.q_input_size)
        self.scaling = AttentionScaling(spec.scale)

    def __call__(self, x: Tensor, context: ForwardContext, cache: LayerCache) -> Tensor:
        """Return the attention output [tokens, hidden] of x [tokens, hidden].

        Writes the compressed keys and values of the tokens to the cache.
        """
        spec, plan = self.spec, context.attention_plans[None]
        # The cache's values are the first elements of its keys.
        keys, compressed_values = cache[:2]
        launch_host_function(
            lambda step, rows: self._store(step, rows, keys),
            self.kv_down_proj(x),
            context=context,
            is_in_place=True,
        )
        compressed = self._compress(x)
        if self.indexer is not None:
            launch_host_function(
                lambda step, hidden, inputs: self._select(step, hidden, inputs, cache[2]),
                *(x, compressed),
                context=context,
                is_in_place=True,
            )
        query = self._queries(compressed, context)
        if spec.query_scale is not None:
            query = _scale_queries(spec.query_scale, query, context)
        if spec.num_selected is None:
            attended = paged_attention(query, keys, compressed_values, plan, self.scaling)
        else:
            attended = launch_host_function(
                lambda step, rows: step.token_selection.attend(
                    rows, keys, compressed_values, self.scaling
                ),
                query,
                context=context,
                shape=(*query.shape[:2], spec.kv_lora_rank),
            )
        values = multiply_heads(attended, self.v_up_proj)
        if self.gate_proj is not None:
            values = launch_host_function(partial(_scale_heads, sigmoid), values, self.gate_proj(x))
        return self.out_proj(values.flatten(1))

    def _store(self, context: ForwardContext, projected: Tensor, keys: Tensor) -> Tensor:
        """Write the entries of the tokens to the cache.

        Args:
            context: inputs of the step.
            projected: [tokens, rank + rope_dim], which is returned.
            keys: KV cache of the layer.
        """
        sizes = self.spec.kv_lora_rank, self.spec.rope_head_dim
        compressed, key = projected.split(sizes, dim=1)
        entry = torch.cat(
            (self.kv_norm(compressed)[:, None], self._rotate(key[:, None], context)), dim=-1
        )
        store(entry, keys, context.attention_plans[None].slots)
        return projected

    def _rotate(self, x: Tensor, context: ForwardContext) -> Tensor:
        """Return the rotary elements [tokens, heads, rope_head_dim] of queries or keys, rotated."""
        rope = self.spec.rope
        return x if rope is None else apply_rotary(x, context.angles[rope], rope.is_interleaved)

    def _select(
        self, context: ForwardContext, x: Tensor, compressed: Tensor, index_keys: Tensor
    ) -> Tensor:
        """Select the keys of the tokens by the layer's indexer; return x."""
        assert self.indexer is not None, "the layer has an indexer"
        assert self.spec.rope is not None, "index keys have positions"
        angles, selection = context.angles[self.spec.rope], context.token_selection
        return self.indexer(x, compressed, angles, index_keys, selection)

    def _compress(self, x: Tensor) -> Tensor:
        """Return the input [tokens, inputs] of the projection to queries."""
        if self.q_down_proj is not None:
            x = self.q_down_proj(x)
        return x if self.q_norm is None else self.q_norm(x)

    def _queries(self, compressed: Tensor, context: ForwardContext) -> Tensor:
        """Return queries [tokens, heads, rank + rope_dim] for compressed and for rotary keys."""
        spec = self.spec
        query = self.q_proj(compressed).view(len(compressed), spec.num_heads, -1)
        shape = *query.shape[:2], spec.kv_lora_rank + spec.rope_head_dim
        return launch_host_function(self._absorb, query, context=context, shape=shape)

    def _absorb(self, context: ForwardContext, query: Tensor) -> Tensor:
        """Return queries for compressed and for rotary keys, [tokens, heads, rank + rope_dim]."""
        spec = self.spec
        nope, rotary = query.split((spec.nope_head_dim, spec.rope_head_dim), dim=-1)
        rank = spec.kv_lora_rank
        result = query.new_empty(*query.shape[:2], rank + spec.rope_head_dim)
        multiply_heads(nope, self.k_up_proj, out=result[..., :rank])
        result[..., rank:] = self._rotate(rotary, context)
        return result


def _scale_queries(spec: QueryScaleSpec, query: Tensor, context: ForwardContext) -> Tensor:
    """Return queries [tokens, heads, elements] scaled by their positions."""

    def scale(step: ForwardContext, rows: Tensor) -> Tensor:
        factors = step.query_scales.get(spec)
        return rows if factors is None else (rows * factors).to(rows.dtype)

    return launch_host_function(scale, query, context=context)


def _scale_heads(activate: Callable[[Tensor], Tensor], x: Tensor, gates: Tensor) -> Tensor:
    """Return x [tokens, heads, elements] times the activation of gates [tokens, heads]."""
    return x * activate(gates)[..., None]


def head_shape(spec: SequenceMixerSpec) -> HeadShape:
    """Return the head sizes of an attention layer, by which the attention backend is selected."""
    entry = spec.kv_entry
    has_sinks = isinstance(spec, AttentionSpec) and spec.sinks is not None
    has_chunks = isinstance(spec.window, AttentionChunk)
    is_symmetric = isinstance(spec.window, SymmetricWindow)
    return HeadShape(
        entry.key_dim, entry.value_dim, entry.is_shared, has_sinks, has_chunks, is_symmetric
    )


def _order_by_projection(num_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Return the stored row of each query, then key, then value, of a weight stored by KV head."""
    group = num_heads // num_kv_heads
    rows = torch.arange((num_heads + 2 * num_kv_heads) * head_dim)
    rows = rows.view(num_kv_heads, group + 2, head_dim)
    parts = rows[:, :group], rows[:, group], rows[:, group + 1]
    return torch.cat([part.flatten() for part in parts])
