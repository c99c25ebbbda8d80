"""File of KV blocks of one worker: fixed-size records with checksums, and their index in memory.

Records are appended until the file has its size. After that the records of evicted keys are
overwritten: all blocks of a worker have the same number of bytes, so nothing is ever compacted.
Which keys are evicted decides the driver. The index is rebuilt from the headers of the records.

Writes may be lost or torn in any order by a crash. Nothing of the file is therefore believed
without its checksum: that of a header when the file is opened, that of the block when it is read.
"""

import hashlib
import os
import struct
import threading
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from errno import ELOOP
from fcntl import LOCK_EX, LOCK_NB, flock
from pathlib import Path
from typing import Protocol

from gllm.options.ownership import ownership_fault
from gllm.scheduler.disk_index import DiskBlock

FORMAT_VERSION = 1
"""Version of the format; a file of another version is started anew."""
PAGE_BYTES = 4096
"""Size of the file's header, and alignment of the records."""
CHECKSUM_BYTES = 16
"""Leading bytes of the SHA-256 digests that serve as checksums."""

_FILE_MAGIC, _RECORD_MAGIC = b"gllm-kv\n", b"kvr\n"
_FILE_HEADER = struct.Struct(f"<8sIQ32s{CHECKSUM_BYTES}s")
"""Magic, version, bytes per block, identity, checksum."""
_FIELDS = struct.Struct(f"<4s16s16sQd{CHECKSUM_BYTES}s")
"""Magic, key, parent, position, priority, checksum of the block."""
_RECORD_HEADER_BYTES = _FIELDS.size + CHECKSUM_BYTES


class RecordFileError(Exception):
    """A file of KV blocks cannot be used; the message has the fix."""


