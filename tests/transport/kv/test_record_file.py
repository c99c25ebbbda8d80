"""Files of KV blocks: crashes at every write, damage, and files that are not to be used."""

import os
import random
from collections import Counter
from hashlib import sha256
from pathlib import Path

import pytest

from gllm.scheduler.disk_index import DiskBlock
from gllm.transport.kv.record_file import (
    PAGE_BYTES,
    RecordFile,
    RecordFileError,
    SystemFile,
    count_record_bytes,
)
from tests.support.engines.simulated_disk import SimulatedDisk

IDENTITY = bytes(range(32))
BLOCK_BYTES = 1000
"""A record has one page: its header and the block are in different sectors."""
CAPACITY = 5
SIZE = PAGE_BYTES + CAPACITY * count_record_bytes(BLOCK_BYTES)


def make_record(number: int) -> DiskBlock:
    key = sha256(b"%d" % number).digest()[:16]
    return DiskBlock(key, b"p" * 16, 16 * number, number / 7)


def make_block(record: DiskBlock) -> bytes:
    """Return the only right content of a key."""
    return random.Random(record.key).randbytes(BLOCK_BYTES)


def open_file(disk: SimulatedDisk, identity: bytes = IDENTITY, size: int = SIZE) -> RecordFile:
    return RecordFile(disk, identity, BLOCK_BYTES, size)


def fill(disk: SimulatedDisk, numbers: range) -> RecordFile:
    file = open_file(disk)
    for number in numbers:
        assert file.write(make_record(number), make_block(make_record(number)))
    return file


def check(file: RecordFile) -> set[bytes]:
    """Read all blocks of a file; return the keys of those that are there, with their content."""
    records = {record.key: record for record in file.records}
    found = set()
    for key, record in records.items():
        block = file.read(key)
        assert block is None or block == make_block(record)
        if block is not None:
            found.add(key)
        else:
            assert key not in file
    return found


