"""Attention backend in torch: the reference for all other backends, on any device.

It gathers keys and values by index tensors that the plan made on the host, so its work cannot be
captured in a graph for other steps. The cache may have any dtype: gathered elements are
converted to the dtype of the queries.
"""

import math

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gllm.kernels.attention_plan import QUERY_SLICE, AttentionPlan, DecodeGroup, PrefillChunk
from gllm.kernels.attention_scaling import AttentionScaling
from gllm.kernels.attention_window import SymmetricWindow
from gllm.kernels.int8_cache import num_cached_elements
from gllm.kernels.paged_rows import gather_rows


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    scaling: AttentionScaling,
) -> Tensor:
    """Compute causal attention over a paged KV cache with torch operations.

    Keys and values are gathered from the cache first. With a symmetric window the attention is not
    causal.

    Args:
        query: [tokens, heads, head_dim].
        key_cache: [blocks, block_size, kv_heads, head_dim].
        value_cache: [blocks, block_size, kv_heads, value_dim].
        plan: attention metadata of the step; `plan.gathers` is read.
        scaling: scale, softcap, ALiBi slopes and sinks of the scores.

    Returns:
        [tokens, heads, value_dim].
    """
    assert plan.gathers is not None, "the plan has no gathers: it was made for another backend"
    tokens, heads, head_dim = query.shape
    value_dim = num_cached_elements(value_cache)
    output = query.new_empty(tokens, heads, value_dim)
    kv_heads = key_cache.shape[2]
    grouped = query.view(tokens, kv_heads, heads // kv_heads, head_dim)
    by_head = output.view(*grouped.shape[:3], value_dim)
    for group in plan.gathers.decodes:
        by_head.index_copy_(0, group.rows, _decode(grouped, key_cache, value_cache, group, scaling))
    for chunk in plan.gathers.chunks:
        _prefill(grouped, key_cache, value_cache, chunk, plan, scaling, by_head)
    return output


def _decode(
    query: Tensor, keys: Tensor, values: Tensor, group: DecodeGroup, scaling: AttentionScaling
) -> Tensor:
    """Return [group, kv_heads, queries, value_dim] for the decodes of a group.

    The queries that share a KV head form one matrix.
    """
    shape = (len(group.rows), -1)
    key = gather_rows(keys, group.slots, query.dtype).unflatten(0, shape).transpose(1, 2)
    value = gather_rows(values, group.slots, query.dtype).unflatten(0, shape).transpose(1, 2)
    rows = query.index_select(0, group.rows)
    bias = group.bias
    if scaling.alibi_slopes is not None:
        columns = torch.arange(key.shape[2], device=key.device)
        distance = columns - (group.lengths[:, None] - 1)
        slopes = scaling.alibi_slopes.view(1, *query.shape[1:3], 1)
        bias = bias + (slopes * distance[:, None, None]).to(bias.dtype)
    # The queries of a KV head are the rows of a matrix.
    sinks = None if scaling.sinks is None else scaling.sinks.view(*query.shape[1:3], 1)
    return _attend(rows, key, value, bias, scaling, sinks)


def _prefill(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    chunk: PrefillChunk,
    plan: AttentionPlan,
    scaling: AttentionScaling,
    output: Tensor,
) -> None:
    """Fill the rows of a chunk in output [tokens, kv_heads, queries, value_dim] by slices."""
    assert plan.gathers is not None
    causal = plan.gathers.causal
    heads, queries = query.shape[1:3]
    # [kv_heads, queries, context, elements], expanded without a copy.
    key, value = (
        gather_rows(cache, chunk.slots, query.dtype)
        .transpose(0, 1)[:, None]
        .expand(-1, queries, -1, -1)
        for cache in (keys, values)
    )
    widest = causal.shape[1] - causal.shape[0] + 1
    cached = len(chunk.slots) - chunk.tokens
    for begin in range(0, chunk.tokens, QUERY_SLICE):
        end = min(begin + QUERY_SLICE, chunk.tokens)
        visible = cached + end
        # Chunks of attention are divided in the plan.
        window = plan.window if isinstance(plan.window, int) else visible
        oldest = max(cached + begin - window + 1, 0)
        shift = widest - 1 - (cached + begin)
        mask = causal[: end - begin, shift + oldest : shift + visible]
        if isinstance(plan.window, SymmetricWindow):
            oldest, visible = 0, len(chunk.slots)
            mask = _symmetric_mask(range(cached + begin, cached + end), visible, plan.window, mask)
        if scaling.alibi_slopes is not None:
            own = torch.arange(cached + begin, cached + end, device=key.device)
            distance = torch.arange(oldest, visible, device=key.device) - own[:, None]
            mask = mask + (scaling.alibi_slopes.view(heads, queries, 1, 1) * distance).to(
                mask.dtype
            )
        rows = slice(chunk.first + begin, chunk.first + end)
        attended = _attend(
            query[rows].permute(1, 2, 0, 3),
            key[:, :, oldest:visible],
            value[:, :, oldest:visible],
            mask,
            scaling,
            None if scaling.sinks is None else scaling.sinks.view(heads, queries, 1, 1),
        )
        output[rows] = attended.permute(2, 0, 1, 3)


def _symmetric_mask(queries: range, num_keys: int, window: SymmetricWindow, like: Tensor) -> Tensor:
    """Return a mask [queries, keys] without causality: 0 within the window, -inf elsewhere.

    Args:
        queries: positions of the queries among the keys.
        num_keys: number of keys.
        window: attention window of the layer.
        like: a tensor of the mask's dtype and device.
    """
    mask = like.new_zeros(len(queries), num_keys)
    if window.size is not None:
        own = torch.arange(queries.start, queries.stop, device=like.device)
        distance = (torch.arange(num_keys, device=like.device) - own[:, None]).abs()
        mask.masked_fill_(distance >= window.size, -math.inf)
    return mask


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scaling: AttentionScaling,
    sinks: Tensor | None,
) -> Tensor:
    """Return softmax(scaling(query key^T) + mask) value over the last two dimensions.

    sinks: scores of a further key without a value, which can be expanded to [..., queries, 1].
    """
    # The GPU kernels of torch need masks at aligned addresses, which slices of a mask are not.
    if scaling.softcap is None and sinks is None and query.is_cpu:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scaling.scale)
    raw = (query @ key.transpose(-1, -2)).to(torch.float32) * scaling.scale
    if scaling.softcap is not None:
        raw = scaling.softcap * torch.tanh(raw / scaling.softcap)
    scores = raw + mask
    if sinks is not None:
        scores = torch.cat((scores, sinks.expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[-2]]
    return weights.to(value.dtype) @ value
