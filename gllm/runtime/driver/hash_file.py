"""Memory file with the prefix-cache hash of each KV block, which outlives the driver.

It names the blocks that later drivers can adopt: those of committed steps, because the scheduler
publishes no others and removes a block before a step may write to it again. The workers know which
of them are intact (gllm/runtime/worker/kv_file.py).
"""

import mmap
import os
import struct
from collections.abc import Iterator

from gllm.scheduler.block_pool import HASH_BYTES, BlockListener

_HEADER = struct.Struct("=Q8x")
"""Number of blocks."""
_NO_HASH = bytes(HASH_BYTES)
_PART_BYTES = 1024 * HASH_BYTES
"""Most of the file has no hashes: parts of zeros are skipped."""


class HashFile(BlockListener):
    """Copy of a block pool's hashes in a memory file; as a listener of the pool.

    A hash that was half written when the driver died is that of no tokens, so it is never found.
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
        self._size = _HEADER.size + num_blocks * HASH_BYTES
        self.earlier: dict[int, bytes] = {}
        """Hash of each block that the earlier driver had published; no hash is there twice."""
        header = os.pread(descriptor, _HEADER.size, 0)
        has_content = header == _HEADER.pack(num_blocks)
        if not has_content or os.fstat(descriptor).st_size != self._size:
            os.ftruncate(descriptor, 0)
        os.ftruncate(descriptor, self._size)
        self._memory = mmap.mmap(descriptor, self._size)
        by_hash: dict[bytes, int] = {}
        for block, digest in self._read_hashes():
            by_hash.setdefault(digest, block)
        self.earlier = {block: digest for digest, block in by_hash.items()}
        self.on_cleared()
        _HEADER.pack_into(self._memory, 0, num_blocks)

    def _read_hashes(self) -> Iterator[tuple[int, bytes]]:
        """Yield the blocks that have a hash, with it."""
        data = self._memory[_HEADER.size :]
        for begin in range(0, len(data), _PART_BYTES):
            part = data[begin : begin + _PART_BYTES]
            if part.count(0) < len(part):
                for offset in range(0, len(part), HASH_BYTES):
                    if (digest := part[offset : offset + HASH_BYTES]) != _NO_HASH:
                        yield (begin + offset) // HASH_BYTES, digest

    def on_added(self, block: int, digest: bytes) -> None:
        """Record the hash of a block that was added to the prefix cache."""
        begin = _HEADER.size + block * HASH_BYTES
        self._memory[begin : begin + HASH_BYTES] = digest

    def on_removed(self, block: int, digest: bytes) -> None:
        """Record that a block was removed from the prefix cache."""
        self.on_added(block, _NO_HASH)

    def on_cleared(self) -> None:
        """Record that all blocks were removed from the prefix cache."""
        self._memory[_HEADER.size :] = bytes(self._size - _HEADER.size)

    def close(self) -> None:
        """Unmap the file, whose content stays."""
        self._memory.close()