class RecordFileRun:
    """A file of KV blocks on a disk, and what may be found in it after random operations.

    A few blocks are written with a wrong content, as those of a sequence whose logits are NaN. They
    may be found until they are discarded, and never again from then on.
    """

    def __init__(self, seed: int, num_crash_states: int) -> None:
        self.choice, self._num_crash_states = random.Random(seed), num_crash_states
        self.disk = SimulatedDisk()
        self.file = open_file(self.disk)
        self.sure: set[bytes] = set()
        """Keys that have to be found as long as nothing is damaged."""
        self.wrong: set[bytes] = set()
        """Keys that may have a wrong content."""
        self.counts: Counter[str] = Counter()
        """Number of executed operations by name, and of states after a crash."""

    def check(self, file: RecordFile) -> set[bytes]:
        """Read all blocks of a file; return the keys of those that are there."""
        found = set()
        for record in file.records:
            block = file.read(record.key)
            if block is None:
                assert record.key not in file
                continue
            assert block == make_block(record) or (
                block == make_wrong_block(record) and record.key in self.wrong
            )
            found.add(record.key)
        return found

    def run(self, num_operations: int) -> None:
        """Execute random operations, and look at the disk as it may be after a crash at each."""
        names, weights = zip(*OPERATIONS.items(), strict=True)
        for name in self.choice.choices(names, weights, k=num_operations):
            self.counts[name] += 1
            is_synced = self.choice.random() < 0.8
            if is_synced:
                self.disk.sync()
            num_writes, before = self.disk.num_writes, set(self.sure)
            record = make_record(self.choice.randrange(12))
            getattr(self, name)(record)
            assert self.sure <= {each.key for each in self.file.records}
            assert len(self.file) <= self.file.capacity
            if self.disk.num_writes > num_writes:
                self._crash(before & self.sure if is_synced else set())

    def _crash(self, safe: set[bytes]) -> None:
        """Open the file as it may be after a crash; `safe` has keys whose writes are complete."""
        for state in self.disk.crash_states(self.choice, self._num_crash_states):
            self.counts["crash states"] += 1
            assert safe <= self.check(open_file(state))
        if self.choice.random() < 0.02:
            # One of the crashes happens.
            self.disk = self.disk.crash_states(self.choice, 1)[0]
            self.counts["crashes"] += 1
            self._open()

    def _open(self, size: int = SIZE) -> None:
        self._make_space()
        self.file = open_file(self.disk, size=size)
        self.sure = self.check(self.file) - self.wrong

    def _make_space(self) -> None:
        self.disk.max_bytes = SimulatedDisk().max_bytes

    # Operations.

    def write(self, record: DiskBlock) -> None:
        """Add a block, in the place of another one if there is no other."""
        self._write(record, make_block(record))

    def write_wrong(self, record: DiskBlock) -> None:
        """Add a block with a wrong content."""
        if record.key not in self.file:
            self.wrong.add(record.key)
            self._write(record, make_wrong_block(record))

    def _write(self, record: DiskBlock, block: bytes) -> None:
        if len(self.file) >= self.file.capacity and record.key not in self.file:
            others = sorted({each.key for each in self.file.records})
            if others:
                self._evict(self.choice.choice(others))
        is_new = record.key not in self.file
        try:
            is_there = self.file.write(record, block)
        except OSError:
            assert record.key not in self.file
            is_there = False
        assert is_there == (record.key in self.file)
        if is_there and is_new and record.key not in self.wrong:
            self.sure.add(record.key)

    def read(self, record: DiskBlock) -> None:
        """Read a block, which may be there."""
        was_sure = record.key in self.sure
        block = self.file.read(record.key)
        allowed = [make_block(record)]
        allowed += [make_wrong_block(record)] * (record.key in self.wrong)
        assert block in allowed if was_sure else block in [None, *allowed]

    def evict(self, record: DiskBlock) -> None:
        """Make space."""
        self._evict(record.key)

    def _evict(self, key: bytes) -> None:
        self.file.evict([key])
        self.sure.discard(key)

    def discard(self, record: DiskBlock) -> None:
        """Remove a block that is wrong, and others."""
        keys = [record.key, *self.choice.sample(sorted(self.wrong), min(2, len(self.wrong)))]
        try:
            self.file.discard(keys)
        except OSError:
            # The file was cut and the disk is full: what is behind the cut cannot be written.
            assert self.disk.max_bytes < SIZE
        else:
            self.wrong.difference_update(keys)
        self.sure.difference_update(keys)
        assert not any(key in self.file for key in keys)

    def flip(self, record: DiskBlock) -> None:
        """Damage a few bytes."""
        for _ in range(self.choice.choice([1, 1, 5])):
            if len(self.disk.data) > PAGE_BYTES:
                place = self.choice.randrange(PAGE_BYTES, len(self.disk.data))
                self.disk.flip(place, 1 << self.choice.randrange(8))
        self._count_damage()

    def truncate(self, record: DiskBlock) -> None:
        """Cut the open file, as another program does."""
        self.disk.truncate(self.choice.randrange(PAGE_BYTES, len(self.disk.data) + 1))
        self._count_damage()

    def _count_damage(self) -> None:
        """Let blocks be missing that are damaged now."""
        copy = SimulatedDisk()
        copy.data = bytearray(self.disk.data)
        self.sure &= self.check(open_file(copy))

    def fill_disk(self, record: DiskBlock) -> None:
        """Let others fill the disk."""
        self.disk.max_bytes = len(self.disk.data) + self.choice.choice([0, 100, 1200])

    def fail(self, record: DiskBlock) -> None:
        """Let every access fail for a while."""
        self.disk.fails = True
        with pytest.raises(OSError, match="Input/output"):
            self.file.discard([record.key])
        # It was not removed from the disk, where it may be wrong.
        self.sure.discard(record.key)
        assert self.file.read(record.key) is None
        self.write(make_record(self.choice.randrange(12)))
        self.disk.fails = False

    def restart(self, record: DiskBlock) -> None:
        """Open the file again, with another size."""
        self._open(SIZE - self.choice.randrange(3) * count_record_bytes(BLOCK_BYTES))

    def change_model(self, record: DiskBlock) -> None:
        """Let an engine of another model or version use the file, then open it again."""
        self._make_space()
        if self.choice.random() < 0.5:
            other = open_file(self.disk, identity=bytes(32))
            assert len(other) == 0
            assert other.write(record, make_wrong_block(record))
        else:
            self.disk.flip(8)
        self._open()
        assert self.file.reset_cause
        assert not len(self.file)
        self.wrong.clear()


OPERATIONS = {
    "write": 40,
    "write_wrong": 6,
    "read": 20,
    "evict": 8,
    "discard": 10,
    "flip": 4,
    "truncate": 0.5,
    "fill_disk": 1,
    "fail": 1,
    "restart": 3,
    "change_model": 0.5,
}
"""Operations by name, with their shares."""


def make_wrong_block(record: DiskBlock) -> bytes:
    """Return a content that a key must not have."""
    return make_block(record)[::-1]


def run_operations(num_operations: int, num_crash_states: int, seed: int) -> None:
    """Check that no block has a wrong content, nor is missing that was complete before."""
    run = RecordFileRun(seed, num_crash_states)
    run.run(num_operations)
    missing = {name for name in (*OPERATIONS, "crashes") if not run.counts[name]}
    assert not missing
    assert run.counts["crash states"] > 0.3 * num_operations * num_crash_states


