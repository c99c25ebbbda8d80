"""Attention backend in Triton for mixed micro-batches, and the kernel for prefill chunks.

The kernel for decodes is in decode_attention.py, the online softmax in attention_tiles.py.
"""

import math

import triton
import triton.language as tl
from torch import Tensor

from gllm.kernels.attention_backends import AttentionRequirements, symmetric_reason
from gllm.kernels.attention_plan import AttentionPlan
from gllm.kernels.attention_scaling import AttentionScaling
from gllm.kernels.attention_window import max_visible
from gllm.kernels.triton import attention_shapes
from gllm.kernels.triton.attention_shapes import (
    DEFAULT_SPLIT_LIMITS,
    MIN_PREFILL_SPLIT_TOKENS,
    AttentionShape,
    SplitLimits,
)
from gllm.kernels.triton.attention_tiles import (
    attend,
    initial_statistics,
    load_elements,
    load_slopes,
    oldest_visible,
)
from gllm.kernels.triton.decode_attention import decode_attention
from gllm.kernels.triton.split_attention import (
    PARTIAL,
    allocate_split_results,
    combine_splits,
    split_range,
    store_split,
)


def unsupported_reason(requirements: AttentionRequirements) -> str | None:
    """Explain why the Triton kernels cannot meet the requirements; None if they can."""
    return symmetric_reason(requirements)


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    scaling: AttentionScaling,
    limits: SplitLimits = DEFAULT_SPLIT_LIMITS,
) -> Tensor:
    """Compute causal attention over a paged KV cache with Triton kernels.

    Slots of the cache must be evenly spaced and the elements of a head adjacent. Values that are a
    view of the first elements of the keys are read once. A launch of decodes alone can be captured
    in a graph and replayed for the same number of decodes: it reads only plan.tables, and plan.rows
    only selects the number of splits.

    Args:
        query: [tokens, heads, head_dim], bfloat16, float16 or float32.
        key_cache: [blocks, block_size, kv_heads, head_dim] of one of these dtypes or float8_e4m3fn.
        value_cache: [blocks, block_size, kv_heads, value_dim], likewise.
        plan: `plan.tables` is read.
        scaling: scale, softcap, slopes and sinks of the scores.
        limits: limits for splitting contexts.

    Returns:
        [tokens, heads, value_dim].
    """
    tokens, heads, _ = query.shape
    output = query.new_empty(tokens, heads, value_cache.shape[3])
    slopes, sinks = scaling.alibi_slopes, scaling.sinks
    features = scaling.softcap is not None, slopes is not None, sinks is not None, plan.window
    shape = attention_shapes.describe_shape(query, key_cache, value_cache, features)
    tensors = (output, query, key_cache, value_cache, slopes, sinks)
    factors = _factors(scaling)
    if plan.rows.num_decodes:
        decode_attention(*tensors, plan, shape, factors, limits)
    if len(plan.rows.context_len) > plan.rows.num_decodes:
        _prefill(*tensors, plan, shape, factors, limits)
    return output


def _factors(scaling: AttentionScaling) -> tuple[float, float]:
    """Return the factors `inner` and `outer` of attention_tiles.attend."""
    if scaling.softcap is None:
        return scaling.scale * math.log2(math.e), 0.0
    # tanh(x) = 1 - 2 / (2^(2 x log2 e) + 1).
    return scaling.scale / scaling.softcap * 2 * math.log2(math.e), scaling.softcap * math.log2(
        math.e
    )


