"""Checksums of KV blocks: 64 bits over the bytes of a block's first slots in all layers of a stage.

They tell damaged or half-written slots from complete ones, without cryptographic strength: no
attacker chooses the bytes.
"""

from collections.abc import Iterator, Sequence
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

    A checksum is the sum modulo 2^64, over all 8-byte words of the slots, of the word and of the
    product of the halves of the word combined with a key of its position. So a step adds the share
    of the slots that it has written. Source of the product: Black, Halevi, Krawczyk, Krovetz and
    Rogaway, "UMAC" (1999), section 3.
    """

    def __init__(self, tensors: Sequence[Tensor], num_blocks: int, block_size: int) -> None:
        """Prepare the checksums of a cache; the library of this context computes them.

        Args:
            tensors: contiguous, [blocks, block_size, ...] each, with `num_blocks` blocks or more.
            num_blocks: blocks that have a checksum.
            block_size: slots per block.
        """
        self._tensors = list(tensors)
        self._num_blocks, self._block_size = num_blocks, block_size
        self._addresses = torch.tensor([t.data_ptr() for t in tensors], dtype=torch.int64)
        sizes = [t[0, 0].numel() * t.itemsize for t in tensors]
        self._slot_bytes = torch.tensor(sizes, dtype=torch.int64)
        self._arguments = ChecksumArguments(
            addresses=self._addresses.data_ptr(),
            slot_bytes=self._slot_bytes.data_ptr(),
            num_tensors=len(tensors),
            num_blocks=num_blocks,
            block_size=block_size,
        )
        self._function: Any = None
        if (library := current_library()) is not None:
            self._function = library.function(self._arguments)

    def store(self, slots: Tensor, checksums: Tensor, counts: Tensor) -> None:
        """Extend the checksums of blocks by slots that were written; not thread-safe.

        The slots of a block before those that are listed have been written earlier. If they are not
        those that its checksum counts, they are read again.

        Args:
            slots: [any] int64, contiguous: block * block_size + offset. Blocks from `num_blocks` on
                are ignored.
            checksums: [num_blocks] int64, contiguous: of the first slots of each block.
            counts: [num_blocks] int64, contiguous: how many slots these are; 0 for none.
        """
        if self._function is None:
            self.store_by_torch(slots, checksums, counts)
            return
        # A new structure would take longer than the rest of a call for a few slots.
        arguments = self._arguments
        arguments.checksums, arguments.slots = checksums.data_ptr(), slots.data_ptr()
        arguments.counts = counts.data_ptr()
        arguments.num_slots = len(slots)
        self._function(arguments)

    def store_by_torch(self, slots: Tensor, checksums: Tensor, counts: Tensor) -> None:
        """Store the same checksums without the compiled kernel; see `store`."""
        for block, begin, end in _find_runs(slots.tolist(), self._block_size):
            if block >= self._num_blocks:
                continue
            follows = begin > 0 and int(counts[block]) == begin
            first = begin if follows else 0
            before = int(checksums[block]) if follows else 0
            checksums[block] = _wrap(before + self._sum_slots(block, first, end))
            counts[block] = end

    def _sum_slots(self, block: int, begin: int, end: int) -> int:
        """Return the share of some slots in the checksum of their block."""
        total, num_words = 0, 0
        for tensor in self._tensors:
            words = _read_words(tensor[block, begin:end])
            numbers = (
                torch.arange(words.shape[1]) + words.shape[1] * torch.arange(begin, end)[:, None]
            )
            mixed = words ^ ((numbers + num_words + 1) * _STEP)
            total += int((words + (mixed & _LOW) * (mixed >> 32 & _LOW)).sum())
            num_words += words.shape[1] * self._block_size
        return total


def _find_runs(slots: Sequence[int], block_size: int) -> Iterator[tuple[int, int, int]]:
    """Yield block, first offset and end of each run of consecutive slots of one block."""
    index = 0
    while index < len(slots):
        block, begin = divmod(slots[index], block_size)
        end = begin + 1
        index += 1
        while index < len(slots) and end < block_size and slots[index] == slots[index - 1] + 1:
            index, end = index + 1, end + 1
        yield block, begin, end


def _wrap(number: int) -> int:
    """Return a number modulo 2^64 as a signed one."""
    return (number + 2**63) % 2**64 - 2**63


def _read_words(slots: Tensor) -> Tensor:
    """Return the bytes of slots [slots, ...] as [slots, words] int64, padded with zeros."""
    rows = slots.contiguous().view(torch.uint8).reshape(len(slots), -1)
    padding = -rows.shape[1] % _WORD_BYTES
    return torch.nn.functional.pad(rows, (0, padding)).view(torch.int64)
