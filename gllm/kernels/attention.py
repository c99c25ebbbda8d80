"""Attention over a paged KV cache, for one micro-batch of decodes and prefill chunks.

Owns what is computed, and the write into the cache. How queries meet the cache is a backend's
(attention_backends.py), where they look is told by attention_plan.py. `store_kv` and
`paged_attention` run once for each layer. Does not know models and requests.

A cache tensor is [blocks, block_size, kv_heads, head_dim], of the queries' type, of another with 16
bits, or of FP8 (E4M3). In FP8 numbers are as they are, with no scale but 1: from 2^-6 to 448 in
magnitude they are rounded by 1/16 of themselves at most, smaller ones by 2^-10, and larger ones
become 448.
"""

import torch
from torch import Tensor

from gllm.kernels.attention_backends import implementation
from gllm.kernels.attention_plan import AttentionPlan
from gllm.kernels.attention_scores import Scores as Scores


def store_kv(
    key: Tensor, value: Tensor, key_cache: Tensor, value_cache: Tensor, slots: Tensor
) -> None:
    """Write key and value [tokens, kv_heads, head_dim] to their slots [tokens] of the caches."""
    store(key, key_cache, slots)
    store(value, value_cache, slots)


def store(new: Tensor, cache: Tensor, slots: Tensor) -> None:
    """Write new [tokens, kv_heads, elements] to their slots [tokens] of one cache.

    Numbers beyond the range of a cache in FP8 (E4M3) become its largest.
    """
    flat = cache.flatten(0, 1)
    if cache.dtype == torch.float8_e4m3fn:
        limit = torch.finfo(cache.dtype).max
        codes = new.to(torch.float32).clamp(-limit, limit).to(cache.dtype)
        # As bytes: torch does not index FP8.
        flat.view(torch.uint8).index_copy_(0, slots, codes.view(torch.uint8))
    else:
        flat.index_copy_(0, slots, new.to(cache.dtype))


def paged_attention(
    query: Tensor, key_cache: Tensor, value_cache: Tensor, plan: AttentionPlan, scores: Scores
) -> Tensor:
    """Causal attention of query [tokens, heads, head_dim] over the cache; the result is
    [tokens, heads, value_dim].

    The step's keys and values have to be stored before. Query head h belongs to KV head
    h // (heads / kv_heads). Source: Vaswani et al., "Attention Is All You Need" (2017), equation 1;
    Ainslie et al., "GQA" (2023); softcap: Gemma Team, "Gemma 2" (2024), section 2.
    """
    backend = implementation(plan.backend)
    result: Tensor = backend.paged_attention(query, key_cache, value_cache, plan, scores)
    return result
