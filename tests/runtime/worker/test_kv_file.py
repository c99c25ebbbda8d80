"""The file of a KV cache that outlives its worker: what a successor finds, and damage."""

import os
import resource
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gllm.recovery.kept_blocks import contains_block
from gllm.runtime.worker.kv_file import KvFile
from gllm.scheduler.intact_slots import NO_SLOTS

NUM_BLOCKS = 10
BLOCK_SIZE = 4
SHAPE = (NUM_BLOCKS + 1, BLOCK_SIZE, 2, 3)


@pytest.fixture
def descriptor() -> Iterator[int]:
    descriptor = os.memfd_create("test-kv")
    yield descriptor
    os.close(descriptor)


class Worker:
    """A worker's cache of two tensors in a file."""

    def __init__(
        self, descriptor: int, description: str = "layers 0 to 1", num_blocks: int = NUM_BLOCKS
    ) -> None:
        self.file = KvFile(descriptor, description, num_blocks, BLOCK_SIZE)
        shape = (num_blocks + 1, *SHAPE[1:])
        self.keys = self.file.create(shape, torch.float32)
        self.values = self.file.create(shape, torch.bfloat16)
        self.file.complete()

    def write(self, block: int, num_slots: int = BLOCK_SIZE, value: float = 1.0) -> None:
        """Compute the first slots of a block in one step."""
        self.keys[block, :num_slots] = value + block
        self.values[block, :num_slots] = -value - block
        slots = torch.arange(block * BLOCK_SIZE, block * BLOCK_SIZE + num_slots)
        self.file.store_checksums(slots)

    @property
    def intact(self) -> set[int]:
        """Full blocks that are found."""
        found = self.file.find_intact_slots().full
        return {block for block in range(8 * len(found)) if contains_block(found, block)}


def test_a_successor_finds_the_blocks_and_their_first_slots(descriptor: int) -> None:
    first = Worker(descriptor)
    assert first.file.find_intact_slots() == NO_SLOTS, "nobody was before"
    for block in (0, 3, 9):
        first.write(block)
    first.write(5, num_slots=BLOCK_SIZE - 1)
    del first
    second = Worker(descriptor)
    assert second.intact == {0, 3, 9}
    assert second.file.find_intact_slots().begun == {5: BLOCK_SIZE - 1}
    assert float(second.keys[3].sum()) == 4 * BLOCK_SIZE * 6
    second.write(5)
    assert Worker(descriptor).intact == {0, 3, 5, 9}


def test_a_block_that_is_written_again_has_a_new_checksum(descriptor: int) -> None:
    worker = Worker(descriptor)
    worker.write(2)
    worker.write(2, value=7.0)
    worker.write(4)
    worker.write(4, num_slots=2, value=7.0)
    found = Worker(descriptor)
    assert found.intact == {2}, "half of block 4 belongs to others"
    assert found.file.find_intact_slots(2).begun == {4: 2}


def test_a_slot_that_was_being_written_is_not_counted(descriptor: int) -> None:
    worker = Worker(descriptor)
    worker.write(2, num_slots=2)
    worker.keys[2, 2] = 9.0
    worker.write(4, num_slots=3)
    worker.keys[4, 1] = 9.0
    assert Worker(descriptor).file.find_intact_slots().begun == {2: 2}
    assert Worker(descriptor).file.find_intact_slots().begun == {2: 2}, "wrong ones are removed"


@given(
    written=st.sets(st.integers(0, NUM_BLOCKS - 1)),
    flips=st.lists(st.tuples(st.booleans(), st.integers(0, 10**6), st.integers(0, 7)), max_size=5),
)
@settings(max_examples=40, deadline=None)
def test_flipped_bits_are_noticed(written: set[int], flips: list[tuple[bool, int, int]]) -> None:
    """A block is found if and only if its bytes are those that were computed."""
    descriptor = os.memfd_create("test-kv")
    try:
        worker = Worker(descriptor)
        for block in written:
            worker.write(block)
        before = [worker.keys.clone(), worker.values.clone()]
        for is_key, position, bit in flips:
            data = (worker.keys if is_key else worker.values).view(torch.uint8).view(-1)
            data[position % len(data)] ^= 1 << bit
        same = {
            block
            for block in written
            if torch.equal(worker.keys[block].view(torch.uint8), before[0][block].view(torch.uint8))
            and torch.equal(
                worker.values[block].view(torch.uint8), before[1][block].view(torch.uint8)
            )
        }
        assert Worker(descriptor).intact == same
        assert Worker(descriptor).intact == same, "wrong checksums are removed"
    finally:
        os.close(descriptor)