class RandomAccessFile(Protocol):
    """Interface of the file below a RecordFile. All methods may raise OSError."""

    def size(self) -> int:
        """Return the size in bytes."""

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes; fewer at the end of the file."""

    def write(self, offset: int, data: bytes) -> None:
        """Write all bytes; the file grows if necessary."""

    def truncate(self, num_bytes: int) -> None:
        """Cut the file."""

    def prefetch(self, offset: int, num_bytes: int) -> None:
        """Begin to read bytes into the memory of the operating system, without waiting."""

    def sync(self) -> None:
        """Return once no crash can undo what was written so far."""

    def close(self) -> None:
        """Close the file."""


class SystemFile:
    """Random-access file of the operating system, which belongs to this process alone."""

    def __init__(self, path: Path) -> None:
        """Open a file, or create it with mode 0600.

        Raises:
            RecordFileError: The file is no regular file of this user alone, or another process has
                it open.
            OSError: It cannot be opened.
        """
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        try:
            self._descriptor = os.open(path, flags, 0o600)
        except OSError as error:
            if error.errno == ELOOP:
                raise RecordFileError(f"{path} is a symbolic link: remove it") from None
            raise
        try:
            check_ownership(os.fstat(self._descriptor), path)
            flock(self._descriptor, LOCK_EX | LOCK_NB)
            # Reads are of single records: more would be read for nothing.
            os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        except BlockingIOError:
            os.close(self._descriptor)
            raise RecordFileError(
                f"{path} is in use by another engine of the same model: give this one another path"
            ) from None
        except BaseException:
            os.close(self._descriptor)
            raise

    def size(self) -> int:
        """Return the size in bytes."""
        return os.fstat(self._descriptor).st_size

    def read(self, offset: int, num_bytes: int) -> bytes:
        """Return bytes; fewer at the end of the file."""
        return os.pread(self._descriptor, num_bytes, offset)

    def write(self, offset: int, data: bytes) -> None:
        """Write all bytes; the file grows if necessary."""
        view = memoryview(data)
        while view:
            num_bytes = os.pwrite(self._descriptor, view, offset)
            view, offset = view[num_bytes:], offset + num_bytes

    def truncate(self, num_bytes: int) -> None:
        """Cut the file."""
        os.ftruncate(self._descriptor, num_bytes)

    def prefetch(self, offset: int, num_bytes: int) -> None:
        """Begin to read bytes into the memory of the operating system, without waiting."""
        os.posix_fadvise(self._descriptor, offset, num_bytes, os.POSIX_FADV_WILLNEED)

    def sync(self) -> None:
        """Return once no crash can undo what was written so far."""
        os.fdatasync(self._descriptor)

    def close(self) -> None:
        """Close the file, which another process may open then."""
        os.close(self._descriptor)


def check_ownership(status: os.stat_result, path: Path, is_folder: bool = False) -> None:
    """Raise RecordFileError if a file or folder may be the work of others; see ownership_fault."""
    if fault := ownership_fault(status, is_folder):
        raise RecordFileError(f"{path} {fault}")


def count_record_bytes(block_bytes: int) -> int:
    """Return the bytes that a block of a size takes in the file."""
    return -(-(_RECORD_HEADER_BYTES + block_bytes) // PAGE_BYTES) * PAGE_BYTES


class RecordFile:
    """Index and contents of one file of KV blocks. One thread writes, any number of threads read.

    The caller removes keys to make space.
    """

    def __init__(
        self, file: RandomAccessFile, identity: bytes, block_bytes: int, max_bytes: int
    ) -> None:
        """Rebuild the index; a torn record at the end is cut off.

        Args:
            file: the file, which this object closes.
            identity: 32-byte digest of all that decides the meaning of the blocks. A file with
                another one is emptied.
            block_bytes: size of each block.
            max_bytes: size that the file may have. Records beyond it are cut off.

        Raises:
            RecordFileError: `max_bytes` is too small for one block.
            OSError: The file cannot be read or written.
        """
        self._file, self._identity, self.block_bytes = file, identity, block_bytes
        self._stride = count_record_bytes(block_bytes)
        self.capacity = (max_bytes - PAGE_BYTES) // self._stride
        """Blocks that fit; lowered when the disk is full."""
        if self.capacity < 1:
            raise RecordFileError(
                f"a block takes {self._stride} bytes, but the file may have {max_bytes}: raise the "
                "size"
            )
        self._lock = threading.Lock()
        self._slots: dict[bytes, int] = {}
        self._records: dict[bytes, DiskBlock] = {}
        self._free: list[int] = []
        self._num_slots = 0
        self._readers: Counter[int] = Counter()
        """Running reads by slot; such a slot is not written."""
        self._retired: set[int] = set()
        """Slots that are free once they are no longer read."""
        self._stale: dict[bytes, int] = {}
        """Slots of removed keys whose record is still in the file. A key that is added again gets
        the same slot, so that no key has two records."""
        self._stale_keys: dict[int, bytes] = {}
        """The keys by slot."""
        self.reset_cause = ""
        """Reason why an existing file was emptied; empty if it was not."""
        self._open()

    def __len__(self) -> int:
        return len(self._slots)

    def __contains__(self, key: bytes) -> bool:
        return key in self._slots

    @property
    def records(self) -> list[DiskBlock]:
        """All records, in no particular order."""
        with self._lock:
            return list(self._records.values())

    def write(self, record: DiskBlock, block: bytes) -> bool:
        """Add a block; return False if there is no space.

        Raises:
            OSError: The file cannot be written. The block is not there, the others are.
        """
        with self._lock:
            if record.key in self._slots:
                return True
            is_appended = not self._free
            slot = self._stale.get(record.key, -1)
            if slot in self._retired:
                return False
            if slot >= 0:
                self._free.remove(slot)
            elif not is_appended:
                slot = self._free.pop()
            elif self._num_slots < self.capacity:
                slot = self._num_slots
                self._num_slots += 1
            else:
                return False
        try:
            self._file.write(self._offset(slot), self._encode(record, block))
        except OSError:
            self._undo_write(slot, is_appended)
            raise
        with self._lock:
            self._forget_stale(slot)
            self._slots[record.key] = slot
            self._records[record.key] = record
        return True

    def read(self, key: bytes) -> bytes | None:
        """Return a block; None if it is not there, or damaged and therefore removed.

        Raises:
            OSError: The file cannot be read; the block is removed.
        """
        with self._lock:
            slot = self._slots.get(key)
            if slot is None:
                return None
            self._readers[slot] += 1
        block = None
        try:
            data = self._file.read(self._offset(slot), _RECORD_HEADER_BYTES + self.block_bytes)
            block = self._decode_block(key, data)
        finally:
            with self._lock:
                self._readers[slot] -= 1
                if not self._readers[slot]:
                    del self._readers[slot]
                    if slot in self._retired:
                        self._retired.remove(slot)
                        self._free.append(slot)
                if block is None and self._slots.get(key) == slot:
                    self._remove(key)
        return block

    def prefetch(self, keys: Iterable[bytes]) -> None:
        """Begin to read blocks into the memory of the operating system; unknown keys are ignored.

        Raises OSError.
        """
        with self._lock:
            slots = [self._slots[key] for key in keys if key in self._slots]
        for slot in slots:
            self._file.prefetch(self._offset(slot), _RECORD_HEADER_BYTES + self.block_bytes)

    def evict(self, keys: Iterable[bytes]) -> None:
        """Make space for other blocks; unknown keys are ignored."""
        with self._lock:
            for key in keys:
                self._remove(key)

    def discard(self, keys: Iterable[bytes]) -> None:
        """Remove blocks with a wrong content, which must not be found after a restart either.

        Called by the thread that writes.

        Raises:
            OSError: The file cannot be written. The blocks are not there, but some may come back
                after a restart.
        """
        with self._lock:
            removed = list(keys)
            for key in removed:
                self._remove(key)
        error: OSError | None = None
        for key in removed:
            slot = self._stale.get(key)
            if slot is None:
                continue
            try:
                self._erase(slot)
            except OSError as cause:
                error = cause
                continue
            with self._lock:
                self._forget_stale(slot)
        # Also for keys that were overwritten: a crash could undo that.
        self._file.sync()
        if error is not None:
            raise error

    def close(self) -> None:
        """Close the file. Nothing may be read or written at the same time or afterwards."""
        self._file.close()

    def _open(self) -> None:
        size = self._file.size()
        header = self._encode_file_header()
        if size:
            self.reset_cause = self._reset_reason(self._file.read(0, _FILE_HEADER.size), header)
        if not size or self.reset_cause:
            self._file.truncate(0)
            self._file.write(0, header.ljust(PAGE_BYTES, b"\0"))
            return
        self._num_slots = min(max(0, size - PAGE_BYTES) // self._stride, self.capacity)
        end = self._offset(self._num_slots)
        if size != end:
            # A torn record, or more than the file may have now. Short files get their first page.
            self._file.truncate(end)
        for slot in range(self._num_slots):
            record = self._decode_header(self._file.read(self._offset(slot), _RECORD_HEADER_BYTES))
            if record is None:
                self._free.append(slot)
            elif record.key in self._slots:
                # A crash has undone a later write. It would come back if the other one is removed.
                self._erase(slot)
                self._free.append(slot)
            else:
                self._slots[record.key] = slot
                self._records[record.key] = record

    def _reset_reason(self, data: bytes, expected: bytes) -> str:
        """Return why an existing file has to be emptied; empty if it has not."""
        if data == expected:
            return ""
        if len(data) < _FILE_HEADER.size or not data.startswith(_FILE_MAGIC):
            return "it has no valid header"
        _, version, _, identity, _ = _FILE_HEADER.unpack(data)
        if version != FORMAT_VERSION:
            return f"it has version {version} of the format, not {FORMAT_VERSION}"
        return "its header is damaged" if identity == self._identity else "it is of another model"

    def _undo_write(self, slot: int, is_appended: bool) -> None:
        """Free the slot of a failed write; an appended one is cut off, and the file stays so."""
        if not is_appended:
            # The block may be whole all the same.
            with suppress(OSError):
                self._erase(slot)
            with self._lock:
                self._free.append(slot)
            return
        with self._lock:
            self._num_slots = self.capacity = slot
        self._file.truncate(self._offset(slot))

    def _remove(self, key: bytes) -> None:
        """Remove a key; the lock is held."""
        slot = self._slots.pop(key, None)
        if slot is None:
            return
        del self._records[key]
        self._stale[key], self._stale_keys[slot] = slot, key
        if self._readers[slot]:
            self._retired.add(slot)
        else:
            self._free.append(slot)

    def _forget_stale(self, slot: int) -> None:
        """Note that a slot is overwritten; the lock is held."""
        key = self._stale_keys.pop(slot, None)
        if key is not None:
            self._stale.pop(key, None)

    def _erase(self, slot: int) -> None:
        """Overwrite the header of a slot that has no record any more."""
        self._file.write(self._offset(slot), bytes(_RECORD_HEADER_BYTES))

    def _offset(self, slot: int) -> int:
        return PAGE_BYTES + slot * self._stride

    def _encode_file_header(self) -> bytes:
        fields = (_FILE_MAGIC, FORMAT_VERSION, self.block_bytes, self._identity)
        checksum = _checksum(repr(fields).encode())
        return _FILE_HEADER.pack(*fields, checksum)

    def _encode(self, record: DiskBlock, block: bytes) -> bytes:
        assert len(block) == self.block_bytes, "all blocks of a worker have one size"
        fields = _FIELDS.pack(_RECORD_MAGIC, *record, _checksum(self._identity, record.key, block))
        padding = bytes(self._stride - _RECORD_HEADER_BYTES - self.block_bytes)
        return b"".join((fields, _checksum(self._identity, fields), block, padding))

    def _decode_header(self, data: bytes) -> DiskBlock | None:
        """Return the record of a header; None if it is not valid."""
        if len(data) < _RECORD_HEADER_BYTES:
            return None
        fields = data[: _FIELDS.size]
        if _checksum(self._identity, fields) != data[_FIELDS.size : _RECORD_HEADER_BYTES]:
            return None
        magic, *values, _ = _FIELDS.unpack(fields)
        return DiskBlock(*values) if magic == _RECORD_MAGIC else None

    def _decode_block(self, key: bytes, data: bytes) -> bytes | None:
        """Return the block of a record; None if that is not the whole block of the key."""
        record = self._decode_header(data)
        block = data[_RECORD_HEADER_BYTES:]
        if record is None or record.key != key or len(block) != self.block_bytes:
            return None
        checksum = data[_FIELDS.size - CHECKSUM_BYTES : _FIELDS.size]
        return block if _checksum(self._identity, key, block) == checksum else None


def _checksum(*parts: bytes) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()[:CHECKSUM_BYTES]
