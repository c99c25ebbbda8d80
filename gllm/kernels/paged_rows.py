"""Gathering of entries of a paged KV cache by their slots."""

import torch
from torch import Tensor

from gllm.kernels.int8_cache import dequantize_entries


def gather_rows(cache: Tensor, slots: Tensor, dtype: torch.dtype) -> Tensor:
    """Return entries of a paged key or value cache, [n, kv_heads, elements] of `dtype`.

    Args:
        cache: [blocks, block_size, kv_heads, elements].
        slots: [n] int64: block id * block_size + offset in the block.
        dtype: dtype of the result.
    """
    flat = cache.flatten(0, 1)
    if cache.dtype == torch.float8_e4m3fn:
        # As bytes: torch cannot index FP8 tensors.
        codes = flat.view(torch.uint8).index_select(0, slots)
        return codes.view(cache.dtype).to(dtype)
    if cache.dtype == torch.int8:
        return dequantize_entries(flat.index_select(0, slots), dtype)
    return flat.index_select(0, slots).to(dtype)
