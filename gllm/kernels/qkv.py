"""Head norms, rotary embedding and KV-cache write of a fused query, key and value projection."""

import torch
from torch import Tensor

from gllm.kernels.attention import store_kv
from gllm.kernels.native.library import RotaryArguments, library_for
from gllm.kernels.qkv_layout import QKVLayout
from gllm.kernels.rms_norm import rms_norm
from gllm.kernels.rotary import RotaryAngles, apply_rotary


def rotate_and_store(
    fused: Tensor,
    layout: QKVLayout,
    angles: RotaryAngles | None,
    cache: tuple[Tensor, Tensor],
    slots: Tensor,
) -> Tensor:
    """Apply QK norms and rotary embedding, and write keys and values to the KV cache.

    Args:
        fused: [tokens, heads + 2 * kv_heads, head_dim]: queries, keys, values. Rows may be apart in
            memory. May be overwritten.
        layout: Numbers of heads and their norms.
        angles: cos and sin of the tokens; None for models without rotary embedding.
        cache: Keys and values, each [blocks, block_size, kv_heads, head_dim], of the dtype of
            fused, another 16-bit dtype, FP8, or int8 (`int8_cache.py`).
        slots: [tokens] int64.

    Returns:
        Queries [tokens, heads, head_dim].
    """
    if fused.is_cuda:
        from gllm.kernels.triton import qkv as gpu

        return gpu.rotate_and_store(fused, layout, angles, cache, slots)
    library = library_for(fused, "rotate")
    is_dense = fused.stride(2) == 1 and fused.stride(1) == fused.shape[2]
    is_written = cache[0].dtype in (fused.dtype, torch.int8)
    if library is not None and is_dense and is_written:
        cosine, sine = (None, None) if angles is None else angles
        norm = layout.query_norm
        library(
            RotaryArguments(
                *(fused, cosine, sine, norm, layout.key_norm, *cache, slots),
                *(len(fused), layout.num_heads, layout.num_kv_heads, fused.shape[2]),
                0 if cosine is None else 2 * cosine.shape[-1],
                fused.stride(0),
                *(layout.eps, layout.interleaved),
                norm is not None and norm.dtype == torch.float32,
                cache[0].dtype == torch.int8,
                fused.dtype,
            )
        )
        return fused[:, : layout.num_heads]
    query, key, value = fused.split(
        (layout.num_heads, layout.num_kv_heads, layout.num_kv_heads), dim=1
    )
    if layout.query_norm is not None and layout.key_norm is not None:
        query, key = (
            rms_norm(query, layout.query_norm, layout.eps),
            rms_norm(key, layout.key_norm, layout.eps),
        )
    if angles is not None:
        query = apply_rotary(query, angles, layout.interleaved)
        key = apply_rotary(key, angles, layout.interleaved)
    store_kv(key, value, *cache, slots)
    return query.contiguous()
