"""Files of KV blocks: crashes at every write, damage, and files that are not to be used."""

import os
import random
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


def run_operations(num_operations: int, num_crash_states: int, seed: int) -> int:
    """Write, evict, discard and read at random, with crashes; return the number of crash states.

    After each write the file is opened as it may be after a crash at that moment: no block has
    another content than its own, and no block is missing that was complete before.
    """
    choice = random.Random(seed)
    disk, num_crashes = SimulatedDisk(), 0
    file, kept = open_file(disk), set[bytes]()
    for _ in range(num_operations):
        record, num_writes = make_record(choice.randrange(12)), disk.num_writes
        disk.sync()
        safe = set(kept)
        match choice.randrange(8):
            case 0:
                file.discard([record.key])
                kept.discard(record.key)
            case 1:
                file.evict([record.key])
                kept.discard(record.key)
            case 2 | 3:
                block = file.read(record.key)
                assert block == (make_block(record) if record.key in kept else None)
            case _:
                if len(file) == file.capacity and kept - {record.key}:
                    victim = choice.choice(sorted(kept - {record.key}))
                    file.evict([victim])
                    kept.discard(victim)
                    safe.discard(victim)
                if file.write(record, make_block(record)):
                    kept.add(record.key)
        assert {each.key for each in file.records} == kept
        if disk.num_writes == num_writes:
            continue
        for state in disk.crash_states(choice, num_crash_states):
            num_crashes += 1
            found = check(open_file(state))
            assert safe & kept <= found
        if choice.random() < 0.02:
            # One of the crashes happens.
            disk = disk.crash_states(choice, 1)[0]
            file = open_file(disk)
            kept = check(file)
    return num_crashes


def test_no_wrong_block_is_returned_after_a_crash_at_any_write() -> None:
    assert run_operations(10_000, 1, seed=1) > 3500


@pytest.mark.full
@pytest.mark.parametrize("seed", range(4))
def test_no_wrong_block_is_returned_after_several_crashes_at_any_write(seed: int) -> None:
    assert run_operations(25_000, 3, seed) > 25_000


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
