"""Attention backend for GPUs that calls the flash-attn package (FlashAttention-2), if installed.

The package is imported on first use. Its causal mask is aligned to the last key, which is what a
prefill chunk needs. A window of n tokens is its window_size (n - 1, 0): keys to the left and to the
right of the query. Decodes can be captured in a graph, because they are described by tables on the
device alone. FlashAttention-3 is another package with other arguments and not supported.

Source: Dao, "FlashAttention-2" (2023); the package's docstrings of flash_attn_varlen_func and
flash_attn_with_kvcache, version 2.6.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.attention_backends import AttentionRequirements, symmetric_reason
from gllm.kernels.attention_plan import AttentionPlan, DeviceBlockTables
from gllm.kernels.attention_scaling import AttentionScaling

MIN_VERSION = (2, 6)
"""First version (major, minor) that supports all arguments used here."""
PAGE_TOKENS = 256
"""block_size must be a multiple of this many tokens."""
MAX_HEAD_DIM = 256
"""Largest number of elements per head."""
USE_TRITON = "choose the backend triton"


def unsupported_reason(requirements: AttentionRequirements) -> str | None:
    """Explain why flash-attn cannot meet the requirements and how to fix it; None if it can."""
    if requirements.capability < (8, 0):
        has = ".".join(map(str, requirements.capability))
        return f"needs a GPU of compute capability 8.0 or more, this one has {has}; {USE_TRITON}"
    if requirements.dtype not in (torch.float16, torch.bfloat16):
        return (
            f"computes in bfloat16 and float16, not in {requirements.dtype}; choose another --dtype"
        )
    if requirements.cache_dtype != requirements.dtype:
        return (
            f"needs a KV cache of the dtype of the queries, {requirements.dtype}, "
            f"not {requirements.cache_dtype}; "
            f"choose --kv-cache-dtype auto, or {USE_TRITON}"
        )
    if requirements.block_size % PAGE_TOKENS:
        return (
            f"needs a block size that is a multiple of {PAGE_TOKENS} tokens, "
            f"not {requirements.block_size}; "
            f"choose --block-size {PAGE_TOKENS}, or {USE_TRITON}"
        )
    if (reason := symmetric_reason(requirements)) is not None:
        return reason
    for shape in requirements.shapes:
        if shape.shared:
            return f"does not compute latent attention; {USE_TRITON}"
        if shape.has_sinks:
            return f"does not compute attention sinks; {USE_TRITON}"
        if shape.has_chunks:
            return f"does not compute attention in chunks; {USE_TRITON}"
        if shape.key_dim != shape.value_dim or shape.key_dim % 8 or shape.key_dim > MAX_HEAD_DIM:
            return (
                f"keys have {shape.key_dim} elements per head and values {shape.value_dim}; needs "
                f"the same in both, a multiple of 8 up to {MAX_HEAD_DIM}; {USE_TRITON}"
            )
    # Last, because the import takes seconds.
    try:
        version, _, _ = _package()
    except ImportError as error:
        return f"cannot be imported ({error}); pip install flash-attn, or {USE_TRITON}"
    if tuple(int(part) for part in version.split(".")[:2]) < MIN_VERSION:
        return f"{version} is installed; pip install -U flash-attn, or {USE_TRITON}"
    return None


def _package() -> tuple[str, Callable[..., Tensor], Callable[..., Tensor]]:
    """Return the version and the functions for chunks and for decodes. Raises ImportError."""
    from flash_attn import __version__, flash_attn_varlen_func, flash_attn_with_kvcache

    return __version__, flash_attn_varlen_func, flash_attn_with_kvcache


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    scaling: AttentionScaling,
) -> Tensor:
    """Compute causal attention over a paged KV cache with flash-attn.

    Args:
        query: [tokens, heads, head_dim], bfloat16 or float16.
        key_cache: [blocks, block_size, kv_heads, head_dim] of the dtype of query.
        value_cache: like key_cache.
        plan: attention metadata of the step; `plan.tables` is read.
        scaling: scale, softcap and ALiBi slopes of the scores.

    Returns:
        [tokens, heads, head_dim].
    """
    _, attend_chunks, attend_decodes = _package()
    tables, rows = plan.tables, plan.rows
    assert tables is not None, "the plan has no tables: it was made for another backend"
    assert plan.window is None or isinstance(plan.window, int), "refused by unsupported_reason"
    options: dict[str, Any] = {
        "softmax_scale": scaling.scale,
        "causal": True,
        "window_size": (-1, -1) if plan.window is None else (plan.window - 1, 0),
        "softcap": scaling.softcap or 0.0,
        "alibi_slopes": scaling.alibi_slopes,
    }
    decodes, caches = rows.num_decodes, (key_cache, value_cache)
    parts = []
    if decodes:
        attended = attend_decodes(
            query[:decodes, None],
            *caches,
            cache_seqlens=tables.context_len[:decodes],
            block_table=tables.block_table[:decodes],
            **options,
        )
        parts.append(attended[:, 0])
    if len(rows.context_len) > decodes:
        query_start, key_start = _chunk_starts(tables, decodes)
        attended = attend_chunks(
            query[decodes:],
            *caches,
            cu_seqlens_q=query_start,
            cu_seqlens_k=key_start,
            max_seqlen_q=int(np.diff(rows.query_start[decodes:]).max()),
            max_seqlen_k=int(rows.context_len[decodes:].max()),
            block_table=tables.block_table[decodes:],
            **options,
        )
        parts.append(attended)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _chunk_starts(tables: DeviceBlockTables, decodes: int) -> tuple[Tensor, Tensor]:
    """Return cumulative numbers of queries and of keys of the chunks, each [chunks + 1] int32."""
    # A decode is one token, so the first token of the chunks is in row `decodes`.
    queries = tables.get_or_compute("queries", lambda: tables.query_start[decodes:] - decodes)

    def cumulative_keys() -> Tensor:
        ends = tables.context_len[decodes:].cumsum(0, dtype=torch.int32)
        return functional.pad(ends, (1, 0))

    return queries, tables.get_or_compute("keys", cumulative_keys)
