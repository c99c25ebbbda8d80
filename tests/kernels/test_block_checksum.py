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


Checksums = tuple[list[int], list[int]]
"""Checksum and number of counted slots of each block."""


def compute(tensors: list[torch.Tensor], slots: list[int], is_native: bool) -> Checksums:
    """Return the checksums after the slots were written in one step."""
    return compute_steps(tensors, [slots], is_native)


def compute_steps(
    tensors: list[torch.Tensor], steps: list[list[int]], is_native: bool
) -> Checksums:
    """Return the checksums after the slots were written in several steps."""
    checksums, counts = torch.zeros(2, NUM_BLOCKS, dtype=torch.int64)
    checker = BlockChecksums(tensors, NUM_BLOCKS, BLOCK_SIZE)
    store = checker.store if is_native else checker.store_by_torch
    for slots in steps:
        store(torch.tensor(slots, dtype=torch.int64), checksums, counts)
    return checksums.tolist(), counts.tolist()


def last_slots(*blocks: int) -> list[int]:
    """Return the last slot of each block, from which all slots before it are counted too."""
    return [block * BLOCK_SIZE + BLOCK_SIZE - 1 for block in blocks]


SLOTS = st.integers(0, (NUM_BLOCKS + 1) * BLOCK_SIZE - 1)


@pytest.mark.skipif(load_library() is None, reason="no compiled kernels")
@given(st.integers(0, 2**32), st.lists(st.lists(SLOTS), max_size=4))
@settings(max_examples=50, deadline=None)
def test_kernel_agrees_with_torch(seed: int, steps: list[list[int]]) -> None:
    """And both with the last slot of each block that was written: the rest is as if read again."""
    tensors = create_cache(seed)
    found = compute_steps(tensors, steps, is_native=True)
    assert found == compute_steps(tensors, steps, is_native=False)
    checksums, counts = found
    written = {slot // BLOCK_SIZE: slot % BLOCK_SIZE + 1 for slots in steps for slot in slots}
    assert counts == [written.get(block, 0) for block in range(NUM_BLOCKS)]
    last = [block * BLOCK_SIZE + count - 1 for block, count in enumerate(counts) if count]
    assert compute(tensors, last, is_native=True) == (checksums, counts)


@given(st.integers(0, 2**32), st.permutations(range(NUM_BLOCKS)), st.data())
@settings(max_examples=50, deadline=None)
def test_steps_add_up_and_read_no_slot_twice(
    seed: int, order: list[int], data: st.DataObject
) -> None:
    """Decodes add one slot, prefills several; slots that are counted are not looked at again."""
    tensors = create_cache(seed)
    expected = compute(tensors, last_slots(*range(NUM_BLOCKS)), is_native=True)
    steps = []
    for block in order:
        begin = 0
        while begin < BLOCK_SIZE:
            end = data.draw(st.integers(begin + 1, BLOCK_SIZE))
            steps.append([block * BLOCK_SIZE + slot for slot in range(begin, end)])
            begin = end
    assert compute_steps(tensors, steps, is_native=True) == expected
    damaged = [tensor.clone() for tensor in tensors]
    checksums, counts = torch.zeros(2, NUM_BLOCKS, dtype=torch.int64)
    checker = BlockChecksums(damaged, NUM_BLOCKS, BLOCK_SIZE)
    for slots in steps:
        checker.store(torch.tensor(slots, dtype=torch.int64), checksums, counts)
        for tensor in damaged:
            tensor[slots[0] // BLOCK_SIZE, slots[0] % BLOCK_SIZE] = 0
    assert (checksums.tolist(), counts.tolist()) == expected, "damage cannot hide in a checksum"


@pytest.mark.parametrize("is_native", [True, False])
def test_every_flipped_bit_changes_the_checksum_of_its_block(is_native: bool) -> None:
    if is_native and load_library() is None:
        pytest.skip("no compiled kernels")
    tensors = create_cache(1)
    slots = last_slots(*range(NUM_BLOCKS))
    before, _ = compute(tensors, slots, is_native)
    for tensor in tensors:
        data = tensor.view(torch.uint8).view(len(tensor), -1)
        for index in range(data.shape[1]):
            data[2, index] ^= 1 << index % 8
            after, _ = compute(tensors, slots, is_native)
            assert [b for b in range(NUM_BLOCKS) if after[b] != before[b]] == [2]
            data[2, index] ^= 1 << index % 8


def test_exchanged_words_and_slots_change_checksums() -> None:
    tensors = create_cache(2)
    slots = last_slots(*range(NUM_BLOCKS))
    before, _ = compute(tensors, slots, is_native=True)
    assert len(set(before)) == NUM_BLOCKS
    words = tensors[0].view(torch.int64).view(len(tensors[0]), -1)
    words[0, :2] = words[0, :2].flip(0)
    tensors[2][1] = tensors[2][1].flip(0)
    after, _ = compute(tensors, slots, is_native=True)
    assert [block for block in range(NUM_BLOCKS) if after[block] != before[block]] == [0, 1]