def test_damaged_checksums_and_headers_keep_nothing_wrong(descriptor: int) -> None:
    worker = Worker(descriptor)
    for block in range(NUM_BLOCKS):
        worker.write(block)
    page = os.sysconf("SC_PAGE_SIZE")
    checksum = os.pread(descriptor, 8, page + 8 * 6)
    os.pwrite(descriptor, bytes([checksum[0] ^ 1]) + checksum[1:], page + 8 * 6)
    assert Worker(descriptor).intact == set(range(NUM_BLOCKS)) - {6}
    os.pwrite(descriptor, b"x", 5)
    successor = Worker(descriptor)
    assert successor.intact == set()
    assert not successor.keys.any(), "a new cache is zero"


@pytest.mark.parametrize(
    ("description", "num_blocks"),
    [("layers 1 to 2", NUM_BLOCKS), ("layers 0 to 1", NUM_BLOCKS - 1), ("", 3 * NUM_BLOCKS)],
)
def test_another_cache_begins_empty(descriptor: int, description: str, num_blocks: int) -> None:
    Worker(descriptor).write(1)
    other = Worker(descriptor, description, num_blocks)
    assert other.intact == set()
    assert not other.keys.any()
    other.write(2)
    assert Worker(descriptor, description, num_blocks).intact == {2}


@pytest.mark.parametrize("size", [0, 1, 4096, 3 * 4096])
def test_a_file_of_another_size_begins_empty(descriptor: int, size: int) -> None:
    worker = Worker(descriptor)
    worker.write(1)
    del worker
    os.ftruncate(descriptor, size)
    assert Worker(descriptor).intact == set()


def test_a_worker_that_died_while_it_began_leaves_nothing(descriptor: int) -> None:
    Worker(descriptor).write(1)
    other = KvFile(descriptor, "another model", NUM_BLOCKS, BLOCK_SIZE)
    other.create(SHAPE, torch.float32)
    assert Worker(descriptor).intact == set()


def test_the_memory_is_free_when_nobody_has_the_file() -> None:
    """A mapping keeps the memory; the file has no more of it than was written."""
    descriptor = os.memfd_create("test-kv")
    worker = Worker(descriptor)
    worker.write(1)
    written = os.fstat(descriptor).st_blocks * 512
    assert 0 < written <= os.fstat(descriptor).st_size
    os.close(descriptor)
    worker.write(2)
    assert float(worker.keys[1].sum()) == 2 * BLOCK_SIZE * 6


def test_a_file_that_may_not_have_the_size_is_an_os_error(descriptor: int) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096 * 2, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            Worker(descriptor)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_tensor_without_checksums_is_kept_and_damages_no_block(descriptor: int) -> None:
    """The entries of a draft, which is late: it writes to blocks that have their checksum."""

    def open_file() -> tuple[KvFile, torch.Tensor, torch.Tensor]:
        file = KvFile(descriptor, "with a draft", NUM_BLOCKS, BLOCK_SIZE)
        keys = file.create(SHAPE, torch.float32)
        draft = file.create_unchecked(SHAPE, torch.float32)
        file.complete()
        return file, keys, draft

    first, keys, draft = open_file()
    keys[2] = 5.0
    first.store_checksums(torch.arange(2 * BLOCK_SIZE, 3 * BLOCK_SIZE))
    draft[2] = 7.0
    second, keys, draft = open_file()
    assert contains_block(second.find_intact_slots().full, 2)
    assert (float(keys[2, 0, 0, 0]), float(draft[2, 0, 0, 0])) == (5.0, 7.0)
