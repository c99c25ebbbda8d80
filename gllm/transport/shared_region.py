"""Rank groups in memory that the processes of one host share.

A rank writes its part into a place of this memory, and waits until all ranks have done so. Compiled
kernels sum, and wait by spinning and then sleeping (gllm/kernels/native/all_reduce.cpp); without
them torch sums, and a rank that waits polls.

A place may be written again after any later collective, because no rank begins that before it has
read the place. Eager collectives therefore alternate between places. The places of a recorded
program are fixed, so it waits until its place is free, which is rarely necessary.
"""

import struct
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from gllm.kernels.all_reduce import GroupMismatchError
from gllm.kernels.native import library as native
from gllm.kernels.native.library import BarrierArguments, ReduceArguments
from gllm.transport.groups import StageGroups
from gllm.transport.region import RegionLayout
from gllm.transport.region_memory import (
    PARTS,
    VALUES,
    Collective,
    GroupMemory,
    RegionMemory,
    make_tag,
)

MIN_ROWS = 128
"""Least capacity in rows: recorded programs allocate for at least so many."""
VALUES_PER_ROW = 8
"""Floats per row that `maximum` exchanges at once: one for each expert of a token, usually."""
HEAD_FLOATS = 1 << 22
"""Capacity of a part of logits, unless one row is larger; more rows are gathered in chunks."""
MAX_ERROR_BYTES = 4000
"""Longest error that `agree_on_step` returns to other ranks; the rest is cut off."""
_STEP_MESSAGE = struct.Struct("<qI")
"""Step, and the length of the error that follows."""


def open_shared_groups(
    descriptors: list[int], rank: int, ranks: int, layout: RegionLayout
) -> StageGroups:
    """Open this rank's two communicators in shared memory: for the layers and for the LM head.

    Args:
        descriptors: file descriptors of the `Region`.
        rank: number of this rank, from 0.
        ranks: number of ranks of the stage.
        layout: largest tensors that the ranks exchange.
    """
    region = open_region_memory(descriptors, rank, ranks, layout)
    return StageGroups(*(SharedMemoryGroup(GroupMemory(region, number)) for number in range(2)))


def open_region_memory(
    descriptors: list[int], rank: int, ranks: int, layout: RegionLayout
) -> RegionMemory:
    """Map the shared memory of both communicators of a stage, sized for the layout's tensors."""
    # Recorded programs allocate for a power of two of tokens.
    rows = max(MIN_ROWS, 1 << (layout.max_tokens - 1).bit_length())
    head = max(HEAD_FLOATS, layout.vocab_rows) if layout.vocab_rows else 1
    value_bytes = max(4 * VALUES_PER_ROW * rows, _STEP_MESSAGE.size + MAX_ERROR_BYTES)
    capacities = [rows * layout.hidden_size, head]
    return RegionMemory(descriptors[0], rank, ranks, capacities, value_bytes)


