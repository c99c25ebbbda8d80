"""From fused projections to queries that can attend, and keys and values in the paged cache.

Owns the order: normalisation of heads, rotation, the write. Does not know what the projections are.
"""

import torch
from torch import Tensor

from gllm.kernels.attention import store_kv
from gllm.kernels.native.library import DTYPES, RotaryArguments, native, pointer
from gllm.kernels.qkv_heads import Heads as Heads
from gllm.kernels.rms_norm import rms_norm
from gllm.kernels.rotary import Angles, apply_rotary


def rotate_and_store(
    fused: Tensor, how: Heads, angles: Angles | None, cache: tuple[Tensor, Tensor], slots: Tensor
) -> Tensor:
    """Queries [tokens, heads, head_dim]; keys and values go to their slots of the cache.

    fused [tokens, heads + 2 * kv_heads, head_dim]: queries, keys, values; may be overwritten;
    angles: none for models without rotation; cache: keys and values, each
    [blocks, block_size, kv_heads, head_dim], of fused's type or FP8; slots [tokens] int64.
    """
    if fused.is_cuda:
        from gllm.kernels.triton import qkv as gpu

        return gpu.rotate_and_store(fused, how, angles, cache, slots)
    library = native(fused, "rotate")
    if library is not None and fused.is_contiguous() and cache[0].dtype == fused.dtype:
        library(_arguments(fused, how, angles, cache, slots))
        return fused[:, : how.heads]
    query, key, value = fused.split((how.heads, how.kv_heads, how.kv_heads), dim=1)
    if how.query_norm is not None and how.key_norm is not None:
        query, key = rms_norm(query, how.query_norm, how.eps), rms_norm(key, how.key_norm, how.eps)
    if angles is not None:
        query = apply_rotary(query, angles, how.interleaved)
        key = apply_rotary(key, angles, how.interleaved)
    store_kv(key, value, *cache, slots)
    return query.contiguous()


def _arguments(
    fused: Tensor, how: Heads, angles: Angles | None, cache: tuple[Tensor, Tensor], slots: Tensor
) -> RotaryArguments:
    cosine, sine = (None, None) if angles is None else angles
    norm = how.query_norm
    return RotaryArguments(
        *(pointer(tensor) for tensor in (fused, cosine, sine, norm, how.key_norm, *cache, slots)),
        *(len(fused), how.heads, how.kv_heads, fused.shape[2]),
        0 if cosine is None else 2 * cosine.shape[-1],
        how.eps,
        how.interleaved,
        norm is not None and norm.dtype == torch.float32,
        DTYPES[fused.dtype],
        torch.get_num_threads(),
    )
