"""Attention over a paged KV cache, for one micro-batch of decodes and prefill chunks.

Owns how queries meet the cache: `plan_attention` turns block tables into gathers once for a step,
`store_kv` and `paged_attention` run once for each layer. Does not know models, requests and who
owns the blocks.

A cache tensor is [blocks, block_size, kv_heads, head_dim]; a *slot* is a token's place in it,
block * block_size + offset. The cache's last block is never written and stays zero: gathers of
padding go there, so that nothing (a NaN of another sequence, say) leaks through a masked position.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

Ints = npt.NDArray[np.int64]

GATHERED_TOKENS = 8192
"""Cached tokens gathered at once for decodes: a few MB, so that they are read back from cache."""
PADDED_SHARE = 0.25
"""Most padding in a group of decodes."""
QUERY_SLICE = 256
"""Prefill queries computed at once: a slice does not look at keys behind its own end."""


@dataclass(frozen=True, slots=True)
class DecodeGroup:
    """Decodes of similar context length, attended in one operation."""

    rows: Tensor
    """[group] int64, token rows."""
    slots: Tensor
    """[group * context] int64, padded to the longest context of the group."""
    bias: Tensor
    """[group, 1, 1, context] of the compute dtype: 0, or -inf at padding."""


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive tokens of one sequence."""

    first: int
    """Token row of its first token."""
    tokens: int
    slots: Tensor
    """[context] int64: all tokens up to and with the chunk's last one."""


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """What all layers of a step share."""

    slots: Tensor
    """[tokens] int64: where each token's key and value are stored."""
    decodes: list[DecodeGroup]
    chunks: list[PrefillChunk]
    causal: Tensor
    """[queries, queries - 1 + keys] of the compute dtype, for the longest slice and context: 0 on
    and below the diagonal that starts at [0, keys - 1], -inf above. The mask of any slice is a
    window of it."""


