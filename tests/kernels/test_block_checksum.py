"""Checksums of KV blocks: the compiled kernel and torch agree, and damage is noticed."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.kernels.block_checksum import BlockChecksums
from gllm.kernels.native.library import load_library

BLOCK_SIZE = 4
NUM_BLOCKS = 6
SHAPES = (
    ((NUM_BLOCKS + 1, BLOCK_SIZE, 2, 8), torch.bfloat16),
    ((NUM_BLOCKS + 1, BLOCK_SIZE, 1, 3), torch.int8),
    ((NUM_BLOCKS, BLOCK_SIZE, 1, 5), torch.float32),
)


def create_cache(seed: int) -> list[torch.Tensor]:
    """Return tensors of a cache with random bytes; the blocks of some are no whole words."""
    generator = torch.Generator().manual_seed(seed)
    tensors = []
    for shape, dtype in SHAPES:
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        data = torch.randint(256, (num_bytes,), dtype=torch.uint8, generator=generator)
        tensors.append(data.view(dtype).view(shape))
    return tensors


def compute(tensors: list[torch.Tensor], slots: list[int], is_native: bool) -> list[int]:
    """Return the checksums after the slots were written."""
    checksums = torch.zeros(NUM_BLOCKS, dtype=torch.int64)
    checker = BlockChecksums(tensors, NUM_BLOCKS, BLOCK_SIZE)
    store = checker.store if is_native else checker.store_by_torch
    store(torch.tensor(slots, dtype=torch.int64), checksums)
    return checksums.tolist()


def last_slots(*blocks: int) -> list[int]:
    """Return the last slot of each block."""
    return [block * BLOCK_SIZE + BLOCK_SIZE - 1 for block in blocks]


@pytest.mark.skipif(load_library() is None, reason="no compiled kernels")
@given(st.integers(0, 2**32), st.lists(st.integers(0, (NUM_BLOCKS + 1) * BLOCK_SIZE - 1)))
@settings(max_examples=50, deadline=None)
def test_kernel_agrees_with_torch(seed: int, slots: list[int]) -> None:
    tensors = create_cache(seed)
    checksums = compute(tensors, slots, is_native=True)
    assert checksums == compute(tensors, slots, is_native=False)
    complete = {slot // BLOCK_SIZE for slot in slots if slot % BLOCK_SIZE == BLOCK_SIZE - 1}
    assert {block for block, value in enumerate(checksums) if value} == complete - {NUM_BLOCKS}


@pytest.mark.parametrize("is_native", [True, False])
def test_every_flipped_bit_changes_the_checksum_of_its_block(is_native: bool) -> None:
    if is_native and load_library() is None:
        pytest.skip("no compiled kernels")
    tensors = create_cache(1)
    slots = last_slots(*range(NUM_BLOCKS))
    before = compute(tensors, slots, is_native)
    for tensor in tensors:
        data = tensor.view(torch.uint8).view(len(tensor), -1)
        for index in range(data.shape[1]):
            data[2, index] ^= 1 << index % 8
            after = compute(tensors, slots, is_native)
            assert [b for b in range(NUM_BLOCKS) if after[b] != before[b]] == [2]
            data[2, index] ^= 1 << index % 8


def test_exchanged_words_and_blocks_change_checksums() -> None:
    tensors = create_cache(2)
    slots = last_slots(*range(NUM_BLOCKS))
    before = compute(tensors, slots, is_native=True)
    assert len(set(before)) == NUM_BLOCKS
    words = tensors[0].view(torch.int64).view(len(tensors[0]), -1)
    words[0, :2] = words[0, :2].flip(0)
    assert compute(tensors, slots, is_native=True)[0] != before[0]


def test_block_of_zeros_has_a_checksum() -> None:
    """0 stands for blocks without a checksum."""
    tensors = [torch.zeros(2, BLOCK_SIZE, 1, 8)]
    assert all(compute(tensors, last_slots(0, 1), is_native=True)[:2])