def _prefill(
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
    """Compute the prefill chunks' rows of output [tokens, heads, value_dim]."""
    tables, rows = plan.tables, plan.rows
    assert tables is not None, "attention was not planned for a device"
    tiles = attention_shapes.choose_attention_tiles(shape, "prefill")
    packed = attention_shapes.pack_queries(tiles, shape)
    listed = tables.get_prefill_tiles(rows, packed.tokens)
    programs = shape.kv_heads * packed.parts
    longest = int(rows.context_len[rows.num_decodes :].max())
    if (most := max_visible(shape.window)) is not None:
        longest = min(longest, most + packed.tokens)
    busy = limits.num_processors(query.device)
    splits = attention_shapes.prefill_splits(
        len(listed) * programs, longest, busy, limits.min_prefill_tokens
    )
    # Each decode is one token, and they come first.
    own = output[rows.num_decodes :]
    parts = allocate_split_results(len(own), splits, shape, query.device)
    prefill_kernel[(len(listed), programs, splits)](
        output,
        *parts,
        query,
        key_cache,
        value_cache,
        slopes,
        sinks,
        listed,
        tables.block_table,
        tables.query_start,
        tables.context_len,
        rows.num_decodes,
        len(own),
        tables.block_table.stride(0),
        *query.stride()[:2],
        *key_cache.stride()[1:3],
        *value_cache.stride()[1:3],
        *factors,
        **attention_shapes.attention_constants(tiles, shape),
        SPLIT=splits > 1,
        LEAST=limits.min_prefill_tokens,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    combine_splits(own, parts, shape)


@triton.jit
def packed_rows(
    first, count,
    ROWS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return the token, the query head and the validity of each row of a query tile, each [ROWS].

    A row of a tile is one query head of one token. The token is relative to the chunk of `count`
    tokens; the tile starts at token `first`. Triton device function.
    """
    packed = first * HEADS + tl.arange(0, ROWS)
    token = packed // HEADS
    member = tl.program_id(1) % PARTS * HEADS + packed % HEADS
    there = (token < first + ROWS // HEADS) & (token < count) & (member < GROUP)
    return token, tl.program_id(1) // PARTS * GROUP + member, there


OTHERS = {"tiles": "*i32", "query_start": "*i32", "skipped": "i32", "tokens": "i32"}
"""Types of the arguments that only this kernel has."""


@triton.jit(do_not_specialize=[*OTHERS, "block_table", "context_len", "table_row"])
def prefill_kernel(
    output, partial, statistics, query, keys, values, slopes, sinks, tiles, block_table,
    query_start, context_len, skipped, tokens, table_row, query_token, query_head, key_row,
    key_head, value_row, value_head, inner, outer,
    ROWS: tl.constexpr, KEYS: tl.constexpr, GROUP: tl.constexpr, HEADS: tl.constexpr,
    PARTS: tl.constexpr, BLOCK_SIZE: tl.constexpr, MAIN: tl.constexpr, MAIN_PAD: tl.constexpr,
    REST: tl.constexpr, REST_PAD: tl.constexpr, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr,
    SHARED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, SINKS: tl.constexpr,
    WINDOW: tl.constexpr, SPLIT: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Compute attention of one tile of prefill queries over one split of its context (Triton).

    Grid: (tiles, kv_heads * PARTS, splits). tiles [tiles, 2] int32 are those of
    attention_plan.list_prefill_tiles, for ROWS // HEADS tokens per tile. If SPLIT, partial results
    go to `partial` and `statistics` (split_attention.SplitResults for the `tokens` tokens after the
    first `skipped` ones), else results go to `output`. query_token to value_head are strides in
    elements between tokens (or cached tokens) and between heads. attention_tiles.attend describes
    the constants.
    """
    TOKENS: tl.constexpr = ROWS // HEADS
    row = tl.load(tiles + 2 * tl.program_id(0))
    first = tl.load(tiles + 2 * tl.program_id(0) + 1)
    kv_head = tl.program_id(1) // PARTS
    start = tl.load(query_start + row)
    count = tl.load(query_start + row + 1) - start
    context = tl.load(context_len + row)

    token, head, there = packed_rows(first, count, ROWS, GROUP, HEADS, PARTS)
    query_at = query + (start + token).to(tl.int64) * query_token + head * query_head
    queries = load_elements(query_at, there, MAIN, MAIN_PAD, True)
    rest = queries
    if REST > 0:
        rest = load_elements(query_at + MAIN, there, REST, REST_PAD, True)
    own_slopes = load_slopes(slopes, head, there, ALIBI)
    positions = context - count + token

    highest, total = initial_statistics(sinks, head, there, tl.program_id(2), SINKS)
    attended = tl.zeros([ROWS, VALUE_PAD], dtype=tl.float32)
    keys += kv_head * key_head
    values += kv_head * value_head
    table = block_table + row.to(tl.int64) * table_row
    nearest = context - count + first
    end = tl.minimum(nearest + TOKENS, context)
    oldest = 0
    if WINDOW != 0:
        oldest = oldest_visible(nearest, WINDOW)
    begin = oldest // KEYS * KEYS
    if SPLIT:
        begin, end = split_range(begin, end, tl.program_id(2), tl.num_programs(2), KEYS, LEAST)
    seen = begin
    if WINDOW == 0:
        # The first token, and so every one, sees all keys before `seen`: they need no mask.
        seen = tl.minimum((nearest + 1) // KEYS * KEYS, end)
    for is_masked in tl.static_range(WINDOW != 0, 2):
        highest, total, attended = attend(
            queries, rest, positions, own_slopes, highest, total, attended, keys, values, table,
            begin, end if is_masked else seen, oldest, inner, outer, key_row, value_row,
            KEYS, BLOCK_SIZE, MAIN, MAIN_PAD, REST, REST_PAD, VALUE, VALUE_PAD,
            SHARED, SOFTCAP, ALIBI, WINDOW, is_masked,
        )  # fmt: skip
        begin = tl.maximum(begin, seen)

    # Read again, lest where rows are stored be kept in registers while keys are visited.
    first = tl.load(tiles + 2 * tl.program_id(0) + 1, volatile=True)
    token, head, there = packed_rows(first, count, ROWS, GROUP, HEADS, PARTS)
    heads = tl.num_programs(1) // PARTS * GROUP
    if SPLIT:
        num_partials = tokens.to(tl.int64) * heads * tl.num_programs(2)
        at = ((start + token - skipped).to(tl.int64) * heads + head) * tl.num_programs(2)
        at += tl.program_id(2)
        store_split(
            partial, statistics, at, there, num_partials, highest, total, attended, VALUE, VALUE_PAD
        )
    else:
        # Rows without a token have no weight; they are not stored.
        attended = attended * (1 / tl.where(total > 0, total, 1))[:, None]
        columns = tl.arange(0, VALUE_PAD)
        at = output + ((start + token).to(tl.int64) * heads + head) * VALUE
        tl.store(
            at[:, None] + columns[None, :],
            attended.to(output.dtype.element_ty),
            mask=there[:, None] & (columns < VALUE)[None, :],
        )


KERNEL_SPECS = [
    *attention_shapes.list_specs(
        "prefill",
        prefill_kernel,
        "prefill",
        OTHERS,
        {**dict.fromkeys(PARTIAL), "SPLIT": False, "LEAST": MIN_PREFILL_SPLIT_TOKENS},
    ),
    *attention_shapes.list_specs(
        "split prefill",
        prefill_kernel,
        "prefill",
        {**OTHERS, **PARTIAL},
        {"SPLIT": True, "LEAST": MIN_PREFILL_SPLIT_TOKENS},
    ),
]