def test_no_wrong_block_is_returned_after_a_crash_at_any_write() -> None:
    run_operations(5000, 1, seed=1)


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_no_wrong_block_is_returned_after_several_crashes_at_any_write(seed: int) -> None:
    run_operations(25_000, 3, seed)


def test_the_index_is_rebuilt_from_the_file() -> None:
    """It would otherwise be in memory only, and nobody would find the blocks after a restart."""
    disk = SimulatedDisk()
    fill(disk, range(3))
    again = open_file(disk)
    assert sorted(again.records) == sorted(make_record(number) for number in range(3))
    assert len(check(again)) == 3


def test_a_torn_record_at_the_end_is_cut_off() -> None:
    disk = SimulatedDisk()
    fill(disk, range(3))
    disk.data[-100:] = b""
    again = open_file(disk)
    assert len(check(again)) == 2
    assert disk.size() == SIZE - (CAPACITY - 2) * count_record_bytes(BLOCK_BYTES)


@pytest.mark.parametrize("place", [5, 100, 108, 2000])
def test_a_flipped_bit_of_a_record_is_noticed(place: int) -> None:
    """In the key, the checksums and the block; the other record is still there."""
    disk = SimulatedDisk()
    fill(disk, range(2))
    place = min(place, BLOCK_BYTES + 80)
    disk.data[PAGE_BYTES + place] ^= 4
    again = open_file(disk)
    assert check(again) == {make_record(1).key}
    assert again.write(make_record(0), make_block(make_record(0)))
    assert len(check(again)) == 2


def test_a_block_that_is_damaged_while_the_file_is_open_is_removed() -> None:
    disk = SimulatedDisk()
    file = fill(disk, range(2))
    disk.data[PAGE_BYTES + 500] ^= 1
    assert file.read(make_record(0).key) is None
    assert make_record(0).key not in file
    disk.fails = True
    with pytest.raises(OSError, match="Input/output"):
        file.read(make_record(1).key)
    assert len(file) == 0


def test_a_truncated_file_has_the_blocks_before() -> None:
    disk = SimulatedDisk()
    fill(disk, range(3))
    disk.truncate(PAGE_BYTES + count_record_bytes(BLOCK_BYTES) + 10)
    assert len(check(open_file(disk))) == 1
    for size in (0, 7, 60, PAGE_BYTES - 1):
        disk.truncate(size)
        file = open_file(disk)
        assert len(file) == 0
        assert file.write(make_record(0), make_block(make_record(0)))
        assert len(check(open_file(disk))) == 1


@pytest.mark.parametrize(
    ("place", "cause"), [(8, "version"), (0, "header"), (12, "damaged"), (20, "another model")]
)
def test_a_file_of_another_version_or_with_a_damaged_header_begins_anew(
    place: int, cause: str
) -> None:
    disk = SimulatedDisk()
    fill(disk, range(2))
    disk.data[place] ^= 64
    again = open_file(disk)
    assert cause in again.reset_cause
    assert len(again) == 0
    assert open_file(disk).reset_cause == ""


def test_a_file_of_another_model_is_never_used() -> None:
    disk = SimulatedDisk()
    fill(disk, range(2))
    other = bytes(32)
    again = open_file(disk, other)
    assert "another model" in again.reset_cause
    assert len(again) == 0
    # Nor are records of it that were copied into a file of this model.
    first, second = SimulatedDisk(), SimulatedDisk()
    fill(first, range(2))
    open_file(second, other)
    second.data += first.data[PAGE_BYTES:]
    assert len(open_file(second, other)) == 0


def test_keys_that_differ_in_one_bit_are_different() -> None:
    file = open_file(SimulatedDisk())
    record = make_record(0)
    similar = record._replace(key=record.key[:15] + bytes([record.key[15] ^ 1]))
    file.write(record, make_block(record))
    assert file.read(similar.key) is None
    file.write(similar, make_block(similar))
    assert file.read(record.key) == make_block(record)
    assert file.read(similar.key) == make_block(similar)


def test_a_full_disk_keeps_what_it_has_and_goes_on() -> None:
    disk = SimulatedDisk(max_bytes=PAGE_BYTES + 2 * count_record_bytes(BLOCK_BYTES) + 700)
    file = fill(disk, range(2))
    with pytest.raises(OSError, match="No space"):
        file.write(make_record(2), make_block(make_record(2)))
    assert file.capacity == 2
    assert not file.write(make_record(2), make_block(make_record(2)))
    assert len(check(open_file(disk))) == 2
    file.evict([make_record(0).key])
    assert file.write(make_record(2), make_block(make_record(2)))
    assert check(file) == {make_record(1).key, make_record(2).key}


