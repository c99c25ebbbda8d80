"""Self-attention with its weights: grouped queries, and multi-head latent attention.

Owns the way from the residual stream to queries, keys and values and back. The arithmetic is in
gllm/kernels. Does not know layers around it.
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
from gllm.kernels.qkv import rotate_and_store
from gllm.kernels.qkv_layout import QKVLayout
from gllm.kernels.rotary import RotaryAngles, apply_rotary
from gllm.models import spec
from gllm.models.loader import Weights
from gllm.models.parts import Linear, Norm, norm_of, parts_of

LayerCache = tuple[Tensor, Tensor]
"""Keys and values of a layer, each [blocks, block_size, kv_heads, elements]."""


@dataclass(frozen=True, slots=True)
class Step:
    """What the layers of a stage share in a step."""

    plans: Mapping[int | None, AttentionPlan]
    """By window."""
    angles: Mapping[spec.Rope, RotaryAngles]


class Attention:
    """Self-attention with grouped queries."""

    def __init__(self, described: spec.Attention, weights: Weights, hidden: int) -> None:
        self.spec = described
        heads, kv_heads, dim = described.heads, described.kv_heads, described.head_dim
        outputs = [heads * dim, kv_heads * dim, kv_heads * dim]
        order = _ungrouped(heads, kv_heads, dim) if described.grouped_rows else None
        self.qkv = Linear(described.qkv, weights, outputs, hidden, order)
        self.out = Linear(described.out, weights, [hidden], heads * dim)
        each = described.norm_by_head
        query_norm = norm_of(described.query_norm, weights, *[heads] * each, dim)
        key_norm = norm_of(described.key_norm, weights, *[kv_heads] * each, dim)
        self.norms: tuple[Norm, Norm] | None = None
        interleaved = described.rope is not None and described.rope.interleaved
        self.how = QKVLayout(heads, kv_heads, interleaved)
        if query_norm is not None and key_norm is not None:
            if query_norm.kind == "rms" and not each:
                scales = query_norm.weight, key_norm.weight
                self.how = QKVLayout(heads, kv_heads, interleaved, *scales, query_norm.eps)
            else:
                self.norms = query_norm, key_norm
        slopes = None if described.alibi is None else compute_alibi_slopes(heads) * described.alibi
        self.scores = AttentionScaling(described.scale, described.softcap, slopes)

    def __call__(self, x: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """x [tokens, hidden]; the result is alike. Writes the tokens' keys and values to cache."""
        described = self.spec
        fused = self.qkv(x).view(len(x), -1, described.head_dim)
        if self.norms is not None:
            begin = 0
            for norm, count in zip(self.norms, (described.heads, described.kv_heads), strict=True):
                fused[:, begin : begin + count] = norm(fused[:, begin : begin + count])
                begin += count
        plan = step.plans[described.window]
        angles = None if described.rope is None else step.angles[described.rope]
        query = rotate_and_store(fused, self.how, angles, cache, plan.slots)
        attended = paged_attention(query, *cache, plan, self.scores)
        return self.out(attended.flatten(1))


class LatentAttention:
    """Multi-head latent attention, computed on the compressed keys and values.

    The maps that would decompress them are applied to queries and results instead, so that all
    heads read the same short vectors. Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.2.
    """

    def __init__(self, described: spec.LatentAttention, weights: Weights, hidden: int) -> None:
        self.spec = described
        heads, rank, rope = described.heads, described.rank, described.rope.dim
        query = heads * (described.plain_dim + rope)
        self.query_down: Linear | None = None
        if described.query_down is not None:
            self.query_down = Linear(described.query_down, weights, [described.query_rank], hidden)
        self.query_norm = norm_of(described.query_norm, weights, described.query_rank)
        self.query = Linear(described.query, weights, [query], described.query_rank)
        self.kv_down = Linear(described.kv_down, weights, [rank + rope], hidden)
        self.kv_norm = Norm(described.kv_norm, weights, rank)
        ups = [heads * (described.plain_dim + described.value_dim)]
        by_head = torch.cat(parts_of(described.kv_up, weights, ups, rank)).view(heads, -1, rank)
        parts = by_head.split((described.plain_dim, described.value_dim), dim=1)
        self.key_up, self.value_up = (part.contiguous() for part in parts)
        self.out = Linear(described.out, weights, [hidden], heads * described.value_dim)
        self.scores = AttentionScaling(described.scale)

    def __call__(self, x: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """x [tokens, hidden]; the result is alike. Writes the tokens' latents to cache."""
        described, plan = self.spec, step.plans[None]
        rope, angles = described.rope, step.angles[described.rope]
        latent, key = self.kv_down(x).split((described.rank, rope.dim), dim=1)
        key = apply_rotary(key[:, None], angles, rope.interleaved)
        latent = torch.cat((self.kv_norm(latent)[:, None], key), dim=-1)
        # The cache's values are a part of its keys.
        store(latent, cache[0], plan.slots)
        attended = paged_attention(self._queries(x, angles), *cache, plan, self.scores)
        # [heads, tokens, rank] times [heads, rank, value_dim].
        values = attended.transpose(0, 1) @ self.value_up.transpose(1, 2)
        return self.out(values.transpose(0, 1).flatten(1))

    def _queries(self, x: Tensor, angles: RotaryAngles) -> Tensor:
        """[tokens, heads, rank + rope]: against latents, then against rotated keys."""
        described = self.spec
        if self.query_down is not None:
            x = self.query_down(x)
        if self.query_norm is not None:
            x = self.query_norm(x)
        fused = self.query(x).view(len(x), described.heads, -1)
        plain, turned = fused.split((described.plain_dim, described.rope.dim), dim=-1)
        against = (plain.transpose(0, 1) @ self.key_up).transpose(0, 1)
        turned = apply_rotary(turned, angles, described.rope.interleaved)
        return torch.cat((against, turned), dim=-1)


def head_shape(described: spec.Attention | spec.LatentAttention) -> HeadShape:
    """What kernels have to know of a layer's heads before they are chosen."""
    cached = described.cached
    return HeadShape(cached.key, cached.value, cached.shared)


def _ungrouped(heads: int, kv_heads: int, dim: int) -> Tensor:
    """Rows of all queries, then keys, then values, of a tensor stored KV head by KV head."""
    group = heads // kv_heads
    rows = torch.arange((heads + 2 * kv_heads) * dim).view(kv_heads, group + 2, dim)
    parts = rows[:, :group], rows[:, group], rows[:, group + 1]
    return torch.cat([part.flatten() for part in parts])
