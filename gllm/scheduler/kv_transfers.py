"""KV that moves between engines, for the scheduler: fetches, prefetches, pushes and holds."""

from collections.abc import Callable, Collection, Iterable

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_cache_manager import KVCacheManager
from gllm.scheduler.kv_fetches import KvFetch, KvFetches
from gllm.scheduler.kv_holds import KvHold
from gllm.scheduler.kv_prefetches import KvPrefetches
from gllm.scheduler.kv_pushes import KvPushes
from gllm.scheduler.micro_batch import MicroBatchFiller
from gllm.scheduler.queue_tally import SchedulerCounters
from gllm.scheduler.queues import SequenceQueues, rank_of
from gllm.scheduler.sequence import Sequence
from gllm.scheduler.transfer_mode import TransferModePolicy


class SchedulerTransfers:
    """Sequences whose blocks another engine reads, or fills."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        queues: SequenceQueues,
        filler: MicroBatchFiller,
        counters: SchedulerCounters,
        finalize: Callable[[Sequence], None],
    ) -> None:
        """Create the object.

        Args:
            config: resolved.
            kv_cache: of the pipeline.
            queues: of the scheduler.
            filler: admits sequences.
            counters: of the scheduler.
            finalize: frees the blocks of a sequence that has ended or is a victim, once no row of
                it is in flight.
        """
        self.fetches = KvFetches(kv_cache, queues, filler)
        self.prefetches = KvPrefetches(kv_cache, self.fetches)
        self.pushes = KvPushes(TransferModePolicy(config.push_threshold), config.block_size)
        self._first_chunks: list[int] = []
        """Tickets of prompts whose first chunk is computed, which were not returned yet."""
        self._block_size = config.block_size
        self._kv_cache = kv_cache
        self._queues = queues
        self._counters = counters
        self._finalize = finalize

    @property
    def num_in_flight(self) -> int:
        """Number of fetches and prefetches that have started and not ended."""
        prefetches = self.prefetches
        num_prefetches = prefetches.num_in_flight if prefetches.started else 0
        return self.fetches.num_in_flight + num_prefetches

    def returns_blocks(self, sequences: Collection[Sequence]) -> bool:
        """Return True if blocks return without a step, though nothing fits and nothing runs.

        A fetch ends, or a revocation is confirmed. Prefetches are released. Holds are revoked if a
        sequence came from another engine. Two engines may otherwise wait for each other's blocks
        forever. Plain requests wait until holds are fetched.

        Args:
            sequences: all sequences of the scheduler, at least one.
        """
        holds = self._kv_cache.holds
        if self.fetches.num_in_flight or holds.num_revoked or self.pushes.is_ending:
            return True
        self.prefetches.release_started()
        if self.prefetches.num_in_flight:
            return True
        if holds and any(sequence.request.kv_source_tokens for sequence in sequences):
            best = min(sequences, key=rank_of)
            num_blocks = best.num_missing_blocks(best.num_tokens, self._block_size)
            holds.revoke_worst(num_blocks - self._kv_cache.block_pool.num_free_blocks)
        return holds.num_revoked > 0

    def add(self, sequence: Sequence) -> None:
        """Enqueue a new sequence, or let it go on with the blocks of its prefetch."""
        request = sequence.request
        num_tokens = request.kv_source_tokens
        if num_tokens and self.prefetches.adopt(sequence, request.kv_source_ticket):
            self._counters.fetched_tokens += num_tokens - sequence.num_reused_tokens
            return
        self._queues.enqueue(sequence)
        if num_tokens:
            self.fetches.add(sequence)

    def start_fetches(self, now: float) -> list[KvFetch]:
        """See Scheduler.take_fetches."""
        return self.fetches.start(now) + self.prefetches.start(now)

    def record_progress(self, seq: int) -> None:
        """See Scheduler.record_fetch_progress."""
        self.fetches.record_progress(seq)
        self.prefetches.record_progress(seq)

    def finish_fetch(self, seq: int, is_ok: bool) -> bool:
        """See Scheduler.finish_fetch."""
        if self.prefetches.finish(seq, is_ok):
            return False
        sequence = self.fetches.finish(seq)
        if sequence.is_freeing_blocks:
            # A complete fetch has ended its source; that of a prefetch is not known any more.
            is_repeated = not (is_ok or sequence.is_finished) and sequence.seq == seq
            if is_repeated:
                sequence.num_source_tokens = sequence.request.kv_source_tokens
                self.fetches.add(sequence)
            self._finalize(sequence)
            return is_repeated
        if is_ok:
            if sequence.seq == seq:
                # Those of a prefetch were counted when it was adopted.
                num_tokens = sequence.request.kv_source_tokens - sequence.num_scheduled_tokens
                self._counters.fetched_tokens += num_tokens
            self.fetches.use_fetched(sequence)
        else:
            self._counters.failed_fetches += 1
            self._kv_cache.free(sequence)
            self._queues.enqueue(sequence)
        return False

    def pop_cancellations(self) -> list[int]:
        """See Scheduler.take_fetch_cancellations."""
        return self.fetches.pop_cancellations() + self.prefetches.pop_cancellations()

    def on_chunk_computed(self, sequence: Sequence, start: int) -> None:
        """Note a computed row that does not end its prompt, from its first token."""
        request = sequence.request
        if not request.reports_first_chunk or sequence.is_finished:
            return
        if request.kv_ticket and start == sequence.num_reused_tokens:
            self._first_chunks.append(request.kv_ticket)

    def pop_first_chunks(self) -> list[int]:
        """See Scheduler.take_first_chunks."""
        tickets, self._first_chunks = self._first_chunks, []
        return tickets

    def hold(self, sequence: Sequence, now: float) -> KvHold | None:
        """Hold the KV of a sequence that `max_tokens` has ended; it is no longer pushed."""
        hold = self._kv_cache.hold(sequence, now)
        self.pushes.confirm(sequence.request.kv_ticket)
        return hold

    def renew(self, tickets: Iterable[int], now: float) -> None:
        """See Scheduler.renew_holds."""
        tickets = list(tickets)
        self._kv_cache.holds.renew(tickets, now)
        self.prefetches.renew(tickets, now)

    def release(self, tickets: Iterable[int]) -> None:
        """See Scheduler.release_holds."""
        tickets = list(tickets)
        self._kv_cache.holds.release(tickets)
        self.prefetches.release(tickets)

    def pop_revocations(self, now: float) -> list[int]:
        """See Scheduler.take_revocations."""
        return self._kv_cache.holds.pop_revocations(now) + self.pushes.pop_revocations()

    def confirm_revocation(self, ticket: int) -> None:
        """See Scheduler.confirm_revocation."""
        sequence = self.pushes.confirm(ticket)
        if sequence is not None and sequence.is_freeing_blocks:
            self._finalize(sequence)
        self._kv_cache.holds.confirm(ticket)
