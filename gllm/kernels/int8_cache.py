"""KV cache of 8-bit integers with one scale per token and head.

An entry of a token and head is its codes and, in the four bytes behind them, a float32 scale s: a
number is s times its code. s = max|x| / 127 and the codes are round(x / s), as for activations of
8 bits (linear_int8.py). Numbers that are not finite make all of their entry NaN.
"""

import torch
from torch import Tensor

from gllm.kernels.linear_int8 import MAX_CODE, MIN_MAGNITUDE

SCALE_BYTES = 4
"""Bytes of the scale behind the codes of an entry."""


def num_cached_elements(cache: Tensor) -> int:
    """Return the elements of a key or value in a cache [blocks, block_size, kv_heads, entry]."""
    return cache.shape[-1] - (SCALE_BYTES if cache.dtype == torch.int8 else 0)


def quantize_entries(x: Tensor) -> Tensor:
    """Return the entries [..., elements + SCALE_BYTES] int8 of keys or values x [..., elements]."""
    numbers = x.to(torch.float32)
    magnitudes = numbers.abs().amax(-1, keepdim=True)
    is_finite = magnitudes.isfinite()
    # A tensor as the dividend: torch computes number / tensor as the reciprocal times the number.
    max_codes = torch.full_like(magnitudes, MAX_CODE)
    scales = torch.where(is_finite, magnitudes / max_codes, torch.nan)
    is_scaled = is_finite & (magnitudes >= MIN_MAGNITUDE)
    inverse = torch.where(is_scaled, max_codes / magnitudes, 0.0)
    codes = torch.where(is_scaled, numbers * inverse, 0.0).round().to(torch.int8)
    return torch.cat((codes, scales.view(torch.int8)), -1)


def dequantize_entries(entries: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers [..., elements] of entries [..., elements + SCALE_BYTES] int8."""
    codes, scales = entries.split((entries.shape[-1] - SCALE_BYTES, SCALE_BYTES), -1)
    # A copy, because the scale of a single entry may lie at any byte.
    scales = scales.clone(memory_format=torch.contiguous_format)
    return (codes * scales.view(torch.float32)).to(dtype)
