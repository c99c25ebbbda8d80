"""Self-attention modules with their weights: grouped-query and multi-head latent attention.

They map the hidden states to queries, keys and values and back. The arithmetic is in gllm/kernels.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gllm.kernels.alibi import compute_alibi_slopes
from gllm.kernels.attention import paged_attention, store
from gllm.kernels.attention_backends import HeadShape
from gllm.kernels.attention_plan import AttentionPlan
from gllm.kernels.attention_scaling import AttentionScaling
from gllm.kernels.head_linear import multiply_heads, prepare_heads
from gllm.kernels.qkv import rotate_and_store
from gllm.kernels.qkv_layout import QKVLayout
from gllm.kernels.rotary import RotaryAngles, apply_rotary
from gllm.models.basic_layers import Linear, Norm, optional_norm, read_projections
from gllm.models.loader import Weights
from gllm.models.spec import AttentionSpec, LatentAttentionSpec, RopeSpec

LayerCache = tuple[Tensor, Tensor]
"""Keys and values of a layer, each [blocks, block_size, kv_heads, elements]."""


@dataclass(frozen=True, slots=True)
class ForwardContext:
    """Inputs of one step that all layers of a stage share: attention plans and rotary angles."""

    attention_plans: Mapping[int | None, AttentionPlan]
    """Attention plan for each sliding window that layers have; the key None is full attention."""
    angles: Mapping[RopeSpec, RotaryAngles]
    """Rotary angles of the step's positions."""


class Attention:
    """Grouped-query self-attention of one layer, with its projections and rotary embedding."""

    def __init__(self, spec: AttentionSpec, weights: Weights, hidden_size: int) -> None:
        """Read the weights from `weights`, which are those of the layer."""
        self.spec = spec
        num_heads, num_kv_heads, head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        outputs = [num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim]
        order = None
        if spec.is_grouped_by_kv_head:
            order = _order_by_projection(num_heads, num_kv_heads, head_dim)
        self.qkv_proj = Linear(spec.qkv_proj, weights, outputs, hidden_size, order)
        self.out_proj = Linear(spec.out_proj, weights, [hidden_size], num_heads * head_dim)
        query_shape, key_shape = [head_dim], [head_dim]
        if spec.has_norm_per_head:
            query_shape, key_shape = [num_heads, head_dim], [num_kv_heads, head_dim]
        query_norm = optional_norm(spec.query_norm, weights, *query_shape)
        key_norm = optional_norm(spec.key_norm, weights, *key_shape)
        self.norms: tuple[Norm, Norm] | None = None
        """Norms of queries and keys that rotate_and_store does not compute."""
        is_interleaved = spec.rope is not None and spec.rope.is_interleaved
        self.qkv_layout = QKVLayout(num_heads, num_kv_heads, is_interleaved)
        if query_norm is not None and key_norm is not None:
            if query_norm.kind == "rms" and not spec.has_norm_per_head:
                scales = query_norm.weight, key_norm.weight
                self.qkv_layout = QKVLayout(
                    num_heads, num_kv_heads, is_interleaved, *scales, query_norm.eps
                )
            else:
                self.norms = query_norm, key_norm
        slopes = None
        if spec.alibi_scale is not None:
            slopes = compute_alibi_slopes(spec.total_num_heads or num_heads) * spec.alibi_scale
            slopes = slopes[spec.first_head : spec.first_head + num_heads]
        self.scaling = AttentionScaling(spec.scale, spec.softcap, slopes)

    def __call__(self, x: Tensor, context: ForwardContext, cache: LayerCache) -> Tensor:
        """Return the attention output [tokens, hidden] of x [tokens, hidden].

        Writes the keys and values of the tokens to the cache.
        """
        spec = self.spec
        num_heads = spec.num_heads + 2 * spec.num_kv_heads
        qkv = self.qkv_proj(x).view(len(x), num_heads, spec.head_dim)
        if self.norms is not None:
            begin = 0
            counts = spec.num_heads, spec.num_kv_heads
            for norm, count in zip(self.norms, counts, strict=True):
                qkv[:, begin : begin + count] = norm(qkv[:, begin : begin + count])
                begin += count
        plan = context.attention_plans[spec.window]
        angles = None if spec.rope is None else context.angles[spec.rope]
        query = rotate_and_store(qkv, self.qkv_layout, angles, cache, plan.slots)
        attended = paged_attention(query, *cache, plan, self.scaling)
        return self.out_proj(attended.flatten(1))


class LatentAttention:
    """Multi-head latent attention (MLA) of one layer, computed on the compressed keys and values.

    The up projections of keys and values are absorbed: they are applied to queries and outputs, so
    that all heads read the same compressed vectors. Source: DeepSeek-AI, "DeepSeek-V2" (2024),
    section 2.1.2.
    """

    def __init__(self, spec: LatentAttentionSpec, weights: Weights, hidden_size: int) -> None:
        """Read the weights from `weights`, which are those of the layer."""
        self.spec = spec
        num_heads, rank, rope_dim = spec.num_heads, spec.kv_lora_rank, spec.rope.dim
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
        self.scaling = AttentionScaling(spec.scale)

    def __call__(self, x: Tensor, context: ForwardContext, cache: LayerCache) -> Tensor:
        """Return the attention output [tokens, hidden] of x [tokens, hidden].

        Writes the compressed keys and values of the tokens to the cache.
        """
        spec, plan = self.spec, context.attention_plans[None]
        rope, angles = spec.rope, context.angles[spec.rope]
        compressed, key = self.kv_down_proj(x).split((spec.kv_lora_rank, rope.dim), dim=1)
        key = apply_rotary(key[:, None], angles, rope.is_interleaved)
        entry = torch.cat((self.kv_norm(compressed)[:, None], key), dim=-1)
        # The cache's values are the first elements of its keys.
        store(entry, cache[0], plan.slots)
        attended = paged_attention(self._queries(x, angles), *cache, plan, self.scaling)
        values = multiply_heads(attended, self.v_up_proj)
        return self.out_proj(values.flatten(1))

    def _queries(self, x: Tensor, angles: RotaryAngles) -> Tensor:
        """Return queries [tokens, heads, rank + rope_dim] for compressed and for rotary keys."""
        spec = self.spec
        if self.q_down_proj is not None:
            x = self.q_down_proj(x)
        if self.q_norm is not None:
            x = self.q_norm(x)
        query = self.q_proj(x).view(len(x), spec.num_heads, -1)
        nope, rotary = query.split((spec.nope_head_dim, spec.rope.dim), dim=-1)
        rank = spec.kv_lora_rank
        result = x.new_empty(*query.shape[:2], rank + spec.rope.dim)
        multiply_heads(nope, self.k_up_proj, out=result[..., :rank])
        result[..., rank:] = apply_rotary(rotary, angles, spec.rope.is_interleaved)
        return result


def head_shape(spec: AttentionSpec | LatentAttentionSpec) -> HeadShape:
    """Return the head sizes of an attention layer, by which the attention backend is selected."""
    entry = spec.kv_entry
    return HeadShape(entry.key_dim, entry.value_dim, entry.is_shared)


def _order_by_projection(num_heads: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Return the stored row of each query, then key, then value, of a weight stored by KV head."""
    group = num_heads // num_kv_heads
    rows = torch.arange((num_heads + 2 * num_kv_heads) * head_dim)
    rows = rows.view(num_kv_heads, group + 2, head_dim)
    parts = rows[:, :group], rows[:, group], rows[:, group + 1]
    return torch.cat([part.flatten() for part in parts])