class SharedMemoryGroup:
    """Communicator of tensor parallel ranks on one host by shared memory; implements RankGroup.

    Tensors larger than the buffers raise ValueError.
    """

    def __init__(self, memory: GroupMemory) -> None:
        """Use the memory of a group."""
        self.rank, self.size = memory.region.rank, memory.region.ranks
        self._memory = memory
        self._partial_place = PARTS[0]
        """Place that `partial` returned last."""
        self._num_recorded = {PARTS: 0, VALUES: 0}
        """Number of recorded collectives by the places that they use."""

    @property
    def is_waiting(self) -> bool:
        """True if this rank waits for another one; may be read on any thread."""
        memory = getattr(self, "_memory", None)
        return memory is not None and memory.is_ahead

    def partial(self, rows: int, width: int) -> Tensor | None:
        """Return the memory [rows, width] float32 for the input of the next `sum`."""
        place = self._partial_place = self._next_place(PARTS)
        library = native.current_library()
        if library is not None and library.is_recording:
            library(BarrierArguments(self._memory.pointer, 0, place, True))
        return self._part(self.rank, place, rows, width)

    def sum(self, partial: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Return the sum of the ranks' parts, the same bits on all ranks; can be captured."""
        if partial.dtype not in (torch.float32, dtype):
            partial = partial.to(torch.float32)
        if bias is not None and bias.dtype not in (torch.float32, dtype):
            bias = bias.to(torch.float32)
        place = self._partial_place
        if partial.data_ptr() != self._memory.places[self.rank][place].data_ptr():
            place = self._next_place(PARTS)
        return self._reduce(Collective.SUM, place, partial.contiguous(), bias, dtype)

    def maximum(self, values: Tensor) -> Tensor:
        """Return the elementwise maximum [rows] float32 of the ranks' values; can be captured.

        More values than fit are exchanged in several chunks.
        """
        capacity = self._memory.places[0][VALUES[0]].nbytes // 4
        if len(values) > capacity:
            return torch.cat([self.maximum(chunk) for chunk in values.split(capacity)])
        column = values.contiguous()[:, None]
        place = self._next_place(VALUES)
        return self._reduce(Collective.MAXIMUM, place, column, None, torch.float32)[:, 0]

    def gather(self, part: Tensor, sizes: Sequence[int]) -> Tensor | None:
        """Return the ranks' parts side by side, [rows, sum of sizes], on rank 0; elsewhere None.

        Rows that do not fit are gathered in several chunks.
        """
        result = part.new_empty(len(part), sum(sizes)) if self.rank == 0 else None
        chunk = max(1, self._memory.places[0][PARTS[0]].nbytes // (4 * max(sizes)))
        for begin in range(0, len(part), chunk):
            rows = part[begin : begin + chunk]
            place = self._next_place(PARTS)
            self._part(self.rank, place, len(rows), sizes[self.rank]).copy_(rows)
            self._barrier(Collective.GATHER, place, len(rows), sum(sizes))
            if result is not None:
                targets = result[begin : begin + chunk].split(list(sizes), dim=1)
                for rank, target in enumerate(targets):
                    target.copy_(self._part(rank, place, *target.shape))
        return result

    def agree_on_step(self, step: int, error: str) -> str:
        """Return the error of the first rank that has one before a step, or an empty string."""
        text = error.encode()[:MAX_ERROR_BYTES]
        place = self._next_place(VALUES)
        mine = self._bytes(self.rank, place)
        mine[: _STEP_MESSAGE.size + len(text)] = _STEP_MESSAGE.pack(step, len(text)) + text
        self._barrier(Collective.AGREE, place)
        others = [self._bytes(rank, place) for rank in range(self.size)]
        messages = [_STEP_MESSAGE.unpack_from(memory) for memory in others]
        if any(other != step for other, _ in messages):
            steps = ", ".join(str(other) for other, _ in messages)
            raise GroupMismatchError(f"the ranks are about to compute different steps: {steps}")
        for memory, (_, length) in zip(others, messages, strict=True):
            if length:
                text = bytes(memory[_STEP_MESSAGE.size : _STEP_MESSAGE.size + length])
                return text.decode(errors="replace")
        return ""

    def broadcast(self, values: Tensor | None, count: int) -> Tensor:
        """Return rank 0's values [count] int64 on all ranks; values: ignored on other ranks."""
        place = self._next_place(VALUES)
        shared = self._slice(0, place, 8 * count).view(torch.int64)
        if self.rank == 0:
            assert values is not None, "rank 0 has the values"
            shared.copy_(values)
        self._barrier(Collective.BROADCAST, place, count)
        return shared.clone()

    def cancel(self) -> None:
        """End every wait of every rank with GroupClosedError, now and later.

        Has no effect once this end is closed.
        """
        memory = getattr(self, "_memory", None)
        if memory is not None:
            memory.region.cancel()

    def close(self) -> None:
        """Free this rank's end; no other method but `cancel` runs at the same time or later.

        The memory is unmapped once both ends and recorded programs are freed.
        """
        vars(self).pop("_memory", None)

    def check(self) -> None:
        """Raise GroupClosedError or GroupMismatchError if the group is closed."""
        self._memory.region.check()

    def _bytes(self, rank: int, place: int) -> memoryview:
        """Return the memory of a place."""
        array: Any = self._memory.places[rank][place].numpy()
        return memoryview(array)

    def _part(self, rank: int, place: int, rows: int, width: int) -> Tensor:
        """Return the part [rows, width] float32 of a rank. Raises ValueError for a larger one."""
        return self._slice(rank, place, 4 * rows * width).view(torch.float32).view(rows, width)

    def _slice(self, rank: int, place: int, size: int) -> Tensor:
        """Return the first bytes of a place, uint8. Raises ValueError for more than it has."""
        memory = self._memory.places[rank][place]
        if size > len(memory):
            raise ValueError(f"{size} bytes exceed the group's {len(memory)}")
        return memory[:size]

    def _next_place(self, places: tuple[int, ...]) -> int:
        """Return the place of the next collective: another one than that of the last.

        Recorded ones alternate between the first two. Eager ones leave out the first if they can:
        a program begins there, and should find it free.
        """
        library = native.current_library()
        if library is not None and library.is_recording:
            number = self._num_recorded[places]
            self._num_recorded[places] = number + 1
            return places[number % 2]
        last = self._memory.last_used(places)
        return next(place for place in reversed(places) if place != last)

    def _barrier(self, kind: Collective, place: int, rows: int = 0, width: int = 0) -> None:
        """Wait until all ranks have written to a place."""
        library, tag = native.current_library(), make_tag(kind, place, rows, width)
        if library is None:
            self._memory.wait_at_barrier(place, tag)
            return
        library(BarrierArguments(self._memory.pointer, tag, place, False))
        library.call_after(self.check)

    def _reduce(
        self, kind: Collective, place: int, part: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Combine the ranks' parts in a place, to which this rank's is copied if it is elsewhere.

        Args:
            kind: SUM or MAXIMUM.
            place: the same on all ranks.
            part: [rows, width], contiguous.
            bias: [width].
            dtype: dtype of the result [rows, width].
        """
        rows, width = part.shape
        library = native.current_library()
        if library is None or dtype not in native.DTYPES:
            return self._reduce_by_torch(kind, place, part, bias, dtype)
        self._part(self.rank, place, rows, width)  # raises where it does not fit
        output = library.empty((rows, width), dtype)
        library(
            ReduceArguments(
                *(self._memory.pointer, part, bias, output),
                *(rows, width, place, kind),
                part.dtype == torch.float32,
                bias is not None and bias.dtype == torch.float32,
                dtype,
            )
        )
        library.call_after(self.check)
        return output

    def _reduce_by_torch(
        self, kind: Collective, place: int, part: Tensor, bias: Tensor | None, dtype: torch.dtype
    ) -> Tensor:
        """Return the same bits as the compiled kernel; see _reduce."""
        mine = self._part(self.rank, place, *part.shape)
        if part.data_ptr() != mine.data_ptr():
            mine.copy_(part)
        self._barrier(kind, place, *part.shape)
        total = self._part(0, place, *part.shape).clone()
        for rank in range(1, self.size):
            other = self._part(rank, place, *part.shape)
            total = total + other if kind == Collective.SUM else torch.maximum(total, other)
        if bias is not None:
            total = total + bias.to(torch.float32)
        return total.to(dtype)
