"""Attention over a paged KV cache, for one micro-batch of decodes and prefill chunks.

Owns how queries meet the cache; `attention_plan.py` says where they look. `store_kv` and
`paged_attention` run once for each layer. Does not know models and requests.

A cache tensor is [blocks, block_size, kv_heads, head_dim].
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gllm.kernels.attention_plan import QUERY_SLICE, AttentionPlan, DecodeGroup, PrefillChunk
from gllm.kernels.native.library import AttentionArguments, native, pointer


@dataclass(frozen=True, slots=True)
class Scores:
    """How scores come from queries and keys."""

    scale: float
    softcap: float | None = None
    """A scaled score s becomes softcap * tanh(s / softcap)."""
    slopes: Tensor | None = None
    """[heads] float32: what each token of distance takes off a score (ALiBi)."""


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Write key and value [tokens, kv_heads, head_dim] to their slots [tokens] of the cache.

    Numbers beyond the range of a cache in FP8 (E4M3) become its largest.
    """
    for new, cache in ((key, key_cache), (value, value_cache)):
        flat = cache.flatten(0, 1)
        if cache.dtype == torch.float8_e4m3fn:
            limit = torch.finfo(cache.dtype).max
            codes = new.to(torch.float32).clamp(-limit, limit).to(cache.dtype)
            # As bytes: torch does not index FP8.
            flat.view(torch.uint8).index_copy_(0, slots, codes.view(torch.uint8))
        else:
            flat.index_copy_(0, slots, new.to(cache.dtype))


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan, scores: Scores
) -> Tensor:
    """Causal attention of query [tokens, heads, head_dim] over the cache; the result is
    [tokens, heads, value_dim].

    The step's keys and values have to be stored before. Query head h belongs to KV head
    h // (heads / kv_heads). Source: Vaswani et al., "Attention Is All You Need" (2017), equation 1;
    Ainslie et al., "GQA" (2023); softcap: Gemma Team, "Gemma 2" (2024), section 2.
    """
    if query.is_cuda:
        from gllm.kernels.triton import attention

        return attention.paged_attention(query, key_cache, value_cache, plan, scores)
    tokens, heads, head_dim = query.shape
    shape = (tokens, heads, value_cache.shape[3])
    if plan.gathers is None:
        return _native(shape, query, key_cache, value_cache, plan, scores)
    output = query.new_empty(shape)
    keys, values = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
    grouped = query.view(tokens, keys.shape[1], -1, head_dim)
    by_head = output.view(*grouped.shape[:3], -1)
    for group in plan.gathers.decodes:
        by_head.index_copy_(0, group.rows, _decode(grouped, keys, values, group, scores))
    for chunk in plan.gathers.chunks:
        _prefill(grouped, keys, values, chunk, plan, scores, by_head)
    return output


def _native(
    shape: tuple[int, ...],
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    plan: AttentionPlan,
    scores: Scores,
) -> Tensor:
    """The output, of this shape, through the compiled kernel."""
    library, rows = native(query), plan.rows
    assert library is not None, "attention was planned for compiled kernels"
    output = library.empty(shape, query.dtype)
    library(
        AttentionArguments(
            *(pointer(tensor) for tensor in (output, query, keys, values)),
            *(
                table.ctypes.data
                for table in (rows.block_table, rows.query_start, rows.context_len)
            ),
            pointer(scores.slopes),
            *(len(rows.context_len), rows.block_table.shape[1], rows.block_size),
            *(query.shape[1], keys.shape[2], keys.shape[3], values.shape[3]),
            *(query.stride(0), keys.stride(1), values.stride(1), plan.window or 0),
            *(scores.scale, scores.softcap or 0),
            *(query.dtype == torch.bfloat16, torch.get_num_threads()),
        )
    )
    return output


def _decode(
    query: Tensor, keys: Tensor, values: Tensor, group: DecodeGroup, scores: Scores
) -> Tensor:
    """[group, kv_heads, queries, value_dim]: the queries that share a KV head as one matrix."""
    shape = (len(group.rows), -1)
    key = keys.index_select(0, group.slots).unflatten(0, shape).transpose(1, 2)
    value = values.index_select(0, group.slots).unflatten(0, shape).transpose(1, 2)
    rows = query.index_select(0, group.rows)
    bias = group.bias
    if scores.slopes is not None:
        distance = torch.arange(key.shape[2]) - (group.lengths[:, None] - 1)
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
    # [kv_heads, queries, context, head_dim], expanded without a copy.
    key = keys.index_select(0, chunk.slots).transpose(0, 1)[:, None].expand(-1, queries, -1, -1)
    value = values.index_select(0, chunk.slots).transpose(0, 1)[:, None].expand(-1, queries, -1, -1)
    widest = causal.shape[1] - causal.shape[0] + 1
    cached = len(chunk.slots) - chunk.tokens
    for begin in range(0, chunk.tokens, QUERY_SLICE):
        end = min(begin + QUERY_SLICE, chunk.tokens)
        visible = cached + end
        oldest = 0 if plan.window is None else max(cached + begin - plan.window + 1, 0)
        shift = widest - 1 - (cached + begin)
        mask = causal[: end - begin, shift + oldest : shift + visible]
        if scores.slopes is not None:
            own = torch.arange(cached + begin, cached + end)
            distance = torch.arange(oldest, visible) - own[:, None]
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
    if scores.softcap is None:
        return scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scores.scale)
    raw = (query @ key.transpose(-1, -2)).to(torch.float32) * scores.scale
    capped = scores.softcap * torch.tanh(raw / scores.softcap) + mask
    return capped.softmax(dim=-1).to(value.dtype) @ value
