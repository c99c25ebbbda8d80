"""Paged attention by torch: the reference for all other backends, on any device.

Owns how gathered keys and values meet queries. It gathers what a plan on the host listed, so what
it does for a step can be replayed for no other. Any type of cache is read: it is converted to the
queries' once gathered.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gllm.kernels.attention_plan import QUERY_SLICE, AttentionPlan, DecodeGroup, PrefillChunk
from gllm.kernels.attention_scores import Scores


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan, scores: Scores
) -> Tensor:
    """As gllm.kernels.attention.paged_attention: query [tokens, heads, head_dim], caches
    [blocks, block_size, kv_heads, elements], the result [tokens, heads, value_dim]; plan.gathers is
    needed."""
    assert plan.gathers is not None, "attention was not planned for gathers"
    tokens, heads, head_dim = query.shape
    output = query.new_empty(tokens, heads, value_cache.shape[3])
    keys, values = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
    grouped = query.view(tokens, keys.shape[1], -1, head_dim)
    by_head = output.view(*grouped.shape[:3], -1)
    for group in plan.gathers.decodes:
        by_head.index_copy_(0, group.rows, _decode(grouped, keys, values, group, scores))
    for chunk in plan.gathers.chunks:
        _prefill(grouped, keys, values, chunk, plan, scores, by_head)
    return output


def _gathered(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """[slots, kv_heads, elements] of cache [all slots, kv_heads, elements], in this dtype."""
    if cache.dtype == torch.float8_e4m3fn:
        # As bytes: torch does not index FP8.
        found = cache.view(torch.uint8).index_select(0, slots)
        return found.view(cache.dtype).to(dtype)
    return cache.index_select(0, slots).to(dtype)


def _decode(
    query: Tensor, keys: Tensor, values: Tensor, group: DecodeGroup, scores: Scores
) -> Tensor:
    """[group, kv_heads, queries, value_dim]: the queries that share a KV head as one matrix."""
    shape = (len(group.rows), -1)
    key = _gathered(keys, group.slots, query.dtype).unflatten(0, shape).transpose(1, 2)
    value = _gathered(values, group.slots, query.dtype).unflatten(0, shape).transpose(1, 2)
    rows = query.index_select(0, group.rows)
    bias = group.bias
    if scores.slopes is not None:
        every = torch.arange(key.shape[2], device=key.device)
        distance = every - (group.lengths[:, None] - 1)
        slopes = scores.slopes.view(1, *query.shape[1:3], 1)
        bias = bias + (slopes * distance[:, None, None]).to(bias.dtype)
    return _attend(rows, key, value, bias, scores)


def _prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    chunk: PrefillChunk,
    plan: AttentionPlan,
    scores: Scores,
    output: Tensor,
) -> None:
    """Fill the chunk's rows of output [tokens, kv_heads, queries, value_dim], slice by slice."""
    assert plan.gathers is not None
    causal = plan.gathers.causal
    heads, queries = query.shape[1:3]
    # [kv_heads, queries, context, elements], expanded without a copy.
    key, value = (
        _gathered(cache, chunk.slots, query.dtype)
        .transpose(0, 1)[:, None]
        .expand(-1, queries, -1, -1)
        for cache in (keys, values)
    )
    widest = causal.shape[1] - causal.shape[0] + 1
    cached = len(chunk.slots) - chunk.tokens
    for begin in range(0, chunk.tokens, QUERY_SLICE):
        end = min(begin + QUERY_SLICE, chunk.tokens)
        visible = cached + end
        oldest = 0 if plan.window is None else max(cached + begin - plan.window + 1, 0)
        shift = widest - 1 - (cached + begin)
        mask = causal[: end - begin, shift + oldest : shift + visible]
        if scores.slopes is not None:
            own = torch.arange(cached + begin, cached + end, device=key.device)
            distance = torch.arange(oldest, visible, device=key.device) - own[:, None]
            mask = mask + (scores.slopes.view(heads, queries, 1, 1) * distance).to(mask.dtype)
        rows = slice(chunk.first + begin, chunk.first + end)
        attended = _attend(
            query[rows].permute(1, 2, 0, 3),
            key[:, :, oldest:visible],
            value[:, :, oldest:visible],
            mask,
            scores,
        )
        output[rows] = attended.permute(2, 0, 1, 3)


def _attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scores: Scores) -> Tensor:
    """softmax(scores(query key^T) + mask) value over the last two dimensions."""
    # Torch's kernels for GPUs ask for masks that begin at aligned addresses; parts of one do not.
    if scores.softcap is None and query.is_cpu:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scores.scale)
    raw = (query @ key.transpose(-1, -2)).to(torch.float32) * scores.scale
    if scores.softcap is not None:
        raw = scores.softcap * torch.tanh(raw / scores.softcap)
    return (raw + mask).softmax(dim=-1).to(value.dtype) @ value
