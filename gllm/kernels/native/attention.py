"""Attention backend for CPUs: calls the compiled kernel of attention.cpp.

The kernel reads the block tables of a plan itself.
"""

import torch
from torch import Tensor

from gllm.kernels.attention_backends import AttentionRequirements
from gllm.kernels.attention_plan import AttentionPlan
from gllm.kernels.attention_scaling import AttentionScaling
from gllm.kernels.native.builds import select_build
from gllm.kernels.native.library import (
    DTYPES,
    MAX_SLOWDOWN,
    AttentionArguments,
    data_pointer,
    library_override,
    load_library,
)


def unsupported_reason(requirements: AttentionRequirements) -> str | None:
    """Return why this backend cannot meet the requirements, as attention_backends."""
    if load_library() is None:
        return f"no compiled kernels are available ({select_build().reason}), or choose torch"
    if requirements.cache_dtype != requirements.dtype:
        return (
            f"needs a KV cache of the dtype of the queries, {requirements.dtype}, "
            f"not {requirements.cache_dtype}; "
            "choose --kv-cache-dtype auto or the backend torch"
        )
    return None


def auto_skip_reason(requirements: AttentionRequirements) -> str | None:
    """Return the measured reason to prefer torch, as attention_backends."""
    kernels = load_library()
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
    """Compute gllm.kernels.attention.paged_attention with the compiled kernel.

    Args:
        query: [tokens, heads, head_dim].
        key_cache: [blocks, block_size, kv_heads, head_dim] of the dtype of query.
        value_cache: [blocks, block_size, kv_heads, value_dim] of the same dtype.
        plan: `plan.rows` is read.
        scaling: scale, softcap and slopes of the scores.

    Returns:
        [tokens, heads, value_dim].
    """
    # A backend requested by name is used even if it was measured to be slower than torch.
    kernels, rows = library_override.get() or load_library(), plan.rows
    assert kernels is not None, "no compiled kernels: the plan was made for another backend"
    output = kernels.empty((*query.shape[:2], value_cache.shape[3]), query.dtype)
    kernels(
        AttentionArguments(
            *(data_pointer(tensor) for tensor in (output, query, key_cache, value_cache)),
            *(
                table.ctypes.data
                for table in (rows.block_table, rows.query_start, rows.context_len)
            ),
            data_pointer(scaling.alibi_slopes),
            len(rows.context_len),
            rows.block_table.shape[1],
            rows.block_size,
            query.shape[1],
            *key_cache.shape[2:],
            value_cache.shape[3],
            query.stride(0),
            key_cache.stride(1),
            value_cache.stride(1),
            plan.window or 0,
            scaling.scale,
            scaling.softcap or 0,
            DTYPES[query.dtype],
            torch.get_num_threads(),
        )
    )
    return output