def plan_attention(
    block_table: Ints,
    query_start: Ints,
    context_len: Ints,
    num_decodes: int,
    block_size: int,
    num_blocks: int,
    dtype: torch.dtype,
) -> AttentionPlan:
    """The gathers and masks of a step.

    block_table [rows, blocks]: block ids, padding arbitrary; query_start [rows + 1]: first token
    row of each row; context_len [rows]: tokens in the cache, this step's included; the first
    `num_decodes` rows have one token each; `num_blocks`: usable blocks, the zero block excluded.
    """
    tokens = np.diff(query_start)
    spread = np.repeat(np.arange(len(tokens)), tokens)
    positions = np.arange(len(spread)) + (context_len - query_start[1:])[spread]
    written = block_table[spread, positions // block_size] * block_size + positions % block_size
    longest = np.arange(int(context_len.max(initial=0)))
    groups = []
    for rows in _group_decodes(context_len[:num_decodes]):
        context = longest[: context_len[rows].max()]
        slots = block_table[rows][:, context // block_size] * block_size + context % block_size
        padding = context >= context_len[rows][:, None]
        slots[padding] = num_blocks * block_size
        groups.append(_decode_group(rows, slots, padding, dtype))
    chunks = []
    for row in range(num_decodes, len(tokens)):
        context = longest[: context_len[row]]
        slots = block_table[row, context // block_size] * block_size + context % block_size
        first = int(query_start[row])
        chunks.append(PrefillChunk(first, int(tokens[row]), torch.from_numpy(slots)))
    causal = _causal_template(tokens[num_decodes:], context_len[num_decodes:], dtype)
    return AttentionPlan(torch.from_numpy(written), groups, chunks, causal)


def _decode_group(
    rows: Ints, slots: Ints, padding: npt.NDArray[np.bool_], dtype: torch.dtype
) -> DecodeGroup:
    bias = torch.zeros(padding.shape, dtype=dtype)
    bias.masked_fill_(torch.from_numpy(padding), -math.inf)
    flat = torch.from_numpy(slots.reshape(-1))
    return DecodeGroup(torch.from_numpy(rows), flat, bias[:, None, None])


def _causal_template(tokens: Ints, context_len: Ints, dtype: torch.dtype) -> Tensor:
    """`AttentionPlan.causal` for chunks of so many tokens and so much context, both [chunks]."""
    keys = int(context_len.max(initial=1))
    queries = min(int(tokens.max(initial=1)), QUERY_SLICE)
    return torch.full((queries, queries - 1 + keys), -math.inf, dtype=dtype).triu_(keys)


def _group_decodes(context_len: Ints) -> Iterator[Ints]:
    """Rows of decodes in groups that neither gather nor pad too much; each row in one of them."""
    order = np.argsort(-context_len, kind="stable")
    lengths = context_len[order]
    begin = 0
    while begin < len(order):
        fits = max(GATHERED_TOKENS // int(lengths[begin]), 1)
        alike = int((lengths[begin:] >= lengths[begin] * (1 - PADDED_SHARE)).sum())
        end = begin + min(fits, alike)
        yield order[begin:end]
        begin = end


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Write key and value [tokens, kv_heads, head_dim] to their slots [tokens] of the cache."""
    key_cache.flatten(0, 1).index_copy_(0, slots, key)
    value_cache.flatten(0, 1).index_copy_(0, slots, value)


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan
) -> Tensor:
    """Causal attention of query [tokens, heads, head_dim] over the cache; the result is alike.

    The step's keys and values have to be stored before. Scores are scaled by head_dim^-1/2; query
    head h belongs to KV head h // (heads / kv_heads). Source: Vaswani et al., "Attention Is All
    You Need" (2017), equation 1; Ainslie et al., "GQA" (2023).
    """
    keys, values = key_cache.flatten(0, 1), value_cache.flatten(0, 1)
    tokens, heads, head_dim = query.shape
    grouped = query.view(tokens, keys.shape[1], -1, head_dim)
    output = torch.empty_like(grouped)
    for group in plan.decodes:
        output.index_copy_(0, group.rows, _decode(grouped, keys, values, group))
    for chunk in plan.chunks:
        _prefill(grouped, keys, values, chunk, plan.causal, output)
    return output.view(tokens, heads, head_dim)


def _decode(query: Tensor, keys: Tensor, values: Tensor, group: DecodeGroup) -> Tensor:
    """[group, kv_heads, queries, head_dim]: the queries that share a KV head as one matrix."""
    shape = (len(group.rows), -1, *keys.shape[1:])
    key = keys.index_select(0, group.slots).view(shape).transpose(1, 2)
    value = values.index_select(0, group.slots).view(shape).transpose(1, 2)
    rows = query.index_select(0, group.rows)
    return scaled_dot_product_attention(rows, key, value, attn_mask=group.bias)


def _prefill(
    query: Tensor, keys: Tensor, values: Tensor, chunk: PrefillChunk, causal: Tensor, output: Tensor
) -> None:
    """Fill the chunk's rows of output [tokens, kv_heads, queries, head_dim], slice by slice."""
    queries = query.shape[2]
    # [kv_heads, queries, context, head_dim], expanded without a copy.
    key = keys.index_select(0, chunk.slots).transpose(0, 1)[:, None].expand(-1, queries, -1, -1)
    value = values.index_select(0, chunk.slots).transpose(0, 1)[:, None].expand(-1, queries, -1, -1)
    widest = causal.shape[1] - causal.shape[0] + 1
    cached = len(chunk.slots) - chunk.tokens
    for begin in range(0, chunk.tokens, QUERY_SLICE):
        end = min(begin + QUERY_SLICE, chunk.tokens)
        visible = cached + end
        shift = widest - 1 - (cached + begin)
        rows = slice(chunk.first + begin, chunk.first + end)
        attended = scaled_dot_product_attention(
            query[rows].permute(1, 2, 0, 3),
            key[:, :, :visible],
            value[:, :, :visible],
            attn_mask=causal[: end - begin, shift : shift + visible],
        )
        output[rows] = attended.permute(2, 0, 1, 3)
