"""Attention backend for CPUs: calls the compiled kernel of attention.cpp.

The kernel reads the block tables of a plan itself, and a cache of the dtype of the queries or of
int8 in place.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gllm.kernels.attention_backends import AttentionRequirements, symmetric_reason
from gllm.kernels.attention_plan import (
    GATHERED_TOKENS,
    AttentionPlan,
    PagedBatch,
    find_oldest_visible,
)
from gllm.kernels.attention_scaling import AttentionScaling
from gllm.kernels.attention_window import AttentionWindow, encode_window
from gllm.kernels.fp8_cache import select_converted
from gllm.kernels.int8_cache import num_cached_elements
from gllm.kernels.native.builds import select_build
from gllm.kernels.native.library import MAX_SLOWDOWN, AttentionArguments, current_library

KEYS_PER_BLOCK = 128
"""Keys that the kernel computes at once, as in attention.cpp."""


def unsupported_reason(requirements: AttentionRequirements) -> str | None:
    """Explain why the compiled CPU backend cannot meet the requirements; None if it can.

    The text also says how to fix it.
    """
    if current_library() is None:
        return f"no compiled kernels are available ({select_build().reason}), or choose torch"
    return symmetric_reason(requirements)


def auto_skip_reason(requirements: AttentionRequirements) -> str | None:
    """Explain why `auto` prefers torch to the compiled CPU kernel; None if it does not.

    It prefers torch where a short benchmark measured the compiled kernel to be slower.
    """
    kernels = current_library()
    if kernels is None or kernels.is_preferred("attention", requirements.dtype):
        return None
    return f"takes more than {MAX_SLOWDOWN} times as long as torch here"


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    scaling: AttentionScaling,
) -> Tensor:
    """Compute causal attention over a paged KV cache with the compiled CPU kernel.

    A cache of another dtype than the query and int8 is converted block by block first, for some
    sequences at a time.

    Args:
        query: [tokens, heads, head_dim].
        key_cache: [blocks, block_size, kv_heads, head_dim].
        value_cache: [blocks, block_size, kv_heads, value_dim] of key_cache's dtype; of int8, both
            have entries of int8_cache.py.
        plan: attention metadata of the step; `plan.rows` is read.
        scaling: scale, softcap, ALiBi slopes and sinks of the scores.

    Returns:
        [tokens, heads, value_dim].
    """
    # A backend requested by name is used even if it was measured to be slower than torch.
    kernels = current_library()
    assert kernels is not None, "no compiled kernels: the plan was made for another backend"
    output = kernels.empty((*query.shape[:2], num_cached_elements(value_cache)), query.dtype)
    rows, window = plan.rows, plan.window
    if key_cache.dtype in (query.dtype, torch.int8):
        kernels(_arguments(output, query, key_cache, value_cache, rows, window, scaling))
        return output
    for part in _split_rows(rows, window):
        table, keys, values = _convert_blocks(part, key_cache, value_cache, query.dtype)
        converted = replace(part.rows, block_table=table)
        kernels(_arguments(output, query, keys, values, converted, window, scaling))
    return output


def _arguments(
    output: Tensor,
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    rows: PagedBatch,
    window: AttentionWindow,
    scaling: AttentionScaling,
) -> AttentionArguments:
    """Return the kernel's arguments for the sequences of `rows`."""
    return AttentionArguments(
        *(output, query, key_cache, value_cache),
        *(table.ctypes.data for table in (rows.block_table, rows.query_start, rows.context_len)),
        scaling.alibi_slopes,
        *(len(rows.context_len), rows.block_table.shape[1], rows.block_size),
        *(query.shape[1], key_cache.shape[2]),
        *(num_cached_elements(key_cache), num_cached_elements(value_cache)),
        *(query.stride(0), key_cache.stride(1), value_cache.stride(1), encode_window(window)),
        *(scaling.scale, scaling.softcap or 0, query.dtype, key_cache.dtype == torch.int8),
        sinks=scaling.sinks,
    )


@dataclass(frozen=True, slots=True)
class _Part:
    """Some consecutive sequences of a batch, and the blocks that the kernel reads of them."""

    rows: PagedBatch
    is_read: npt.NDArray[np.bool_]
    """[rows, blocks]: True for the entries of the block table that are read."""


def _split_rows(rows: PagedBatch, window: AttentionWindow) -> Iterator[_Part]:
    """Yield the sequences of a batch in parts of at most GATHERED_TOKENS tokens, or single ones."""
    oldest = find_oldest_visible(rows.context_len - np.diff(rows.query_start), window)
    # The kernel begins at a multiple of its block of keys.
    first = oldest // KEYS_PER_BLOCK * KEYS_PER_BLOCK // rows.block_size
    columns = np.arange(rows.block_table.shape[1])
    last = -(-rows.context_len // rows.block_size)
    is_read = (columns >= first[:, None]) & (columns < last[:, None])
    tokens = is_read.sum(axis=1) * rows.block_size
    begin = 0
    while begin < len(tokens):
        end = begin + 1
        while end < len(tokens) and tokens[begin : end + 1].sum() <= GATHERED_TOKENS:
            end += 1
        part = slice(begin, end)
        table, starts = rows.block_table[part], rows.query_start[begin : end + 1]
        kept = replace(
            rows, block_table=table, query_start=starts, context_len=rows.context_len[part]
        )
        yield _Part(kept, is_read[part])
        begin = end


def _convert_blocks(
    part: _Part, key_cache: Tensor, value_cache: Tensor, dtype: torch.dtype
) -> tuple[npt.NDArray[np.int64], Tensor, Tensor]:
    """Return the part's block table for copies of its blocks in `dtype`, keys and values."""
    blocks = torch.from_numpy(part.rows.block_table[part.is_read])
    table = np.zeros_like(part.rows.block_table)
    table[part.is_read] = np.arange(len(blocks))
    keys = select_converted(key_cache, blocks, dtype)
    if key_cache.data_ptr() == value_cache.data_ptr():
        return table, keys, keys[..., : value_cache.shape[3]]
    return table, keys, select_converted(value_cache, blocks, dtype)
