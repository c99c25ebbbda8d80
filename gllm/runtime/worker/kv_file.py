"""Memory file of a worker's KV cache, which outlives the worker.

The parent keeps the file open, so that a worker of the next epoch finds the blocks that its
predecessor has computed. Each block has a checksum of its first slots, to which each step adds
those that it has computed. Slots that were damaged have another one, and a slot that was being
written when the worker died is not counted.

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
from gllm.scheduler.intact_slots import NO_SLOTS, IntactSlots

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
        self._checksums: Tensor = self._map_numbers(num_blocks)
        self._counts: Tensor = self._map_numbers(num_blocks)
        """Slots of each block that its checksum counts."""
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
        """Add the slots that a step has computed to the checksums of their blocks.

        Args:
            slots: [tokens] int64: computed slots, block * block_size + offset in the block.
        """
        assert self._checker is not None, "the file is complete"
        self._checker.store(slots, self._checksums, self._counts)

    def find_intact_slots(self, num_threads: int = 1) -> IntactSlots:
        """Return the first slots of the earlier worker's blocks whose checksums are right.

        Wrong checksums are removed. Nothing is intact if there was no earlier worker.

        num_threads: threads that read the blocks.
        """
        if not self.has_content:
            return NO_SLOTS
        size = self._block_size
        # A count that is none is damaged itself.
        self._counts[(self._counts < 0) | (self._counts > size)] = 0
        blocks = self._counts.nonzero().flatten()
        last_slots = blocks * size + self._counts[blocks] - 1
        computed, counts = torch.zeros(2, self._num_blocks, dtype=torch.int64)
        checkers = [
            BlockChecksums(self._tensors, self._num_blocks, size) for _ in range(num_threads)
        ]
        with ThreadPoolExecutor(num_threads, "kv-checksums") as threads:
            parts = zip(checkers, last_slots.tensor_split(num_threads), strict=True)
            for done in [
                threads.submit(each.store, part, computed, counts) for each, part in parts
            ]:
                done.result()
        self._counts[self._checksums != computed] = 0
        full = np.packbits((self._counts == size).numpy(), bitorder="little").tobytes()
        begun = ((self._counts > 0) & (self._counts < size)).nonzero().flatten()
        return IntactSlots(
            full, dict(zip(begun.tolist(), self._counts[begun].tolist(), strict=True))
        )

    def _map_numbers(self, count: int) -> Tensor:
        """Map the next part of the file as numbers [count] int64."""
        memory = self._map(count * torch.int64.itemsize)
        return torch.frombuffer(memory, dtype=torch.int64, count=count)

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
