"""State cache: slots with the states of recurrent layers, beside the KV blocks of attention layers.

A slot holds the state of one sequence after some number of its tokens, in all recurrent layers of
the model. Every running sequence owns a slot, which its rows update. A state replaces a prefix of
tokens, so the prefix cache can only be hit where a state was kept. A *checkpoint* is such a state:
it belongs to the hash of the block at whose end it was kept, and is removed with that block.

States at every block would flood the memory. They are kept

- at the last block boundary before the end of a prompt, where the same prompt begins again and its
  other choices begin,
- at the branch point of a prompt whose KV blocks were cached further than any state: others have
  begun with the same tokens,
- at the newest block boundary of a sequence that generates, which replaces the one before, so that
  the next turn of a chat begins where this one ended.

A row that passes such a boundary is divided into segments. The segment up to the boundary writes
the state to a slot that no row writes again while it is a checkpoint, so no state is ever copied.

Source of the admission rules: Pan et al., "Marconi: Prefix Caching for the Era of Hybrid LLMs"
(2024, arXiv 2411.19379), section 4.
"""

from bisect import bisect_right
from collections import OrderedDict, deque
from collections.abc import Container, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import NamedTuple

from gllm.scheduler.plan import ScheduledRow, StateSegment

NO_STATE_SLOT = -1
"""Source slot of a segment that begins with the first token of its sequence: the state is zero."""


class StateCacheSnapshot(NamedTuple):
    """Copy of the state cache's content: each slot is referenced, an idle checkpoint, or free."""

    references: dict[int, int]
    """Number of references of each referenced slot."""
    evictable: list[int]
    """Checkpoints without a reference, in the order of eviction."""
    free: list[int]
    """Slots without a reference and without a checkpoint."""
    checkpoints: dict[bytes, int]
    """Slot of each checkpoint, by the hash of the block that it follows."""


class _PendingCheckpoint(NamedTuple):
    """State at a block boundary that rows in flight write."""

    num_tokens: int
    """Tokens before the boundary."""
    slot: int
    is_rolling: bool
    """True if it replaces the checkpoint that the sequence kept last in this way."""


@dataclass(slots=True)
class _SequenceStates:
    """Slots that a running sequence refers to."""

    own: int
    """Slot that only this sequence writes."""
    source: int
    """Slot with the state after all scheduled tokens, from which the next row starts; its own, a
    checkpoint, or NO_STATE_SLOT."""
    boundaries: list[int]
    """Numbers of prefill tokens after which the state is kept, ascending."""
    is_kept: bool
    """True if the newest boundary is kept while the sequence generates."""
    pending: list[_PendingCheckpoint] = field(default_factory=list)
    """Checkpoints that rows in flight write, in the order of tokens."""
    held: deque[tuple[int, int]] = field(default_factory=deque)
    """(first position, slot) of rows in flight that read a checkpoint."""
    rolling: bytes = b""
    """Hash of the checkpoint that the next newer one replaces; empty for none."""


