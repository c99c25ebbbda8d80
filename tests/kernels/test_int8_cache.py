"""KV cache of 8-bit integers: entries, and what the compiled kernel writes."""

import math

import pytest
import torch

from gllm.kernels.attention import store_kv
from gllm.kernels.int8_cache import (
    SCALE_BYTES,
    dequantize_entries,
    num_cached_elements,
    quantize_entries,
)
from gllm.kernels.native.library import DTYPES
from gllm.kernels.qkv import rotate_and_store
from gllm.kernels.qkv_layout import QKVLayout
from gllm.kernels.rotary import RotaryAngles
from tests.support.models.kernel_builds import covers_builds

HEADS, KV_HEADS, TOKENS = 3, 2, 9


def test_an_entry_is_off_by_half_a_step_at_most() -> None:
    numbers = torch.randn(50, 2, 24) * torch.logspace(-20, 20, 50)[:, None, None]
    entries = quantize_entries(numbers)
    assert entries.shape == (50, 2, 24 + SCALE_BYTES)
    assert num_cached_elements(entries) == 24
    most = numbers.abs().amax(-1, keepdim=True)
    error = (dequantize_entries(entries, torch.float32) - numbers).abs()
    assert bool((error <= most / 254 * 1.001).all())
    for size in (1, 6, 7):
        alone = dequantize_entries(quantize_entries(numbers[25:26, :1, :size]), torch.float32)
        assert torch.allclose(alone, numbers[25:26, :1, :size], atol=float(most[25].max()) / 127)
    codes = entries[..., :24]
    assert bool((codes.abs().amax(-1) == 127).all())


def test_what_is_not_finite_stays_visible() -> None:
    numbers = torch.tensor([[1.0, math.inf], [math.nan, 0.0], [0.0, 0.0], [2.0, -4.0]])
    read = dequantize_entries(quantize_entries(numbers), torch.float32)
    assert bool(read[:2].isnan().all())
    assert read[2].tolist() == [0.0, 0.0]
    assert read[3].tolist() == pytest.approx([2.0, -4.0], rel=0.01)


@covers_builds(dtype=[*DTYPES], dim=[24, 80], is_rotated=[False, True])
def test_every_build_writes_the_same_entries(
    way: str, dtype: torch.dtype, dim: int, is_rotated: bool
) -> None:
    generator = torch.Generator().manual_seed(dim)
    fused = torch.randn(TOKENS, HEADS + 2 * KV_HEADS, dim, generator=generator).to(dtype)
    fused[3, HEADS] = 0
    fused[4, -1, 5] = math.inf
    fused[5] *= 1e-4
    slots = torch.randperm(16, generator=generator)[:TOKENS]
    angles: RotaryAngles | None = None
    if is_rotated:
        turns = torch.rand(TOKENS, 1, dim // 2, generator=generator)
        # A quarter turn moves numbers and rounds none.
        turns = (turns * 4).floor() * math.pi / 2
        angles = turns.cos().round(), turns.sin().round()
    layout = QKVLayout(HEADS, KV_HEADS, False)
    plain = [torch.zeros(4, 4, KV_HEADS, dim, dtype=dtype) for _ in "kv"]
    rotate_and_store(fused.clone(), layout, angles, (plain[0], plain[1]), slots)
    caches = [quantize_entries(torch.zeros(4, 4, KV_HEADS, dim)) for _ in "kv"]
    rotate_and_store(fused.clone(), layout, angles, (caches[0], caches[1]), slots)
    for cache, numbers in zip(caches, plain, strict=True):
        assert torch.equal(cache, quantize_entries(numbers))
    wanted = [torch.zeros_like(cache) for cache in caches]
    key, value = (numbers.flatten(0, 1)[slots] for numbers in plain)
    store_kv(key, value, wanted[0], wanted[1], slots)
    assert torch.equal(wanted[0], caches[0])
    assert torch.equal(wanted[1], caches[1])