def test_a_smaller_size_cuts_the_file() -> None:
    disk = SimulatedDisk()
    fill(disk, range(CAPACITY))
    smaller = open_file(disk, size=SIZE - 2 * count_record_bytes(BLOCK_BYTES))
    assert (len(check(smaller)), smaller.capacity) == (CAPACITY - 2, CAPACITY - 2)
    with pytest.raises(RecordFileError, match="raise the size"):
        open_file(SimulatedDisk(), size=PAGE_BYTES + 100)


def test_a_discarded_block_does_not_come_back() -> None:
    disk = SimulatedDisk()
    file = fill(disk, range(3))
    file.evict([make_record(0).key])
    file.discard([make_record(1).key])
    # Its content was right, so that it may come back.
    assert check(open_file(disk)) == {make_record(0).key, make_record(2).key}


def test_a_key_that_a_crash_has_left_twice_is_discarded_whole() -> None:
    """It was evicted, overwritten and written elsewhere, and the crash has undone the second."""
    disk = SimulatedDisk()
    fill(disk, range(2))
    disk.data += disk.data[PAGE_BYTES : PAGE_BYTES + count_record_bytes(BLOCK_BYTES)]
    again = open_file(disk)
    assert len(check(again)) == 2
    again.discard([make_record(0).key])
    assert check(open_file(disk)) == {make_record(1).key}


def test_all_are_discarded_although_one_cannot_be_erased() -> None:
    disk = SimulatedDisk()
    file, write = fill(disk, range(3)), disk.write

    def fail_once(offset: int, data: bytes) -> None:
        disk.write = write  # type: ignore[method-assign]
        raise OSError(5, "Input/output error")

    disk.write = fail_once  # type: ignore[method-assign]
    with pytest.raises(OSError, match="Input/output"):
        file.discard([make_record(number).key for number in range(2)])
    assert check(file) == {make_record(2).key}
    # What could not be erased is overwritten by the same key.
    assert check(open_file(disk)) == {make_record(0).key, make_record(2).key}
    assert file.write(make_record(0), make_block(make_record(0)))
    assert len(open_file(disk)) == 2


def test_a_block_that_is_evicted_while_it_is_read_is_not_overwritten() -> None:
    disk = SimulatedDisk()
    file, read = fill(disk, range(CAPACITY)), disk.read
    first, other = make_record(0), make_record(90)
    during: list[bool] = []

    def evict_and_read(offset: int, num_bytes: int) -> bytes:
        if not during:
            file.evict([first.key])
            # Its place is the only one without a block.
            during.append(file.write(other, make_block(other)))
            during.append(file.write(first, make_block(first)))
        return read(offset, num_bytes)

    disk.read = evict_and_read  # type: ignore[method-assign]
    assert file.read(first.key) == make_block(first)
    assert during == [False, False]
    assert file.write(other, make_block(other))
    assert file.read(first.key) is None
    assert len(check(file)) == CAPACITY


class RefusedFile:
    """A path with a file that is not to be used."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "file"
        SystemFile(self.path).close()

    def refusal(self) -> str:
        with pytest.raises(RecordFileError) as caught:
            SystemFile(self.path)
        return str(caught.value)


def test_files_of_others_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = RefusedFile(tmp_path)
    assert file.path.stat().st_mode & 0o777 == 0o600
    opened = SystemFile(file.path)
    assert "in use by another engine" in file.refusal()
    opened.close()
    file.path.chmod(0o640)
    assert "chmod go=" in file.refusal()
    file.path.chmod(0o600)
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 4321)
        assert "give another path" in file.refusal()
    moved = file.path.rename(tmp_path / "moved")
    file.path.symlink_to(moved)
    assert "symbolic link" in file.refusal()
    file.path.unlink()
    os.mkfifo(file.path, 0o600)
    assert "not a regular file" in file.refusal()


def test_a_real_file_keeps_its_blocks(tmp_path: Path) -> None:
    path = tmp_path / "file"
    file = RecordFile(SystemFile(path), IDENTITY, BLOCK_BYTES, SIZE)
    for number in range(3):
        file.write(make_record(number), make_block(make_record(number)))
    file.prefetch([make_record(0).key, b"unknown"])
    file.close()
    again = RecordFile(SystemFile(path), IDENTITY, BLOCK_BYTES, SIZE)
    assert len(check(again)) == 3
    again.close()
