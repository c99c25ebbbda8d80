"""Attention backend in torch: the reference for all other backends, on any device.

It gathers keys and values by index tensors that the plan made on the host, so its work cannot be
captured in a graph for other steps. The cache may have any dtype: gathered elements are
converted to the dtype of the queries.
"""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gllm.kernels.attention_plan import QUERY_SLICE, AttentionPlan, DecodeGroup, PrefillChunk
from gllm.kernels.attention_scaling import AttentionScaling
from gllm.kernels.int8_cache import dequantize_entries, num_cached_elements


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    scaling: AttentionScaling,
) -> Tensor:
    """Compute causal attention over a paged KV cache with torch operations.

    Keys and values are gathered from the cache first.

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
    keys, values = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
    grouped = query.view(tokens, keys.shape[1], heads // keys.shape[1], head_dim)
    by_head = output.view(*grouped.shape[:3], value_dim)
    for group in plan.gathers.decodes:
        by_head.index_copy_(0, group.rows, _decode(grouped, keys, values, group, scaling))
    for chunk in plan.gathers.chunks:
        _prefill(grouped, keys, values, chunk, plan, scaling, by_head)
    return output


def _gather(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows `slots` of cache [all slots, kv_heads, entry], converted to dtype."""
    if cache.dtype == torch.float8_e4m3fn:
        # As bytes: torch cannot index FP8 tensors.
        codes = cache.view(torch.uint8).index_select(0, slots)
        return codes.view(cache.dtype).to(dtype)
    if cache.dtype == torch.int8:
        return dequantize_entries(cache.index_select(0, slots), dtype)
    return cache.index_select(0, slots).to(dtype)


def _decode(
    query: Tensor, keys: Tensor, values: Tensor, group: DecodeGroup, scaling: AttentionScaling
) -> Tensor:
    """Return [group, kv_heads, queries, value_dim] for the decodes of a group.

    The queries that share a KV head form one matrix.
    """
    shape = (len(group.rows), -1)
    key = _gather(keys, group.slots, query.dtype).unflatten(0, shape).transpose(1, 2)
    value = _gather(values, group.slots, query.dtype).unflatten(0, shape).transpose(1, 2)
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
        _gather(cache, chunk.slots, query.dtype)
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
