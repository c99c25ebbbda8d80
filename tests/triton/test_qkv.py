"""Rotation and the write into the cache of the room for GPUs against the reference, interpreted.

The interpreter cuts bfloat16 off where GPUs round, and loses the carry of numbers that FP8 rounds
up to a power of two: FP8 is tested with numbers that it has, and those beyond its range.
"""

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from gllm.kernels.qkv import rotate_and_store as operation
from gllm.kernels.qkv_layout import QKVLayout
from gllm.kernels.rotary import RotaryAngles
from gllm.kernels.triton.qkv import rotate_and_store
from tests.support.examples import num_examples
from tests.support.models.kernel_builds import using_build

TYPES = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])
STEP = {torch.float32: 1e-6, torch.float16: 2**-9, torch.bfloat16: 2**-5}
"""What two roundings leave, against the largest number."""
FP8 = torch.float8_e4m3fn


@pytest.fixture(autouse=True, scope="module")
def plain() -> Iterator[None]:
    """The reference is torch's, not the compiled one."""
    with using_build("torch"):
        yield


Cache = tuple[Tensor, Tensor]


def random(seed: int, dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def turned(seed: int, tokens: int, dim: int) -> RotaryAngles | None:
    turns = 3 * random(seed, torch.float32, tokens, 1, dim // 2)
    return (turns.cos(), turns.sin()) if dim else None


def close(actual: Tensor, wanted: Tensor) -> None:
    assert actual.dtype == wanted.dtype
    assert actual.shape == wanted.shape
    wanted = wanted.to(torch.float64)
    limit = STEP[actual.dtype] * max(wanted.abs().max().item(), 1.0) if len(wanted) else 0.0
    assert (actual.to(torch.float64) - wanted).abs().le(limit).all()


def empty_cache(slots: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> Cache:
    """Keys and values, blocks of two slots, full of what is no number."""
    shape = (-(-slots // 2), 2, kv_heads, head_dim)
    keys = torch.full(shape, torch.nan).to(dtype)
    return keys, keys.clone()


@settings(max_examples=num_examples(20, 200), deadline=None)
@given(
    TYPES,
    st.tuples(st.integers(1, 3), st.integers(1, 3), st.sampled_from([2, 10, 16, 24])),
    st.sampled_from([0.0, 0.5, 1.0]),
    st.booleans(),
    st.sampled_from([None, "same", "float32"]),
    st.integers(0, 4),
    st.integers(0, 99),
)
def test_matches_the_reference(
    dtype: torch.dtype,
    shape: tuple[int, int, int],
    share: float,
    interleaved: bool,
    norm: str | None,
    tokens: int,
    seed: int,
) -> None:
    kv_heads, group, head_dim = shape
    heads = kv_heads * group
    fused = random(seed, dtype, tokens, heads + 2 * kv_heads, head_dim)
    angles = turned(seed + 1, tokens, int(head_dim * share) // 2 * 2)
    scales: list[Tensor | None] = [None, None]
    if norm is not None:
        kind = dtype if norm == "same" else torch.float32
        scales = [random(seed + i, kind, head_dim) for i in (2, 3)]
    how = QKVLayout(heads, kv_heads, interleaved, scales[0], scales[1], 1e-5)
    slots = torch.randperm(2 * tokens + 1, generator=torch.Generator().manual_seed(seed))[:tokens]
    wanted_cache = empty_cache(2 * tokens + 1, kv_heads, head_dim, dtype)
    wanted = operation(fused.clone(), how, angles, wanted_cache, slots)
    cache = empty_cache(2 * tokens + 1, kv_heads, head_dim, dtype)
    query = rotate_and_store(fused, how, angles, cache, slots)
    close(query, wanted)
    for actual, reference in zip(cache, wanted_cache, strict=True):
        close(*(part.flatten(0, 1)[slots] for part in (actual, reference)))
        rest = torch.ones(len(actual) * 2, dtype=torch.bool).index_fill_(0, slots, False)
        assert actual.flatten(0, 1)[rest].isnan().all()


def test_groups_of_heads_do_not_mix() -> None:
    """More heads than a program has, and a number of them that does not divide."""
    how = QKVLayout(21, 7)
    fused = random(0, torch.float32, 2, 35, 256)
    cache, wanted_cache = (empty_cache(2, 7, 256, torch.float32) for _ in range(2))
    slots, angles = torch.tensor([1, 0]), turned(1, 2, 256)
    wanted = operation(fused.clone(), how, angles, wanted_cache, slots)
    close(rotate_and_store(fused, how, angles, cache, slots), wanted)
    for actual, reference in zip(cache, wanted_cache, strict=True):
        close(actual, reference)


@settings(max_examples=num_examples(8, 100), deadline=None)
@given(TYPES, st.booleans(), st.sampled_from([0, 4, 8]), st.integers(1, 3), st.integers(0, 99))
def test_a_cache_in_fp8(
    dtype: torch.dtype, interleaved: bool, dim: int, kv_heads: int, seed: int
) -> None:
    """Turned by right angles, what FP8 has stays what it has."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 127, (3, 3 * kv_heads, 8), generator=generator).to(torch.uint8)
    sign = torch.randint(-1, 2, codes.shape, generator=generator)
    fused = (codes.view(FP8).to(torch.float32) * sign * 2).to(dtype)
    right = torch.tensor([0, 1, 0, -1])
    turns = torch.randint(0, 4, (3, 1, dim // 2), generator=generator)
    angles = (right[turns - 3].float(), right[turns].float()) if dim else None
    slots, how = torch.tensor([4, 0, 1]), QKVLayout(kv_heads, kv_heads, interleaved)
    cache, wanted_cache = (empty_cache(5, kv_heads, 8, FP8) for _ in range(2))
    wanted = operation(fused.clone(), how, angles, wanted_cache, slots)
    assert torch.equal(rotate_and_store(fused, how, angles, cache, slots), wanted)
    for actual, reference in zip(cache, wanted_cache, strict=True):
        both = (part.to(torch.float32) for part in (actual, reference))
        torch.testing.assert_close(*both, rtol=0, atol=0, equal_nan=True)
        assert actual.flatten(0, 1).to(torch.float32)[[2, 3, 5]].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_cache_of_another_16_bits(dtype: torch.dtype) -> None:
    fused, how, angles = random(0, dtype, 3, 4, 8), QKVLayout(2, 1), turned(1, 3, 8)
    cache, wanted_cache = (empty_cache(4, 1, 8, torch.float16) for _ in range(2))
    slots = torch.tensor([3, 0, 1])
    wanted = operation(fused.clone(), how, angles, wanted_cache, slots)
    close(rotate_and_store(fused, how, angles, cache, slots), wanted)
    for actual, reference in zip(cache, wanted_cache, strict=True):
        # They have been rounded to the heads' type first.
        close(*(part.flatten(0, 1)[slots].to(dtype) for part in (actual, reference)))


def test_beyond_the_range_of_fp8_is_its_largest() -> None:
    numbers = torch.tensor([1e4, -1e4, 448.0, -460.0, 465.0, torch.inf, -torch.inf, 0.0])
    wanted = torch.tensor([448.0, -448.0, 448.0, -448.0, 448.0, 448.0, -448.0, 0.0])
    cache = empty_cache(1, 1, 8, FP8)
    fused = numbers.expand(1, 3, 8).clone()
    rotate_and_store(fused, QKVLayout(1, 1), None, cache, torch.tensor([0]))
    for part in cache:
        assert torch.equal(part.to(torch.float32)[0, 0, 0], wanted)


def test_fused_rows_may_be_apart_and_slots_may_be_none() -> None:
    wide = random(0, torch.bfloat16, 3, 5, 8)
    how, angles = QKVLayout(1, 1), turned(1, 3, 8)
    slots = torch.tensor([3, -1, 0])
    caches = [empty_cache(4, 1, 8, torch.bfloat16) for _ in range(3)]
    contiguous = rotate_and_store(wide[:, 1:4].contiguous(), how, angles, caches[0], slots)
    assert torch.equal(rotate_and_store(wide[:, 1:4], how, angles, caches[1], slots), contiguous)
    turned_over = wide[:, 1:4].transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(rotate_and_store(turned_over, how, angles, caches[2], slots), contiguous)
    for cache in caches:
        for part, reference in zip(cache, caches[0], strict=True):
            flat = part.flatten(0, 1)
            assert flat[[1, 2]].isnan().all()
            assert not flat[[0, 3]].isnan().any()
            assert torch.equal(flat[[0, 3]], reference.flatten(0, 1)[[0, 3]])
