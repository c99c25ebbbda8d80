"""Memory of a stage's rank groups, and the barrier of ranks without compiled kernels.

Per group, every rank has a line with the number of collectives for which its part is complete, and
places into which it writes its parts. The compiled kernels (gllm/kernels/native/all_reduce.cpp) use
the same memory.
"""

import ctypes
import mmap
import os
import threading
import time
from enum import IntEnum
from itertools import accumulate

import torch
from torch import Tensor

from gllm.kernels.all_reduce import GroupClosedError, GroupMismatchError
from gllm.kernels.native import library as native
from gllm.kernels.native.library import (
    MAX_RANKS,
    NUM_PLACES,
    CancelArguments,
    RankGroupState,
    RankSyncState,
)
from gllm.transport.ring import PAGE_BYTES, order_writes, round_up_to_pages

SPIN_SECONDS = 20e-6
"""Seconds of busy waiting before a rank sleeps; longer than most waits."""
MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 50e-6, 1e-3
"""First and largest sleep of a rank that polls; the sleep doubles each time."""
PARTS, VALUES = (0, 1, 2), (3, 4)
"""Kinds of buffers: large ones for parts of sums and logits, small ones for a few numbers or a
text."""


class CloseReason(IntEnum):
    """Reason why a communicator in shared memory is closed; values as in all_reduce.cpp."""

    OPEN = 0
    CANCELLED = 1
    MISMATCH = 2


class Collective(IntEnum):
    """Kind of a collective operation; the first three values are those of all_reduce.cpp."""

    ACQUIRE = 0
    SUM = 1
    MAXIMUM = 2
    GATHER = 3
    AGREE = 4
    BROADCAST = 5


class RegionMemory:
    """Shared memory of a stage's ranks: buffers, sequence numbers and close reason."""

    def __init__(
        self, descriptor: int, rank: int, ranks: int, capacities: list[int], value_bytes: int
    ) -> None:
        """Map the memory. Pages use memory once they are written.

        Args:
            descriptor: memory file, which may be closed afterwards.
            rank: number of this rank.
            ranks: number of ranks.
            capacities: largest tensor of each communicator, in floats.
            value_bytes: size of the small buffers.

        Raises:
            ValueError: there are more ranks than the kernels support.
        """
        if not 0 <= rank < ranks <= MAX_RANKS:
            raise ValueError(f"rank {rank} of {ranks} ranks: at most {MAX_RANKS} share a stage")
        self.rank, self.ranks = rank, ranks
        self.place_sizes = [
            [round_up_to_pages(4 * floats)] * len(PARTS)
            + [round_up_to_pages(value_bytes)] * len(VALUES)
            for floats in capacities
        ]
        """Sizes in bytes of the buffers of a rank, by communicator."""
        lines = round_up_to_pages(ranks * ctypes.sizeof(RankSyncState))
        self.begins = [PAGE_BYTES]
        """Offset of each group in bytes, and the size of the memory."""
        for sizes in self.place_sizes:
            self.begins.append(self.begins[-1] + lines + ranks * sum(sizes))
        os.ftruncate(descriptor, self.begins[-1])
        self.memory = mmap.mmap(descriptor, self.begins[-1])
        self._closed = ctypes.c_uint32.from_buffer(self.memory)
        self.pointers = [
            ctypes.pointer(self._create_state(begin, begin + lines, sizes))
            for begin, sizes in zip(self.begins, self.place_sizes, strict=False)
        ]
        """This rank's state of each group."""

    def _create_state(self, lines: int, parts: int, sizes: list[int]) -> RankGroupState:
        """Return the state of a group, none of whose places has been used.

        Args:
            lines: offset of the ranks' lines in bytes.
            parts: offset of their places in bytes.
            sizes: bytes of each rank's place.
        """
        begin = ctypes.addressof(self._closed)
        state = RankGroupState(
            lines=begin + lines,
            closed=begin,
            parts=begin + parts,
            rank_bytes=sum(sizes),
            offsets=(ctypes.c_int64 * NUM_PLACES)(*accumulate(sizes[:-1], initial=0)),
            rank=self.rank,
            size=self.ranks,
            # Fewer cores than ranks: the core is needed by the rank that this one waits for.
            spin_ns=int(SPIN_SECONDS * 1e9 * (len(os.sched_getaffinity(0)) >= self.ranks)),
            used=(ctypes.c_uint32 * NUM_PLACES)(*[2**32 - 1] * NUM_PLACES),
        )
        # Recorded calls hold the pointer, and so the state and the memory, while they exist.
        state.memory = self.memory
        return state

    def check(self) -> None:
        """Raise GroupClosedError or GroupMismatchError if the groups are closed."""
        if self._closed.value == CloseReason.CANCELLED:
            raise GroupClosedError("the group is closed")
        if self._closed.value == CloseReason.MISMATCH:
            raise GroupMismatchError("the ranks disagree on what they compute next")

    def cancel(self) -> None:
        """End every wait of every rank in all groups."""
        library = native.load_library()
        if library is None:
            self.close(CloseReason.CANCELLED)
            return
        for pointer in self.pointers:
            library(CancelArguments(pointer))

    def close(self, reason: CloseReason) -> None:
        """Set the reason for which polling ranks stop waiting, unless one is set."""
        if self._closed.value == CloseReason.OPEN:
            self._closed.value = reason


