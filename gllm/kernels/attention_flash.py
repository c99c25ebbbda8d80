"""Paged attention by the flash-attn package (FlashAttention-2), where it is installed.

Owns how a plan becomes its arguments. Imports it when first used.

Its masks are aligned to the end of the keys, as chunks of a text are to their context; a window of
n tokens is (n - 1, 0) to it, tokens to the left and to the right of one's own. It replays: decodes
are told by tables on the device alone. FlashAttention-3 is another package with other arguments,
and would be a backend of its own.

Source: Dao, "FlashAttention-2" (2023); the package's docstrings of flash_attn_varlen_func and
flash_attn_with_kvcache, version 2.6.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from gllm.kernels.attention_backends import Wanted
from gllm.kernels.attention_plan import AttentionPlan, DeviceTables
from gllm.kernels.attention_scores import Scores

OLDEST = (2, 6)
"""The first version with all of what is passed."""
PAGE = 256
"""Tokens of a block: a multiple of this."""
LARGEST = 256
"""Elements of a head."""
OTHERWISE = "choose the backend triton"


def refusal(wanted: Wanted) -> str | None:
    """As attention_backends.refusal."""
    if wanted.capability < (8, 0):
        has = ".".join(map(str, wanted.capability))
        return f"needs a GPU of compute capability 8.0 or more, this one has {has}; {OTHERWISE}"
    if wanted.dtype not in (torch.float16, torch.bfloat16):
        return f"computes in bfloat16 and float16, not in {wanted.dtype}; choose another --dtype"
    if wanted.cached != wanted.dtype:
        return (
            f"reads a KV cache of the arithmetic's type, {wanted.dtype}, not {wanted.cached}; "
            f"choose --kv-cache-dtype auto, or {OTHERWISE}"
        )
    if wanted.block_size % PAGE:
        return (
            f"wants blocks of a multiple of {PAGE} tokens, not {wanted.block_size}; "
            f"choose --block-size {PAGE}, or {OTHERWISE}"
        )
    for shape in wanted.shapes:
        if shape.shared:
            return f"does not compute latent attention; {OTHERWISE}"
        if shape.key_dim != shape.value_dim or shape.key_dim % 8 or shape.key_dim > LARGEST:
            return (
                f"keys have {shape.key_dim} elements a head and values {shape.value_dim}, it takes "
                f"as many in both, a multiple of 8 up to {LARGEST}; {OTHERWISE}"
            )
    # Last, for it takes a while.
    try:
        version, _, _ = _package()
    except ImportError as error:
        return f"cannot be imported ({error}); pip install flash-attn, or {OTHERWISE}"
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return f"{version} is installed; pip install -U flash-attn, or {OTHERWISE}"
    return None


def _package() -> tuple[str, Callable[..., Tensor], Callable[..., Tensor]]:
    """Version, and what computes chunks and decodes. Raises ImportError."""
    from flash_attn import __version__, flash_attn_varlen_func, flash_attn_with_kvcache

    return __version__, flash_attn_varlen_func, flash_attn_with_kvcache


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan, scores: Scores
) -> Tensor:
    """As gllm.kernels.attention.paged_attention: query [tokens, heads, head_dim] of bfloat16 or
    float16, caches [blocks, block_size, kv_heads, head_dim] alike, the result
    [tokens, heads, head_dim]; plan.tables is needed."""
    _, attend_chunks, attend_decodes = _package()
    tables, rows = plan.tables, plan.rows
    assert tables is not None, "attention was not planned for tables"
    how: dict[str, Any] = {
        "softmax_scale": scores.scale,
        "causal": True,
        "window_size": (-1, -1) if plan.window is None else (plan.window - 1, 0),
        "softcap": scores.softcap or 0.0,
        "alibi_slopes": scores.slopes,
    }
    decodes, caches = rows.num_decodes, (key_cache, value_cache)
    parts = []
    if decodes:
        attended = attend_decodes(
            query[:decodes, None],
            *caches,
            cache_seqlens=tables.context_len[:decodes],
            block_table=tables.block_table[:decodes],
            **how,
        )
        parts.append(attended[:, 0])
    if len(rows.context_len) > decodes:
        begins, ends = _starts(tables, decodes)
        attended = attend_chunks(
            query[decodes:],
            *caches,
            cu_seqlens_q=begins,
            cu_seqlens_k=ends,
            max_seqlen_q=int(np.diff(rows.query_start[decodes:]).max()),
            max_seqlen_k=int(rows.context_len[decodes:].max()),
            block_table=tables.block_table[decodes:],
            **how,
        )
        parts.append(attended)
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _starts(tables: DeviceTables, decodes: int) -> tuple[Tensor, Tensor]:
    """Where the queries and the keys of each chunk would begin, were they one behind the other,
    [chunks + 1] int32 each."""
    # A decode is one token, so that the chunks' first is in row `decodes`.
    queries = tables.once("queries", lambda: tables.query_start[decodes:] - decodes)

    def summed() -> Tensor:
        ends = tables.context_len[decodes:].cumsum(0, dtype=torch.int32)
        return functional.pad(ends, (1, 0))

    return queries, tables.once("keys", summed)
