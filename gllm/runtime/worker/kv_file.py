"""Memory file of a worker's KV cache, which outlives the worker.

The parent keeps the file open, so that a worker of the next epoch finds the blocks that its
predecessor has computed. Each full block has a checksum, stored once the block's last slot is
computed. A block that was damaged, or that was being written when the worker died, has another one.

The driver knows which of the blocks belong to committed steps
(gllm/runtime/driver/hash_file.py).
"""

import math
import mmap
import os
import struct
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from hashlib import blake2b

import numpy as np
import torch
from torch import Tensor

from gllm.kernels.block_checksum import BlockChecksums

_DIGEST_BYTES = 32
_HEADER = struct.Struct(f"={_DIGEST_BYTES}sQ")
"""Digest of the description of the cache, and size of the file; zeros until it is complete."""


class KvFile:
    """Creates the tensors of a KV cache in a memory file, or finds those of the earlier worker.

    The file has a header, a checksum per block, and the tensors, each from the beginning of a page.
    A page takes no memory until it is written. What is mapped stays mapped when the descriptor is
    closed.
    """

    def __init__(self, descriptor: int, description: str, num_blocks: int, block_size: int) -> None:
        """Map the header and the checksums.

        Args:
            descriptor: file descriptor of a memory file: a new one, or that of an earlier worker.
            description: all that decides the layout and the content of the cache, apart from the
                other arguments. A file with another one is emptied.
            num_blocks: blocks that have a checksum.
            block_size: tokens per block.

        Raises:
            OSError: the file cannot have the size, or cannot be mapped.
        """
        self._descriptor = descriptor
        self._num_blocks, self._block_size = num_blocks, block_size
        text = f"{description}; {num_blocks} blocks of {block_size} tokens"
        self._digest = blake2b(text.encode(), digest_size=_DIGEST_BYTES).digest()
        size = os.fstat(descriptor).st_size
        header = os.pread(descriptor, _HEADER.size, 0)
        self.has_content = header == _HEADER.pack(self._digest, size)
        """True if the file has the blocks of an earlier worker."""
        if not self.has_content:
            os.ftruncate(descriptor, 0)
        self._end = 0
        self._header = self._map(_HEADER.size)
        self._checksums: Tensor = torch.frombuffer(
            self._map(num_blocks * torch.int64.itemsize), dtype=torch.int64, count=num_blocks
        )
        self._tensors: list[Tensor] = []
        self._checker: BlockChecksums | None = None

    def create(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the next tensor of the cache: zeros, or the content of the earlier worker.

        Args:
            shape: [num_blocks or more, ...].
            dtype: dtype of the elements.

        Raises:
            OSError: the file cannot have the size, or cannot be mapped.
        """
        tensor = self.create_unchecked(shape, dtype)
        self._tensors.append(tensor)
        return tensor

    def create_unchecked(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return the next tensor, which checksums leave out: no text depends on its content.

        For the arguments and errors see `create`.
        """
        memory = self._map(math.prod(shape) * dtype.itemsize)
        return torch.frombuffer(memory, dtype=dtype, count=math.prod(shape)).view(shape)

    def complete(self) -> None:
        """Let later workers use the content, once all tensors have been created."""
        self._checker = BlockChecksums(self._tensors, self._num_blocks, self._block_size)
        _HEADER.pack_into(self._header, 0, self._digest, self._end)

    def store_checksums(self, slots: Tensor) -> None:
        """Store the checksums of the blocks whose last slot a step has computed.

        Args:
            slots: [tokens] int64: computed slots, block * block_size + offset in the block.
        """
        assert self._checker is not None, "the file is complete"
        self._checker.store(slots, self._checksums)

    def find_intact_blocks(self, num_threads: int = 1) -> bytes:
        """Return the blocks of the earlier worker whose checksums are right, as a bit per block.

        The lowest bit of the first byte is block 0. Wrong checksums are removed. The result is
        empty if there was no earlier worker.

        num_threads: threads that read the blocks.
        """
        if not self.has_content:
            return b""
        last_slots = (self._checksums.nonzero().flatten() + 1) * self._block_size - 1
        computed = torch.zeros_like(self._checksums)
        checkers = [
            BlockChecksums(self._tensors, self._num_blocks, self._block_size)
            for _ in range(num_threads)
        ]
        with ThreadPoolExecutor(num_threads, "kv-checksums") as threads:
            parts = zip(checkers, last_slots.tensor_split(num_threads), strict=True)
            for done in [threads.submit(each.store, part, computed) for each, part in parts]:
                done.result()
        is_intact = (self._checksums != 0) & (self._checksums == computed)
        self._checksums[~is_intact] = 0
        return np.packbits(is_intact.numpy(), bitorder="little").tobytes()

    def _map(self, num_bytes: int) -> mmap.mmap:
        """Map the next part of the file."""
        size = max(1, -(-num_bytes // mmap.PAGESIZE)) * mmap.PAGESIZE
        begin, self._end = self._end, self._end + size
        if os.fstat(self._descriptor).st_size < self._end:
            os.ftruncate(self._descriptor, self._end)
        memory = mmap.mmap(self._descriptor, size, offset=begin)
        # Huge pages, as in other large tensors, where the system permits them in memory files.
        with suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
        return memory
