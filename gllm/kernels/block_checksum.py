"""Checksums of KV blocks: 64 bits over the bytes of a block in all layers of a stage.

They tell damaged or half-written blocks from complete ones, without cryptographic strength: no
attacker chooses the bytes.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gllm.kernels.native.library import ChecksumArguments, current_library

_STEP = 0x9E3779B97F4A7C15 - 2**64
"""Difference between the keys of consecutive words, as a signed number: `STEP` of checksum.cpp."""
_LOW = 0xFFFFFFFF
_WORD_BYTES = 8


class BlockChecksums:
    """Computes the checksums of the blocks of a paged cache in the memory of the host.

    A checksum is the sum modulo 2^64, over all 8-byte words of the block, of the word and of the
    product of the halves of the word combined with a key of its position. The result 0 is replaced
    by 1, so that 0 can stand for "none". Source of the product: Black, Halevi, Krawczyk, Krovetz
    and Rogaway, "UMAC" (1999), section 3.
    """

    def __init__(self, tensors: Sequence[Tensor], num_blocks: int, block_size: int) -> None:
        """Prepare the checksums of a cache; the library of this context computes them.

        Args:
            tensors: contiguous, [blocks, ...] each, with `num_blocks` blocks or more.
            num_blocks: blocks that have a checksum.
            block_size: slots per block.
        """
        self._tensors = list(tensors)
        self._num_blocks, self._block_size = num_blocks, block_size
        self._addresses = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64)
        sizes = [t[0].numel() * t.itemsize for t in tensors]
        self._block_bytes = torch.tensor(sizes, dtype=torch.int64)
        self._arguments = ChecksumArguments(
            addresses=self._addresses.data_ptr(),
            block_bytes=self._block_bytes.data_ptr(),
            num_tensors=len(tensors),
            num_blocks=num_blocks,
            block_size=block_size,
        )
        self._function: Any = None
        if (library := current_library()) is not None:
            self._function = library.function(self._arguments)

    def store(self, slots: Tensor, checksums: Tensor) -> None:
        """Store the checksum of each block whose last slot is listed; not thread-safe.

        Args:
            slots: [any] int64, contiguous: block * block_size + offset. Blocks from `num_blocks` on
                are ignored.
            checksums: [num_blocks] int64, contiguous.
        """
        if self._function is None:
            self.store_by_torch(slots, checksums)
            return
        # A new structure would take longer than the rest of a call without a full block.
        arguments = self._arguments
        arguments.checksums, arguments.slots = checksums.data_ptr(), slots.data_ptr()
        arguments.num_slots = len(slots)
        self._function(arguments)

    def store_by_torch(self, slots: Tensor, checksums: Tensor) -> None:
        """Store the same checksums without the compiled kernel; see `store`."""
        size = self._block_size
        blocks = slots[slots % size == size - 1] // size
        blocks = blocks[blocks < self._num_blocks]
        if not len(blocks):
            return
        sums, num_words = torch.zeros(len(blocks), dtype=torch.int64), 0
        for tensor in self._tensors:
            words = _read_words(tensor, blocks)
            numbers = torch.arange(num_words + 1, num_words + words.shape[1] + 1)
            mixed = words ^ (numbers * _STEP)
            sums += (words + (mixed & _LOW) * (mixed >> 32 & _LOW)).sum(dim=1)
            num_words += words.shape[1]
        checksums[blocks] = torch.where(sums == 0, torch.ones_like(sums), sums)


def _read_words(tensor: Tensor, blocks: Tensor) -> Tensor:
    """Return the bytes of some blocks of a tensor as [blocks, words] int64, padded with zeros."""
    rows = tensor.view(torch.uint8).reshape(len(tensor), -1)[blocks]
    padding = -rows.shape[1] % _WORD_BYTES
    return torch.nn.functional.pad(rows, (0, padding)).view(torch.int64)
