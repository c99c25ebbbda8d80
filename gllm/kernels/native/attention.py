"""Paged attention by the compiled kernel for CPUs.

Owns how its arguments come from tensors. The kernel (attention.cpp) reads block tables itself.
"""

import torch
from torch import Tensor

from gllm.kernels.attention import Scores
from gllm.kernels.attention_backends import Wanted
from gllm.kernels.attention_plan import AttentionPlan
from gllm.kernels.native.builds import select
from gllm.kernels.native.library import (
    DTYPES,
    SLOWER,
    AttentionArguments,
    library,
    override,
    pointer,
)


def refusal(wanted: Wanted) -> str | None:
    """As attention_backends.refusal."""
    if library() is None:
        return f"there are no compiled kernels here ({select().reason}), or choose torch"
    if wanted.cached != wanted.dtype:
        return (
            f"reads a KV cache of the arithmetic's type, {wanted.dtype}, not {wanted.cached}; "
            "choose --kv-cache-dtype auto or the backend torch"
        )
    return None


def auto_refusal(wanted: Wanted) -> str | None:
    """As attention_backends.auto_refusal."""
    kernels = library()
    if kernels is None or kernels.serves("attention", wanted.dtype):
        return None
    return f"takes more than {SLOWER} times as long as torch here"


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan, scores: Scores
) -> Tensor:
    """As gllm.kernels.attention.paged_attention: query [tokens, heads, head_dim], caches
    [blocks, block_size, kv_heads, elements] of the same type, the result
    [tokens, heads, value_dim]."""
    # A backend that was requested by name computes although it may be slower.
    kernels, rows = override.get() or library(), plan.rows
    assert kernels is not None, "attention was planned for compiled kernels"
    output = kernels.empty((*query.shape[:2], value_cache.shape[3]), query.dtype)
    kernels(
        AttentionArguments(
            *(pointer(tensor) for tensor in (output, query, key_cache, value_cache)),
            *(
                table.ctypes.data
                for table in (rows.block_table, rows.query_start, rows.context_len)
            ),
            pointer(scores.slopes),
            *(len(rows.context_len), rows.block_table.shape[1], rows.block_size),
            *(query.shape[1], *key_cache.shape[2:], value_cache.shape[3]),
            *(query.stride(0), key_cache.stride(1), value_cache.stride(1), plan.window or 0),
            *(scores.scale, scores.softcap or 0),
            *(DTYPES[query.dtype], torch.get_num_threads()),
        )
    )
    return output
