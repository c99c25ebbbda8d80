"""Online softmax of one tile of queries over the pages of a KV cache, for decodes and prefill.

Row m of a tile is query head m % HEADS of token m // HEADS: all heads share a KV head, so that even
a single token makes a matrix. Scores are in units of log2, because there is an instruction for 2^x.
Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), algorithm 3; Dao
et al., "FlashAttention" (2022), algorithm 1; Kwon et al., "PagedAttention" (2023), section 4.1.
"""

import triton
import triton.language as tl

from gllm.kernels.triton.common import dot

LOWEST = tl.constexpr(-1e30)
"""Finite value below all scores; -inf marks masked scores, and differences are never NaN."""


@triton.jit
def load_elements(pointers, there, SIZE: tl.constexpr, PAD: tl.constexpr, MASKED: tl.constexpr):
    """Load SIZE elements from each of pointers [rows] into [rows, PAD], padded with zeros.

    MASKED: rows whose mask `there` [rows] is false become zero; otherwise all rows are loaded.
    Triton device function.
    """
    columns = tl.arange(0, PAD)
    addresses = pointers[:, None] + columns[None, :]
    if MASKED:
        if SIZE < PAD:
            loaded = tl.load(addresses, mask=there[:, None] & (columns < SIZE)[None, :], other=0.0)
        else:
            loaded = tl.load(addresses, mask=there[:, None], other=0.0)
    else:
        if SIZE < PAD:
            loaded = tl.load(addresses, mask=(columns < SIZE)[None, :], other=0.0)
        else:
            loaded = tl.load(addresses)
    return loaded


@triton.jit
def load_slopes(slopes, heads, there, ALIBI: tl.constexpr):
    """Load the ALiBi slope of each row's head, [ROWS] float32, for scores in units of log2.

    Triton device function.
    """
    if ALIBI:
        loaded = tl.load(slopes + heads, mask=there, other=0.0) * 1.4426950408889634
    else:
        loaded = tl.zeros(heads.shape, dtype=tl.float32)
    return loaded


@triton.jit
def initial_statistics(sinks, heads, there, split, SINKS: tl.constexpr):
    """Return the highest score and the total weight of each row before any key, both [ROWS].

    With SINKS each row begins with the sink of its head, a score without a value, in the first
    split of its context. Triton device function.
    """
    highest = tl.full(heads.shape, LOWEST, dtype=tl.float32)
    total = tl.zeros(heads.shape, dtype=tl.float32)
    if SINKS:
        sink = tl.load(sinks + heads, mask=there, other=0.0) * 1.4426950408889634
        highest = tl.where(split == 0, sink, highest)
        total += tl.where(split == 0, 1.0, 0.0)
    return highest, total


@triton.jit
def oldest_visible(position, WINDOW: tl.constexpr):
    """Return the first position that the query at a position, or at each of several, sees.

    WINDOW: visible tokens; below 0: tokens of a chunk, of which all from its start on are visible;
    not 0. Triton device function.
    """
    if WINDOW < 0:
        return position // -WINDOW * -WINDOW
    return tl.maximum(position - WINDOW + 1, 0)


@triton.jit
def load_block_ids(table, start, oldest, end, KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    """Load the KV block id of each position start .. start + KEYS - 1, [KEYS] int32.

    table: block ids of the sequence; positions outside of oldest .. end - 1 give 0. Triton device
    function.
    """
    tokens = start + tl.arange(0, KEYS)
    return tl.load(table + tokens // BLOCK_SIZE, (tokens >= oldest) & (tokens < end), 0)


@triton.jit
def attend(
    query, rest, positions, slopes, highest, total, output,
    keys, values, table, begin, end, oldest, inner, outer, key_row, value_row,
    KEYS: tl.constexpr, BLOCK_SIZE: tl.constexpr, MAIN: tl.constexpr, MAIN_PAD: tl.constexpr,
    REST: tl.constexpr, REST_PAD: tl.constexpr, VALUE: tl.constexpr, VALUE_PAD: tl.constexpr,
    SHARED: tl.constexpr, SOFTCAP: tl.constexpr, ALIBI: tl.constexpr, WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
):  # fmt: skip
    """Update the online softmax of a tile of queries with the keys at positions begin .. end - 1.

    The state is the highest score and total weight [ROWS] and the weighted sum of values, output
    [ROWS, VALUE_PAD], all float32. A score s becomes s * inner, or with SOFTCAP outer * tanh(ln 2 /
    2 * s * inner). No key before `oldest` is read. Triton device function.

    Tensors: query [ROWS, MAIN_PAD], rest [ROWS, REST_PAD] (unused if REST is 0), positions and
    slopes [ROWS]; keys and values point to the KV head in slot 0, key_row and value_row elements
    per slot; table: block ids of the sequence.

    Constants, in elements of a head: MAIN: key elements in the first tile (all, or for latent
    attention those shared with the values); REST: further key elements; VALUE: value elements;
    *_PAD: the next power of two, at least 16. KEYS: keys per tile. BLOCK_SIZE: tokens per cache
    block. SHARED: values are the first tile of the keys. WINDOW: as in oldest_visible, 0 if all
    tokens are visible. MASKED: False if all queries see all keys, whose number is a multiple of
    KEYS.
    """
    blocks = load_block_ids(table, begin, oldest, end, KEYS, BLOCK_SIZE)
    for start in range(begin, end, KEYS):
        tokens = start + tl.arange(0, KEYS)
        there = (tokens >= oldest) & (tokens < end)
        slots = blocks.to(tl.int64) * BLOCK_SIZE + tokens % BLOCK_SIZE
        # One tile ahead: Triton prefetches keys and values of later tiles only where their
        # addresses do not wait for a load of the same iteration.
        blocks = load_block_ids(table, start + KEYS, oldest, end, KEYS, BLOCK_SIZE)
        key_at = keys + slots * key_row
        key = load_elements(key_at, there, MAIN, MAIN_PAD, MASKED).to(query.dtype)
        score = tl.zeros([query.shape[0], KEYS], dtype=tl.float32)
        score = dot(query, tl.trans(key), score)
        if REST > 0:
            more = load_elements(key_at + MAIN, there, REST, REST_PAD, MASKED).to(query.dtype)
            score = dot(rest, tl.trans(more), score)
        score = score * inner
        if SOFTCAP:
            score = outer - 2 * outer / (tl.exp2(score) + 1)
        if ALIBI:
            distance = positions[:, None] - tokens[None, :]
            score = score - slopes[:, None] * distance.to(tl.float32)
        if MASKED:
            seen = there[None, :] & (tokens[None, :] <= positions[:, None])
            if WINDOW != 0:
                seen = seen & (tokens[None, :] >= oldest_visible(positions, WINDOW)[:, None])
            score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(highest, tl.max(score, axis=1))
        kept = tl.exp2(highest - higher)
        weights = tl.exp2(score - higher[:, None])
        total = total * kept + tl.sum(weights, axis=1)
        output = output * kept[:, None]
        if SHARED:
            value = key
        else:
            value_at = values + slots * value_row
            value = load_elements(value_at, there, VALUE, VALUE_PAD, MASKED).to(query.dtype)
        output = dot(weights.to(query.dtype), value, output)
        highest = higher
    return highest, total, output
