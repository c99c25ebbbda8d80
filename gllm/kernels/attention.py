"""Attention over a paged KV cache for one micro-batch of decodes and prefill chunks.

`store_kv` writes the cache and `paged_attention` reads it; both run once per layer. A backend
(`attention_backends.py`) computes the attention from an `AttentionPlan` (`attention_plan.py`).

A cache tensor is [blocks, block_size, kv_heads, head_dim]. Its dtype is that of the queries,
another 16-bit dtype, FP8 (E4M3), or int8. FP8 values are stored unscaled: magnitudes from 2^-6 to
448 are rounded by at most 1/16 of their value, smaller ones by at most 2^-10, larger ones become
448. int8 has a scale behind each head's codes (`int8_cache.py`), so its last dimension is longer.
"""

import torch
from torch import Tensor

from gllm.kernels.attention_backends import backend_module
from gllm.kernels.attention_plan import AttentionPlan
from gllm.kernels.attention_scaling import AttentionScaling
from gllm.kernels.int8_cache import quantize_entries


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Write the keys and values of new tokens to the paged KV cache.

    Args:
        key: [tokens, kv_heads, head_dim].
        value: [tokens, kv_heads, head_dim].
        key_cache: [blocks, block_size, kv_heads, head_dim].
        value_cache: [blocks, block_size, kv_heads, head_dim].
        slots: [tokens] int64: slot of each token, block id * block_size + offset in the block.
    """
    store(key, key_cache, slots)
    store(value, value_cache, slots)


def store(new: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write new [tokens, kv_heads, elements] to the slots [tokens] of a paged key or value cache.

    A slot is block id * block_size + offset in the block. Values beyond the range of an FP8 (E4M3)
    cache are clamped to it.
    """
    flat = cache.flatten(0, 1)
    if cache.dtype == torch.float8_e4m3fn:
        limit = torch.finfo(cache.dtype).max
        codes = new.to(torch.float32).clamp(-limit, limit).to(cache.dtype)
        # As bytes: torch cannot index FP8 tensors.
        flat.view(torch.uint8).index_copy_(0, slots, codes.view(torch.uint8))
    elif cache.dtype == torch.int8:
        flat.index_copy_(0, slots, quantize_entries(new))
    else:
        flat.index_copy_(0, slots, new.to(cache.dtype))


def paged_attention(
    query: Tensor,
    key_cache: Tensor,
    value_cache: Tensor,
    plan: AttentionPlan,
    scaling: AttentionScaling,
) -> Tensor:
    """Compute causal attention over a paged KV cache with the backend named in the plan.

    The keys and values of the step must already be stored. Query head h reads KV head h // (heads /
    kv_heads). Source: Vaswani et al., "Attention Is All You Need" (2017), equation 1; Ainslie et
    al., "GQA" (2023); softcap: Gemma Team, "Gemma 2" (2024), section 2.

    Args:
        query: [tokens, heads, head_dim].
        key_cache: [blocks, block_size, kv_heads, head_dim].
        value_cache: [blocks, block_size, kv_heads, value_dim].
        plan: attention metadata of the step.
        scaling: scale, softcap, ALiBi slopes and sinks of the scores.

    Returns:
        [tokens, heads, value_dim].
    """
    backend = backend_module(plan.backend)
    result: Tensor = backend.paged_attention(query, key_cache, value_cache, plan, scaling)
    return result
