"""Fetches: KV of waiting sequences that another engine holds, instead of their prefill.

A fetch counts as a row in flight. Aborts and victims therefore wait for its end, and its blocks
return to the pool only when nobody writes them any more. What the prefix cache has is not fetched.
A sequence whose fetch fails is prefilled like a preempted one and fetches nothing again. A victim
waits for another start of its fetch.
"""

from bisect import insort
from typing import NamedTuple

from gllm.scheduler.kv_cache_manager import KVCacheManager
from gllm.scheduler.micro_batch import MicroBatchFiller
from gllm.scheduler.queues import SequenceQueues, rank_of
from gllm.scheduler.sequence import Sequence


class KvFetch(NamedTuple):
    """KV of a sequence to fetch, in whole runs of tokens."""

    seq: int
    first_token: int
    """Position of the first token to fetch, at the start of a block."""
    num_tokens: int
    """Number of tokens; 0: the prefix cache has them all, only the source has to be released."""
    block_ids: list[int]
    """Blocks to write: block i holds the positions from first_token + i * block_size on."""
    source: object = None
    """`SchedulerRequest.kv_source`."""
    is_early: bool = False
    """True if the request has not arrived yet: the other engine may compute the tokens meanwhile.
    """


class KvFetches:
    """Sequences that wait for the start or for the end of their fetch."""

    def __init__(
        self, kv_cache: KVCacheManager, queues: SequenceQueues, filler: MicroBatchFiller
    ) -> None:
        self._kv_cache = kv_cache
        self._queues = queues
        self._filler = filler
        self._pending: list[Sequence] = []
        """Sequences to start, best rank first; those that no longer fetch are removed lazily."""
        self.running: dict[int, KvFetch] = {}
        """Fetches and prefetches that have started and not ended, by their sequence."""
        self._in_flight: dict[int, Sequence] = {}
        """Sequences that wait, by that of their fetch, which differs for an adopted prefetch."""
        self._cancelled_seqs: set[int] = set()
        """Fetches in flight whose cancellation has been reported."""

    @property
    def num_in_flight(self) -> int:
        """Number of fetches that have started and not ended."""
        return len(self._in_flight)

    @property
    def has_pending(self) -> bool:
        """True if a fetch may have to be started."""
        return bool(self._pending)

    def add(self, sequence: Sequence) -> None:
        """Add a waiting sequence whose KV can be fetched."""
        insort(self._pending, sequence, key=rank_of)

    def start(self, now: float) -> list[KvFetch]:
        """Admit sequences in the order of their rank and return their fetches.

        A sequence starts if its whole prefill fits into the free blocks and the admission rule
        permits it. It overtakes a prompt only if that one is admitted and still fits as well.
        """
        fetches: list[KvFetch] = []
        for sequence in list(self._pending):
            if not sequence.is_fetch_pending:
                continue
            if not self._fits(sequence) or not self._filler.admit(sequence, now):
                break
            self._pending.remove(sequence)
            fetches.append(self._start(sequence))
        return fetches

    def start_prefetch(self, sequence: Sequence, now: float) -> KvFetch | None:
        """Admit a sequence that is in no queue and start its fetch; None if it has to wait."""
        tally = self._queues.tally
        tally.add_waiting(sequence)
        is_admitted = self._fits(sequence) and self._filler.admit(sequence, now)
        tally.remove_waiting(sequence)
        if not is_admitted:
            return None
        first_token = sequence.num_scheduled_tokens
        num_tokens = sequence.request.kv_source_tokens - first_token
        return self._allocate(sequence, first_token, num_tokens, is_early=True)

    def adopt(self, owner: Sequence, sequence: Sequence) -> None:
        """Let a sequence wait for a fetch into blocks that it got from another one."""
        sequence.is_fetching = True
        sequence.has_fetched_bytes = owner.has_fetched_bytes
        sequence.num_rows_in_flight += 1
        self._in_flight[owner.seq] = sequence

    def finish(self, seq: int) -> Sequence:
        """End the fetch of a sequence and return the sequence.

        Raises:
            ValueError: no fetch of this sequence is in flight.
        """
        sequence = self._in_flight.pop(seq, None)
        if sequence is None:
            raise ValueError(f"sequence {seq} has no fetch in flight")
        self._cancelled_seqs.discard(seq)
        sequence.is_fetching = sequence.has_fetched_bytes = False
        sequence.num_rows_in_flight -= 1
        return sequence

    def record_progress(self, seq: int) -> None:
        """Record that bytes of a fetch have arrived; other sequences are ignored."""
        if seq in self._in_flight:
            self._in_flight[seq].has_fetched_bytes = True

    def pop_cancellations(self) -> list[int]:
        """Return the sequences that no longer need their source, since the last call.

        Those with a fetch in flight have ended or are victims; `finish` is still due for them. The
        others have ended or were prefilled before their fetch began.
        """
        seqs = [each.seq for each in self._pending if not each.is_fetch_pending]
        if seqs:
            self._pending = [each for each in self._pending if each.is_fetch_pending]
        for seq, sequence in self._in_flight.items():
            if sequence.is_freeing_blocks and seq not in self._cancelled_seqs:
                self._cancelled_seqs.add(seq)
                seqs.append(seq)
        return seqs

    def use_fetched(self, sequence: Sequence) -> None:
        """Continue a sequence with the KV of all tokens that were to be fetched."""
        num_tokens = sequence.request.kv_source_tokens
        sequence.num_scheduled_tokens = sequence.num_computed_tokens = num_tokens
        self._kv_cache.publish(sequence)
        self._queues.enqueue(sequence)
        self._skip_prefill(sequence)

    def _fits(self, sequence: Sequence) -> bool:
        """Return True if a sequence fits into the free blocks beside the first waiting sequence.

        Fetches would otherwise overtake prompts that wait for more blocks, again and again. They do
        not overtake one that is not admitted yet, which would take their blocks back.
        """
        kv_cache, head = self._kv_cache, self._queues.head
        is_overtaking = head is not None and not head.is_fetch_pending
        if head is not None and is_overtaking and head.seq not in kv_cache.running:
            return False
        shared = kv_cache.find_shareable_blocks(sequence)
        missing = kv_cache.num_missing_blocks(sequence, sequence.num_prefill_tokens)
        missing += kv_cache.block_pool.count_unreferenced(shared) - len(shared)
        if sequence.epoch:
            # Fetches start before decodes are scheduled: a victim must not take back, again and
            # again, the blocks that it has lost to a decode.
            for decode in self._queues.ready.values():
                missing += kv_cache.num_missing_blocks(decode, decode.num_decode_tokens)
        if head is not None and is_overtaking:
            num_tokens = head.num_prefill_tokens - head.num_scheduled_tokens
            missing += kv_cache.num_missing_blocks(head, num_tokens)
        return missing <= kv_cache.block_pool.num_free_blocks

    def _start(self, sequence: Sequence) -> KvFetch:
        """Start the fetch of an admitted sequence, which may have found all in the cache."""
        first_token = sequence.num_scheduled_tokens
        num_tokens = sequence.request.kv_source_tokens - first_token
        if num_tokens <= 0:
            self._skip_prefill(sequence)
            return KvFetch(sequence.seq, first_token, 0, [])
        self._queues.dequeue(sequence)
        self._in_flight[sequence.seq] = sequence
        return self._allocate(sequence, first_token, num_tokens)

    def _allocate(
        self, sequence: Sequence, first_token: int, num_tokens: int, is_early: bool = False
    ) -> KvFetch:
        """Allocate the blocks of an admitted sequence and return its fetch."""
        num_shared_blocks = len(sequence.block_ids)
        self._kv_cache.allocate(sequence, num_tokens)
        sequence.is_fetching = True
        sequence.num_rows_in_flight += 1
        block_ids = sequence.block_ids[num_shared_blocks:]
        seq, source = sequence.seq, sequence.request.kv_source
        fetch = KvFetch(seq, first_token, num_tokens, block_ids, source, is_early)
        if num_tokens:
            self.running[seq] = fetch
        return fetch

    def _skip_prefill(self, sequence: Sequence) -> None:
        """Move a waiting sequence to the decodes if only its last output token lacks KV."""
        num_tokens = sequence.num_computed_tokens
        if sequence.num_output_tokens and num_tokens == sequence.num_tokens - 1:
            self._queues.dequeue(sequence)
            sequence.num_prefill_tokens = num_tokens
            self._queues.make_ready(sequence)
