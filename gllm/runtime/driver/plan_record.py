"""Record of uncommitted plans in shared memory, which outlives the driver that writes it.

After the death of any worker the parent reads from it which sequences were being computed, or had
their grammar compiled. It is consistent at every moment: the number of a slot's plan is written
last and removed first.
"""

import mmap
import os
import struct
from array import array
from collections.abc import Iterable
from itertools import islice
from operator import itemgetter

from gllm.scheduler.plan import ScheduledRow, StepPlan

_HEADER = struct.Struct("=QQ")
"""Number of slots, and most rows of a slot."""
_HEADER_WORDS = _HEADER.size // 8
_SLOT_WORDS = 2
"""Words of a slot before its rows: number of the plan plus one, 0 if there is none; rows.

The last slot has the held requests, as plan 0.
"""
_seq_of = itemgetter(ScheduledRow._fields.index("seq"))
"""Faster than the attribute."""
_MAX_READS = 3
"""Attempts to read a slot that a living driver writes meanwhile."""


class PlanRecord:
    """Writes the ids of the sequences in uncommitted step plans to shared memory.

    After a worker has crashed, the parent process reads there which requests were being computed.
    The memory has one entry per plan in flight, and one for the requests whose grammar is being
    compiled.
    """

    def __init__(
        self, descriptor: int, max_in_flight: int, max_rows: int, num_lanes: int = 1
    ) -> None:
        """Size and map the memory.

        Args:
            descriptor: file descriptor of an empty memory file; it stays open and the caller's.
            max_in_flight: most uncommitted plans of a lane.
            max_rows: most rows of a plan; rows beyond are left out of the record.
            num_lanes: number of lanes.
        """
        self._max_in_flight = max_in_flight
        self._num_plans = max_in_flight * num_lanes
        self._indices: dict[int, int] = {}
        """Slot of each uncommitted plan, by step."""
        self._max_rows = max_rows
        self._stride = _SLOT_WORDS + max_rows
        num_slots = self._num_plans + 1
        size = 8 * (_HEADER_WORDS + self._stride * num_slots)
        os.ftruncate(descriptor, size)
        self._memory = mmap.mmap(descriptor, size)
        self._words = memoryview(self._memory).cast("Q")
        _HEADER.pack_into(self._memory, 0, num_slots, max_rows)

    def on_scheduled(self, plan: StepPlan) -> None:
        """Record a plan; called before the plan is sent to a stage."""
        limit = self._max_in_flight
        self._indices[plan.step] = index = plan.lane * limit + plan.turn % limit
        self._write(index, plan.step + 1, list(map(_seq_of, plan.rows)))

    def on_committed(self, step: int) -> None:
        """Remove a plan."""
        self._words[_HEADER_WORDS + self._indices.pop(step) * self._stride] = 0

    def on_held(self, seqs: Iterable[int]) -> None:
        """Replace the recorded sequences that wait for their grammar."""
        recorded = list(islice(seqs, self._max_rows))
        self._write(self._num_plans, 1 if recorded else 0, recorded)

    def _write(self, index: int, number: int, seqs: list[int]) -> None:
        """Write a slot."""
        if len(seqs) > self._max_rows:
            seqs = seqs[: self._max_rows]
        words = self._words
        slot = _HEADER_WORDS + index * self._stride
        begin = slot + _SLOT_WORDS
        words[slot] = 0
        words[slot + 1] = len(seqs)
        words[begin : begin + len(seqs)] = memoryview(array("Q", seqs))
        words[slot] = number

    def close(self) -> None:
        """Unmap the memory; the parent can still read it."""
        self._words.release()
        self._memory.close()


def read_uncommitted(descriptor: int) -> set[int]:
    """Return the ids of the sequences that were in uncommitted plans or waited for their grammar.

    Args:
        descriptor: file descriptor of the shared memory that `PlanRecord` writes. If no driver has
            written it, the result is empty.
    """
    size = os.fstat(descriptor).st_size
    if size < _HEADER.size:
        return set()
    with mmap.mmap(descriptor, size, prot=mmap.PROT_READ) as memory:
        num_slots, max_rows = _HEADER.unpack_from(memory)
        stride = _SLOT_WORDS + max_rows
        with memoryview(memory)[: size // 8 * 8].cast("Q") as words:
            slots = range(_HEADER_WORDS, len(words) - stride + 1, stride)
            return {seq for slot in slots[:num_slots] for seq in _read_slot(words, slot, max_rows)}


def _read_slot(words: "memoryview[int]", slot: int, max_rows: int) -> list[int]:
    """Return the wire ids in a slot; none if its plan has committed."""
    for _ in range(_MAX_READS):
        number = words[slot]
        if not number:
            break
        begin = slot + _SLOT_WORDS
        seqs = words[begin : begin + min(words[slot + 1], max_rows)].tolist()
        if words[slot] == number:
            return seqs
    return []