class StateCache:
    """Allocator of the state slots 0 .. num_slots - 1, with checkpoints for the prefix cache.

    Checkpoints without a reference are evicted least recently used first. One slot per sequence
    that may still be admitted is never used up by checkpoints in use: a state is then not kept, or
    not started from. A sequence therefore waits for `max_num_seqs` alone.

    Args:
        num_slots: at least `max_num_seqs` + 1.
        max_num_seqs: largest number of running sequences.
        block_size: tokens per KV block.
    """

    def __init__(self, num_slots: int, max_num_seqs: int, block_size: int) -> None:
        assert num_slots > max_num_seqs
        self.num_slots = num_slots
        self._max_num_seqs = max_num_seqs
        self._block_size = block_size
        self._free = list(range(num_slots - 1, -1, -1))
        self._references = [0] * num_slots
        self._digests: dict[int, bytes] = {}
        """Hash of each slot that is a checkpoint."""
        self._checkpoints: dict[bytes, int] = {}
        self._rolling: set[bytes] = set()
        """Checkpoints that their sequence replaces, and that no other sequence has started from."""
        self._evictable: OrderedDict[int, None] = OrderedDict()
        self._sequences: dict[int, _SequenceStates] = {}

    @property
    def num_used_slots(self) -> int:
        """Number of slots that running sequences refer to."""
        return self.num_slots - self._num_available

    @property
    def _num_available(self) -> int:
        return len(self._free) + len(self._evictable)

    @property
    def _has_spare(self) -> bool:
        """True if a slot is left beside one for each sequence that may still be admitted."""
        return self._num_available > self._max_num_seqs - len(self._sequences)

    def describe(self) -> StateCacheSnapshot:
        """Return the present state of all slots."""
        references = {slot: number for slot, number in enumerate(self._references) if number}
        return StateCacheSnapshot(
            references, list(self._evictable), list(self._free), dict(self._checkpoints)
        )

    def count_restorable_blocks(self, digests: Items[bytes]) -> int:
        """Return the number of leading blocks after which a new sequence can start.

        Args:
            digests: hash chain of cached blocks.
        """
        for count in range(len(digests), 0, -1):
            slot = self._checkpoints.get(digests[count - 1])
            if slot is not None and (self._references[slot] or self._has_spare):
                return count
        return 0

    def admit(
        self, seq: int, digest: bytes | None, boundaries: list[int], is_kept: bool = True
    ) -> None:
        """Give a new running sequence a slot, and the state that it starts from.

        Args:
            seq: id of the sequence; fewer than `max_num_seqs` others are running.
            digest: hash of the block after which it starts, by `count_restorable_blocks`; None for
                its first token.
            boundaries: numbers of prefill tokens, ascending multiples of the block size, after
                which the state is kept.
            is_kept: True to keep the newest boundary while the sequence generates.
        """
        source = NO_STATE_SLOT
        if digest is not None:
            # Before the allocation, which would evict it.
            source = self._checkpoints[digest]
            self._rolling.discard(digest)
            self._add_reference(source)
        self._sequences[seq] = _SequenceStates(self._allocate(), source, boundaries, is_kept)

    def schedule_rows(self, rows: Items[ScheduledRow]) -> tuple[StateSegment, ...]:
        """Return the segments of a micro-batch's rows, in row order, and reserve their slots."""
        segments: list[StateSegment] = []
        sequences, size = self._sequences, self._block_size
        for index, row in enumerate(rows):
            _, _, start, num_tokens, *_ = row
            states = sequences[row[0]]
            own = states.own
            if num_tokens == 1 and states.source == own and (start + 1) % size:
                # Most decodes: they reach no boundary.
                segments.append(tuple.__new__(StateSegment, (index, 1, own, own)))
            else:
                self._schedule_row(index, row, segments)
        return tuple(segments)

    def _schedule_row(self, index: int, row: ScheduledRow, segments: list[StateSegment]) -> None:
        """Append the segments of one row."""
        states = self._sequences[row.seq]
        begin, end = row.start, row.start + row.num_tokens
        source = states.source
        if source not in (NO_STATE_SLOT, states.own):
            # Steps of another lane may overtake this one: no other may write the slot until then.
            states.held.append((begin, source))
        for boundary, is_rolling in self._list_boundaries(states, row):
            if not self._has_spare:
                break
            slot = self._allocate()
            states.pending.append(_PendingCheckpoint(boundary, slot, is_rolling))
            segments.append(StateSegment(index, boundary - begin, source, slot))
            begin, source = boundary, slot
        if begin < end:
            segments.append(StateSegment(index, end - begin, source, states.own))
            source = states.own
        else:
            self._references[source] += 1
        states.source = source

    def _list_boundaries(
        self, states: _SequenceStates, row: ScheduledRow
    ) -> Iterator[tuple[int, bool]]:
        """Yield the boundaries that a row passes and whose states are kept; (tokens, is_rolling).

        Those of the prefill leave the list of the sequence.
        """
        end = row.start + row.num_tokens
        num_passed = bisect_right(states.boundaries, end)
        passed, states.boundaries = states.boundaries[:num_passed], states.boundaries[num_passed:]
        yield from ((boundary, False) for boundary in passed)
        newest = end - end % self._block_size
        if row.should_sample and states.is_kept and newest > max(row.start, *passed, 0):
            yield newest, True

    def on_row_committed(self, row: ScheduledRow) -> None:
        """Release the checkpoint that a computed row has read."""
        held = self._sequences[row.seq].held
        while held and held[0][0] <= row.start:
            self._release(held.popleft()[1])

    def publish(
        self, seq: int, num_tokens: int, digests: Items[bytes], cached: Container[bytes]
    ) -> None:
        """Make checkpoints of the states that committed rows have kept.

        Args:
            seq: id of a running sequence.
            num_tokens: its computed tokens whose ids are known.
            digests: hashes of its full blocks among them.
            cached: hashes in the prefix cache.
        """
        states = self._sequences[seq]
        while states.pending and states.pending[0].num_tokens <= num_tokens:
            boundary, slot, is_rolling = states.pending.pop(0)
            digest = digests[boundary // self._block_size - 1]
            if is_rolling and states.rolling in self._rolling:
                self.remove(states.rolling)
            if digest in cached and digest not in self._checkpoints:
                self._checkpoints[digest] = slot
                self._digests[slot] = digest
                if is_rolling:
                    self._rolling.add(digest)
                    states.rolling = digest
            self._release(slot)

    def free(self, seq: int) -> None:
        """Release the slots of a sequence without rows in flight; its checkpoints stay."""
        states = self._sequences.pop(seq)
        self._rolling.discard(states.rolling)
        if states.source not in (NO_STATE_SLOT, states.own):
            self._release(states.source)
        for slot in (states.own, *(slot for _, slot in states.held)):
            self._release(slot)
        for checkpoint in states.pending:
            self._release(checkpoint.slot)

    def remove(self, digest: bytes) -> None:
        """Remove the checkpoint of a block, if there is one; sequences may still read its slot."""
        slot = self._checkpoints.pop(digest, None)
        if slot is None:
            return
        del self._digests[slot]
        self._rolling.discard(digest)
        if slot in self._evictable:
            del self._evictable[slot]
            self._free.append(slot)

    def clear(self) -> None:
        """Remove all checkpoints."""
        for digest in [*self._checkpoints]:
            self.remove(digest)

    def _allocate(self) -> int:
        """Return a slot with one reference; evicts the least recently used checkpoint if needed."""
        if not self._free:
            self.remove(self._digests[next(iter(self._evictable))])
        slot = self._free.pop()
        self._references[slot] = 1
        return slot

    def _add_reference(self, slot: int) -> None:
        self._references[slot] += 1
        self._evictable.pop(slot, None)

    def _release(self, slot: int) -> None:
        """Remove a reference; a checkpoint without one becomes the most recently used one."""
        self._references[slot] -= 1
        if self._references[slot]:
            return
        if slot in self._digests:
            self._evictable[slot] = None
        else:
            self._free.append(slot)


def create_direct_segments(rows: Items[ScheduledRow]) -> tuple[StateSegment, ...]:
    """Return one segment per row, in the slot with the sequence's number, for plans of probes."""
    return tuple(
        StateSegment(index, row.num_tokens, row.seq if row.start else NO_STATE_SLOT, row.seq)
        for index, row in enumerate(rows)
    )


def list_prefill_boundaries(
    start: int, num_shared: int, prompt_len: int, num_prefill: int, block_size: int
) -> list[int]:
    """Return the numbers of tokens after which the state of a prefill is kept, ascending.

    They are the branch point, and the last block boundaries before the last token of the prompt and
    of the tokens to prefill, which differ if the sequence continues earlier output.

    Args:
        start: tokens with which the sequence starts, a multiple of the block size.
        num_shared: leading tokens in the prefix cache, with a state or without.
        prompt_len: tokens of the prompt.
        num_prefill: tokens to prefill.
        block_size: tokens per KV block.
    """
    ends = ((count - 1) // block_size * block_size for count in (prompt_len, num_prefill))
    return sorted({boundary for boundary in (num_shared, *ends) if boundary > start})
