"""Paged attention by the compiled kernel for CPUs.

Owns how its arguments come from tensors. The kernel (attention.cpp) reads block tables itself.
"""

import torch
from torch import Tensor

from gllm.kernels.attention import Scores
from gllm.kernels.attention_backends import Wanted
from gllm.kernels.attention_plan import AttentionPlan
from gllm.kernels.native.library import DTYPES, AttentionArguments, native, pointer


def refusal(wanted: Wanted) -> str | None:
    """As attention_backends.refusal."""
    if wanted.dtype not in (torch.float32, torch.bfloat16):
        return f"computes in float32 and bfloat16, not in {wanted.dtype}; choose another --dtype"
    if native(torch.empty(0, dtype=wanted.dtype)) is None:
        return "was not compiled; install a C++ compiler and set gllm up again, or choose torch"
    if wanted.cached != wanted.dtype:
        return (
            f"reads a KV cache of the arithmetic's type, {wanted.dtype}, not {wanted.cached}; "
            "choose --kv-cache-dtype auto or the backend torch"
        )
    return None


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan, scores: Scores
) -> Tensor:
    """As gllm.kernels.attention.paged_attention: query [tokens, heads, head_dim], caches
    [blocks, block_size, kv_heads, elements] of the same type, float32 or bfloat16, the result
    [tokens, heads, value_dim]."""
    library, rows = native(query), plan.rows
    assert library is not None, "attention was planned for compiled kernels"
    output = library.empty((*query.shape[:2], value_cache.shape[3]), query.dtype)
    library(
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
