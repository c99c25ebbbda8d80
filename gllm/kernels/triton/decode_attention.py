"""Paged attention of decodes for GPUs: one query token per row, long contexts are split.

The launch is called by attention.py; the online softmax is in attention_tiles.py, the reduction of
splits in split_attention.py.
"""

import numpy as np
import triton
import triton.language as tl
from torch import Tensor

from gllm.kernels.attention_plan import AttentionPlan
from gllm.kernels.attention_window import max_visible
from gllm.kernels.triton import attention_shapes
from gllm.kernels.triton.attention_shapes import (
    MIN_DECODE_SPLIT_TOKENS,
    AttentionShape,
    SplitLimits,
)
from gllm.kernels.triton.attention_tiles import (
    LOWEST,
    attend,
    initial_statistics,
    load_elements,
    load_slopes,
    oldest_visible,
)
from gllm.kernels.triton.split_attention import (
    PARTIAL,
    allocate_split_results,
    combine_splits,
    split_range,
    store_split,
)


def decode_attention(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slopes: Tensor | None,
    sinks: Tensor | None,
    plan: AttentionPlan,
    shape: AttentionShape,
    factors: tuple[float, float],
    limits: SplitLimits,
) -> None:
    """Compute paged attention for the decode tokens of a step, writing to `output`.

    Tokens without context become zero.

    Rows without context become zero.

    Args:
        output: [tokens, heads, value_dim].
        query: [tokens, heads, key_dim].
        key_cache: [blocks, block_size, kv_heads, key_dim].
        value_cache: [blocks, block_size, kv_heads, value_dim].
        slopes: [heads] float32, or None.
        sinks: [heads] float32, or None.
        plan: `plan.tables` is read; `plan.rows` selects the number of splits.
        shape: Constants of the kernel.
        factors: `inner` and `outer` of attention_tiles.attend.
        limits: limits for splitting contexts.
    """
    tables, rows = plan.tables, plan.rows.num_decodes
    assert tables is not None, "attention was not planned for a device"
    tiles = attention_shapes.choose_attention_tiles(shape, "decode")
    programs = shape.kv_heads * attention_shapes.pack_queries(tiles, shape).parts
    contexts = plan.rows.context_len[:rows]
    if (most := max_visible(shape.window)) is not None:
        contexts = np.minimum(contexts, most)
    busy = limits.num_processors(query.device)
    splits = attention_shapes.decode_splits(contexts, programs, busy, limits.min_decode_tokens)
    parts = allocate_split_results(rows, splits, shape, query.device)
    decode_kernel[(programs, splits, rows)](
        output,
        *parts,
        query,
        key_cache,
        value_cache,
        slopes,
        sinks,
        tables.block_table,
        tables.context_len,
        tables.block_table.stride(0),
        *query.stride()[:2],
        *key_cache.stride()[1:3],
        *value_cache.stride()[1:3],
        *factors,
        **attention_shapes.attention_constants(tiles, shape),
        SPLIT=splits > 1,
        LEAST=limits.min_decode_tokens,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    combine_splits(output, parts, shape)


@triton.jit
def split_index(row, head, split, GROUP: tl.constexpr, PARTS: tl.constexpr):
    """Return the index of each row's partial result in [decodes, heads, splits], as [ROWS].

    Triton device function.
    """
    heads = tl.num_programs(0) // PARTS * GROUP
    return (row.to(tl.int64) * heads + head) * tl.num_programs(1) + split


@triton.jit(do_not_specialize=["block_table", "context_len", "table_row"])
def decode_kernel(
    output, partial, statistics, query, keys, values, slopes, sinks, block_table, context_len,
    table_row, query_token, query_head, key_row, key_head, value_row, value_head, inner, outer,
    ROWS: tl.constexpr, KEYS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_SIZE: tl.constexpr, MAIN: tl.constexpr, MAIN_PAD: tl.constexpr,
    REST: tl.constexpr, REST_PAD: tl.constexpr, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr,
    SHARED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Compute attention of one decode over one split of its context (Triton).

    Grid: (kv_heads * PARTS, splits, decodes). If SPLIT, partial results go to `partial` and
    `statistics` (split_attention.SplitResults), else results go to `output`. attention_tiles.attend
    describes the constants.
    """
    split = tl.program_id(1)
    row = tl.program_id(2)
    context = tl.load(context_len + row)
    oldest = 0
    if WINDOW != 0:
        oldest = oldest_visible(tl.maximum(context - 1, 0), WINDOW)
    kv_head = tl.program_id(0) // PARTS

    packed = tl.arange(0, ROWS)
    member = tl.program_id(0) % PARTS * HEADS + packed
    head = kv_head * GROUP + member
    there = (packed < HEADS) & (member < GROUP)
    begin = oldest // KEYS * KEYS
    end = context
    if SPLIT:
        begin, end = split_range(begin, context, split, tl.num_programs(1), KEYS, LEAST)
        if begin >= end:
            at = split_index(row, head, split, GROUP, PARTS)
            tl.store(statistics + at, tl.full([ROWS], LOWEST, dtype=tl.float32), mask=there)
            return
    # A decode is one token, and decodes come first: its row is its token's.
    query_at = query + row.to(tl.int64) * query_token + head * query_head
    queries = load_elements(query_at, there, MAIN, MAIN_PAD, True)
    rest = queries
    if REST > 0:
        rest = load_elements(query_at + MAIN, there, REST, REST_PAD, True)
    own_slopes = load_slopes(slopes, head, there, ALIBI)
    highest, total = initial_statistics(sinks, head, there, split, SINKS)

    highest, total, attended = attend(
        queries, rest, tl.zeros([ROWS], dtype=tl.int32) + (context - 1), own_slopes,
        highest, total,
        tl.zeros([ROWS, VALUE_PAD], dtype=tl.float32),
        keys + kv_head * key_head, values + kv_head * value_head,
        block_table + row.to(tl.int64) * table_row,
        begin, end, oldest, inner, outer, key_row, value_row,
        KEYS, BLOCK_SIZE, MAIN, MAIN_PAD, REST, REST_PAD, VALUE, VALUE_PAD,
        SHARED, SOFTCAP, ALIBI, WINDOW, True,
    )  # fmt: skip

    heads = tl.num_programs(0) // PARTS * GROUP
    at = split_index(row, head, split, GROUP, PARTS)
    if SPLIT:
        num_partials = tl.num_programs(2).to(tl.int64) * heads * tl.num_programs(1)
        store_split(
            partial, statistics, at, there, num_partials, highest, total, attended, VALUE, VALUE_PAD
        )
    else:
        columns = tl.arange(0, VALUE_PAD)
        mask = there[:, None] & (columns < VALUE)[None, :]
        # Without context there is no weight.
        attended = attended / tl.where(total > 0, total, 1)[:, None]
        stored = attended.to(output.dtype.element_ty)
        tl.store(output + at[:, None] * VALUE + columns[None, :], stored, mask=mask)


KERNEL_SPECS = [
    *attention_shapes.list_specs(
        "decode",
        decode_kernel,
        "decode",
        {},
        {**dict.fromkeys(PARTIAL), "SPLIT": False, "LEAST": MIN_DECODE_SPLIT_TOKENS},
    )[:1],
    *attention_shapes.list_specs(
        "split decode",
        decode_kernel,
        "decode",
        PARTIAL,
        {"SPLIT": True, "LEAST": MIN_DECODE_SPLIT_TOKENS},
    ),
]
