"""Memory file with the prefix-cache hash of each KV block, which outlives the driver.

It names the blocks that later drivers can adopt, and the first slots of others: those of committed
steps, because the scheduler names no others and removes a name before a step may write to slots
that it covers. The workers know which of them are intact (gllm/runtime/worker/kv_file.py).
"""

import mmap
import os
import struct
from collections.abc import Iterator

from gllm.scheduler.block_pool import HASH_BYTES, BlockListener

_HEADER = struct.Struct("=Q8x")
"""Number of blocks."""
_NO_HASH = bytes(HASH_BYTES)
_FULL, _TAIL = 0, 1
"""Kinds of hashes: of all slots of a block, and of its first ones."""
_PART_BYTES = 1024 * HASH_BYTES
"""Most of the file has no hashes: parts of zeros are skipped."""


class HashFile(BlockListener):
    """Copy of a block pool's hashes in a memory file; as a listener of the pool.

    The file has a header, the hash of each block, and a byte per block for its kind. A hash that
    was half written when the driver died is that of no tokens, so it is never found. The kind of a
    block changes while it has no hash.
    """

    def __init__(self, descriptor: int, num_blocks: int) -> None:
        """Read the hashes of the earlier driver and remove them from the file.

        Args:
            descriptor: file descriptor of a memory file, which the caller closes: a new file, or
                that of the earlier driver. One for another number of blocks counts as new.
            num_blocks: blocks of the pool.

        Raises:
            OSError: the file cannot have the size, or cannot be mapped.
        """
        self._kinds = _HEADER.size + num_blocks * HASH_BYTES
        """Offset of the kinds."""
        self._size = self._kinds + num_blocks
        self.earlier: dict[int, bytes] = {}
        """Hash of each block that the earlier driver had published; no hash is there twice."""
        self.earlier_tails: dict[int, bytes] = {}
        """Hash of the first slots of each block that it had begun; none is there twice."""
        header = os.pread(descriptor, _HEADER.size, 0)
        has_content = header == _HEADER.pack(num_blocks)
        if not has_content or os.fstat(descriptor).st_size != self._size:
            os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, self._size)
        self._memory = mmap.mmap(descriptor, self._size)
        full: dict[bytes, int] = {}
        tails: dict[bytes, int] = {}
        for block, digest in self._read_hashes():
            is_tail = self._memory[self._kinds + block] == _TAIL
            (tails if is_tail else full).setdefault(digest, block)
        self.earlier = {block: digest for digest, block in full.items()}
        self.earlier_tails = {block: digest for digest, block in tails.items()}
        self.on_cleared()
        _HEADER.pack_into(self._memory, 0, num_blocks)

    def _read_hashes(self) -> Iterator[tuple[int, bytes]]:
        """Yield the blocks that have a hash, with it."""
        data = self._memory[_HEADER.size : self._kinds]
        for begin in range(0, len(data), _PART_BYTES):
            part = data[begin : begin + _PART_BYTES]
            if part.count(0) < len(part):
                for offset in range(0, len(part), HASH_BYTES):
                    if (digest := part[offset : offset + HASH_BYTES]) != _NO_HASH:
                        yield (begin + offset) // HASH_BYTES, digest

    def on_added(self, block: int, digest: bytes) -> None:
        """Record the hash of a block that was added to the prefix cache."""
        self._write(block, digest, _FULL)

    def on_tail(self, block: int, digest: bytes) -> None:
        """Record the hash of the first slots of a block."""
        self._write(block, digest, _TAIL)

    def on_removed(self, block: int, digest: bytes) -> None:
        """Record that a block was removed from the prefix cache."""
        self._write_hash(block, _NO_HASH)

    def on_tail_removed(self, block: int) -> None:
        """Record that the first slots of a block have no name any more."""
        self._write_hash(block, _NO_HASH)

    def _write(self, block: int, digest: bytes, kind: int) -> None:
        if self._memory[self._kinds + block] != kind:
            self._write_hash(block, _NO_HASH)
            self._memory[self._kinds + block] = kind
        self._write_hash(block, digest)

    def _write_hash(self, block: int, digest: bytes) -> None:
        begin = _HEADER.size + block * HASH_BYTES
        self._memory[begin : begin + HASH_BYTES] = digest

    def on_cleared(self) -> None:
        """Record that all blocks were removed from the prefix cache."""
        self._memory[_HEADER.size :] = bytes(self._size - _HEADER.size)

    def close(self) -> None:
        """Unmap the file, whose content stays."""
        self._memory.close()