class GroupMemory:
    """One rank's view of the buffers and sequence numbers of one communicator in shared memory."""

    def __init__(self, region: RegionMemory, number: int) -> None:
        """Use the memory of the communicator with this number in a region."""
        self.region = region
        self.pointer = region.pointers[number]
        self.state: RankGroupState = self.pointer.contents
        self.lines = (RankSyncState * region.ranks).from_buffer(
            region.memory, region.begins[number]
        )
        self._fence = threading.Lock()
        begin = (self.state.parts or 0) - (self.state.closed or 0)
        self.places: list[list[Tensor]] = [
            [
                torch.frombuffer(
                    region.memory,
                    dtype=torch.uint8,
                    count=size,
                    offset=begin + rank * self.state.rank_bytes + offset,
                )
                for size, offset in zip(region.place_sizes[number], self.state.offsets, strict=True)
            ]
            for rank in range(region.ranks)
        ]
        """Buffers of each rank, uint8."""

    @property
    def is_ahead(self) -> bool:
        """True if another rank has not arrived at the last collective of this one."""
        own = self.lines[self.region.rank].sequence
        return any((line.sequence - own) % 2**32 >= 2**31 for line in self.lines)

    def last_used(self, places: tuple[int, ...]) -> int:
        """Return the index of the most recently used of some buffers."""
        sequence = self.state.sequence
        return min(places, key=lambda place: (sequence - self.state.used[place]) % 2**32)

    def wait_at_barrier(self, place: int, tag: int) -> None:
        """Wait until all ranks have arrived, as `barrier` in all_reduce.cpp, but by polling.

        Args:
            place: index of the buffer that is read afterwards.
            tag: identifies the collective (`make_tag`); the same on all ranks.

        Raises:
            GroupClosedError, GroupMismatchError: the group is closed, before or meanwhile.
        """
        self.region.check()
        line = self.lines[self.region.rank]
        number = self.state.sequence = (self.state.sequence + 1) % 2**32
        line.tags[number & 1] = tag
        order_writes(self._fence)
        line.sequence = number
        self._poll()
        self.state.used[place] = number
        if any(other.tags[number & 1] != tag for other in self.lines):
            self.region.close(CloseReason.MISMATCH)
            self.region.check()

    def _poll(self) -> None:
        """Sleep until all ranks have arrived at a collective, or raise GroupClosedError."""
        spin_end, pause = time.monotonic() + SPIN_SECONDS, MIN_PAUSE_SECONDS
        while self.is_ahead:
            self.region.check()
            if time.monotonic() > spin_end:
                time.sleep(pause)
                pause = min(2 * pause, MAX_PAUSE_SECONDS)


def make_tag(kind: Collective, place: int, rows: int, width: int) -> int:
    """Return a number for a collective's kind, buffer and shape, which is compared between ranks.

    Args:
        kind: kind of the collective.
        place: index of the buffer.
        rows: rows of the tensor, less than 2**28.
        width: columns of the tensor, less than 2**28.
    """
    return kind << 60 | place << 56 | rows << 28 | width
