"""Paged attention of decodes for GPUs: rows of one token each, long contexts split.

Owns the split of a context over programs and how their results become one. Where launches come
from is in attention.py, the arithmetic in attention_tiles.py.

Source of the split: Dao et al., "Flash-Decoding for long-context inference" (2023).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from gllm.kernels.attention_plan import AttentionPlan
from gllm.kernels.triton import attention_shapes
from gllm.kernels.triton.ahead import Compiled
from gllm.kernels.triton.attention_shapes import DECODE, Shape
from gllm.kernels.triton.attention_tiles import LOWEST, attend, load_elements, load_slopes

REDUCED = 8
"""Parts of a context added up at once."""


def decode_attention(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    slopes: Tensor | None,
    plan: AttentionPlan,
    shape: Shape,
    factors: tuple[float, float],
) -> None:
    """Fill the decodes' rows of output [tokens, heads, value_dim] from query [tokens, heads,
    key_dim] and caches [blocks, block_size, kv_heads, elements]; slopes [heads], factors:
    `inner` and `outer` of attention_tiles.attend.

    Rows without context become zero.
    """
    tables, rows = plan.tables, plan.rows.num_decodes
    assert tables is not None, "attention was not planned for a device"
    tiles = attention_shapes.tiles_for(shape, DECODE)
    programs = shape.kv_heads * attention_shapes.packing(tiles, shape).parts
    longest = int(plan.rows.context_len[:rows].max())
    if shape.window is not None:
        longest = min(longest, shape.window)
    busy = attention_shapes.processors(query.device)
    splits = attention_shapes.splits_for(rows, programs, longest, busy)
    parts: tuple[Tensor | None, ...] = (None, None)
    if splits > 1:
        size = (rows, shape.heads, splits)
        parts = (
            torch.empty(*size, shape.value_dim, dtype=torch.float32, device=query.device),
            torch.empty(2, *size, dtype=torch.float32, device=query.device),
        )
    decode_kernel[(programs, splits, rows)](
        *(output, *parts, query, key_cache, value_cache, slopes),
        *(tables.block_table, tables.context_len, tables.block_table.stride(0)),
        *(*query.stride()[:2], *key_cache.stride()[1:3], *value_cache.stride()[1:3]),
        *factors,
        **attention_shapes.constants(tiles, shape),
        SPLIT=splits > 1,
        LEAST=attention_shapes.LEAST,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )
    if splits > 1:
        grid = (shape.heads, rows)
        reduce_kernel[grid](
            output, *parts, tables.context_len, splits, **_reduced(shape), num_warps=4
        )


def _reduced(shape: Shape) -> dict[str, int | bool]:
    """Constants of reduce_kernel."""
    common = attention_shapes.constants(attention_shapes.tiles_for(shape, DECODE), shape)
    chosen = {name: common[name] for name in ("KEYS", "WINDOW", "VALUE", "VALUE_PAD")}
    return {
        **chosen,
        "LEAST": attention_shapes.LEAST,
        "SPLITS": attention_shapes.SPLITS,
        "CHUNK": REDUCED,
    }


@triton.jit
def part_of(context, splits, KEYS: tl.constexpr, WINDOW: tl.constexpr, LEAST: tl.constexpr):
    """First position that is seen, the first of the first part, tokens of a part, parts that are
    used of `splits`; parts are whole tiles of KEYS."""
    oldest = 0
    if WINDOW > 0:
        oldest = tl.maximum(context - WINDOW, 0)
    first = oldest // KEYS * KEYS
    tiles = tl.cdiv(context - first, KEYS)
    part = tl.maximum(tl.cdiv(tiles, splits), (LEAST + KEYS - 1) // KEYS)
    return oldest, first, part * KEYS, tl.cdiv(tiles, part)


@triton.jit(do_not_specialize=["block_table", "context_len", "table_row"])
def decode_kernel(
    output,
    partial,
    statistics,
    query,
    keys,
    values,
    slopes,
    block_table,
    context_len,
    table_row,
    query_token,
    query_head,
    key_row,
    key_head,
    value_row,
    value_head,
    inner,
    outer,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MAIN: tl.constexpr,
    MAIN_PAD: tl.constexpr,
    REST: tl.constexpr,
    REST_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    SHARED: tl.constexpr,
    SOFTCAP: tl.constexpr,
    ALIBI: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLIT: tl.constexpr,
    LEAST: tl.constexpr,
):
    """One part of one decode's context: grid (kv_heads * PARTS, splits, decodes).

    With SPLIT it goes to partial [decodes, heads, splits, VALUE] and statistics [2, decodes, heads,
    splits], highest score and total weight, instead of output.
    """
    split = tl.program_id(1)
    row = tl.program_id(2)
    context = tl.load(context_len + row)
    oldest, first, part, used = part_of(context, tl.num_programs(1), KEYS, WINDOW, LEAST)
    if SPLIT:  # noqa: SIM102
        if split >= used:
            return
    begin = first + split * part
    end = tl.minimum(begin + part, context)
    kv_head = tl.program_id(0) // PARTS

    packed = tl.arange(0, ROWS)
    member = tl.program_id(0) % PARTS * HEADS + packed
    head = kv_head * GROUP + member
    there = (packed < HEADS) & (member < GROUP)
    # A decode is one token, and decodes come first: its row is its token's.
    query_at = query + row.to(tl.int64) * query_token + head * query_head
    queries = load_elements(query_at, there, MAIN, MAIN_PAD, True)
    rest = queries
    if REST > 0:
        rest = load_elements(query_at + MAIN, there, REST, REST_PAD, True)
    own_slopes = load_slopes(slopes, head, there, ALIBI)

    highest, total, attended = attend(
        queries,
        rest,
        tl.zeros([ROWS], dtype=tl.int32) + (context - 1),
        own_slopes,
        tl.full([ROWS], LOWEST, dtype=tl.float32),
        tl.zeros([ROWS], dtype=tl.float32),
        tl.zeros([ROWS, VALUE_PAD], dtype=tl.float32),
        keys + kv_head * key_head,
        values + kv_head * value_head,
        block_table + row.to(tl.int64) * table_row,
        *(begin, end, oldest, inner, outer, key_row, value_row),
        *(KEYS, BLOCK_SIZE, MAIN, MAIN_PAD, REST, REST_PAD, VALUE, VALUE_PAD),
        *(SHARED, SOFTCAP, ALIBI, WINDOW, True),
    )

    columns = tl.arange(0, VALUE_PAD)
    mask = there[:, None] & (columns < VALUE)[None, :]
    heads = tl.num_programs(0) // PARTS * GROUP
    at = row.to(tl.int64) * heads + head
    if SPLIT:
        at = at * tl.num_programs(1) + split
        tl.store(partial + at[:, None] * VALUE + columns[None, :], attended, mask=mask)
        tl.store(statistics + at, highest, mask=there)
        each = tl.num_programs(2).to(tl.int64) * heads * tl.num_programs(1)
        tl.store(statistics + each + at, total, mask=there)
    else:
        # Without context there is no weight.
        attended = attended / tl.where(total > 0, total, 1)[:, None]
        stored = attended.to(output.dtype.element_ty)
        tl.store(output + at[:, None] * VALUE + columns[None, :], stored, mask=mask)


@triton.jit(do_not_specialize=["context_len", "splits"])
def reduce_kernel(
    output,
    partial,
    statistics,
    context_len,
    splits,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    LEAST: tl.constexpr,
    SPLITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    """One head of one decode from the parts of its context: grid (heads, decodes). Types and shapes
    as of decode_kernel."""
    row = tl.program_id(1)
    _, _, _, used = part_of(tl.load(context_len + row), splits, KEYS, WINDOW, LEAST)
    at = row.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    each = tl.num_programs(1).to(tl.int64) * tl.num_programs(0) * splits
    own = statistics + at * splits
    every = tl.arange(0, SPLITS)
    highs = tl.load(own + every, mask=every < used, other=float("-inf"))
    highest = tl.maximum(tl.max(highs, axis=0), LOWEST)
    totals = tl.load(own + each + every, mask=every < used, other=0.0)
    total = tl.sum(totals * tl.exp2(highs - highest), axis=0)

    columns = tl.arange(0, VALUE_PAD)
    added = tl.zeros([VALUE_PAD], dtype=tl.float32)
    for begin in range(0, used, CHUNK):
        parts = begin + tl.arange(0, CHUNK)
        high = tl.load(own + parts, mask=parts < used, other=float("-inf"))
        part = tl.load(
            partial + (at * splits + parts)[:, None] * VALUE + columns[None, :],
            mask=(parts < used)[:, None] & (columns < VALUE)[None, :],
            other=0.0,
        )
        added += tl.sum(part * tl.exp2(high - highest)[:, None], axis=0)
    added = added / tl.where(total > 0, total, 1)
    stored = added.to(output.dtype.element_ty)
    tl.store(output + at * VALUE + columns, stored, mask=columns < VALUE)


PARTIAL = {"partial": "*fp32", "statistics": "*fp32"}
COMPILED = [
    *attention_shapes.compiled(
        *("decode", decode_kernel, DECODE, {}),
        {"partial": None, "statistics": None, "SPLIT": False, "LEAST": attention_shapes.LEAST},
    )[:1],
    *attention_shapes.compiled(
        *("split decode", decode_kernel, DECODE, PARTIAL),
        {"SPLIT": True, "LEAST": attention_shapes.LEAST},
    ),
    *(
        Compiled(
            f"reduction of splits, {label}",
            reduce_kernel,
            {"output": "*bf16", **PARTIAL, "context_len": "*i32", "splits": "i32"},
            _reduced(shape),
            aligned=("output", *PARTIAL),
        )
        for label, shape in attention_shapes.HEADS_OF.items()
    ),
]
