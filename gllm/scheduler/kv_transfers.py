"""KV that moves between engines: the scheduler's table of tickets and fetches.

The driver asks what to begin and to revoke, and reports what has ended. Whoever moves the bytes
answers each fetch with `finish_fetch` and each revocation with `confirm_revocation`.
"""

from collections.abc import Callable, Collection, Iterable, Mapping

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_cache_manager import KVCacheManager
from gllm.scheduler.kv_fetches import KvFetch, KvFetches
from gllm.scheduler.kv_holds import ReadableKv
from gllm.scheduler.kv_prefetches import KvPrefetches, PrefetchRequest
from gllm.scheduler.kv_readable import ReadablePrompts
from gllm.scheduler.micro_batch import MicroBatchFiller
from gllm.scheduler.queue_tally import SchedulerCounters
from gllm.scheduler.queues import SequenceQueues, rank_of
from gllm.scheduler.sequence import Sequence
from gllm.scheduler.transfer_mode import TransferModePolicy


class KvTransfers:
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
        self.readable = ReadablePrompts(
            TransferModePolicy(config.push_threshold), config.block_size
        )
        """Running prompts that can be fetched."""
        self._fetches = KvFetches(kv_cache, queues, filler)
        self._prefetches = KvPrefetches(kv_cache, self._fetches, config.max_model_len)
        self._first_chunks: list[int] = []
        """Tickets of prompts whose first chunk is computed, which were not returned yet."""
        self._block_size = config.block_size
        self._kv_cache = kv_cache
        self._holds = kv_cache.holds
        self._queues = queues
        self._counters = counters
        self._finalize = finalize

    @property
    def fetches(self) -> Mapping[int, KvFetch]:
        """Fetches and prefetches that have started and not ended, by their sequence."""
        return self._fetches.running

    @property
    def num_prefetched(self) -> int:
        """Number of prefetches that have blocks, although their request has not arrived."""
        return len(self._prefetches.started)

    @property
    def has_pending_fetches(self) -> bool:
        """True if a fetch may have to be started, or to be released."""
        return self._fetches.has_pending or self._prefetches.has_pending

    @property
    def is_active(self) -> bool:
        """True while a lease or a fetch can end without a step."""
        readable = self._holds or self.readable.tickets
        return bool(readable or self.has_pending_fetches or self.fetches)

    @property
    def tickets(self) -> list[int]:
        """Tickets under which other engines may read blocks."""
        return [*(hold.ticket for hold in self._holds.holds), *self.readable.tickets]

    def returns_blocks(self, sequences: Collection[Sequence]) -> bool:
        """Return True if blocks return without a step, though nothing fits and nothing runs.

        A fetch ends, or a revocation is confirmed. Prefetches are released. Holds are revoked if a
        sequence came from another engine. Two engines may otherwise wait for each other's blocks
        forever. Plain requests wait until holds are fetched.

        Args:
            sequences: all sequences of the scheduler, at least one.
        """
        holds = self._holds
        if self._fetches.num_in_flight or holds.num_revoked or self.readable.is_ending:
            return True
        self._prefetches.release_started()
        if self._prefetches.is_in_flight:
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
        if num_tokens and self._prefetches.adopt(sequence, request.kv_source_ticket):
            self._counters.fetched_tokens += num_tokens - sequence.num_reused_tokens
            return
        self._queues.enqueue(sequence)
        if num_tokens:
            self._fetches.add(sequence)

    def prefetch(self, request: PrefetchRequest, now: float) -> int:
        """Fetch KV of a request that arrives later; return the id for `start_fetches`.

        Raises:
            ValueError: the request could not run, or its ticket is in use.
        """
        return self._prefetches.add(request, now)

    def start_fetches(self, now: float) -> list[KvFetch]:
        """Admit sequences whose KV can be fetched, and return the fetches to begin.

        Called before `Scheduler.schedule`. Each fetch of at least one token is answered with
        `finish_fetch`.
        """
        return self._fetches.start(now) + self._prefetches.start(now)

    def record_progress(self, seq: int) -> None:
        """Record that bytes of a fetch have arrived, so that it is no early victim any more.

        Other sequences are ignored.
        """
        self._fetches.record_progress(seq)
        self._prefetches.record_progress(seq)

    def finish_fetch(self, seq: int, is_ok: bool) -> bool:
        """End a fetch, after which nothing is written to its blocks any more.

        Returns True for a victim, whose fetch `start_fetches` returns again: its source is kept.

        Args:
            seq: sequence of the fetch.
            is_ok: every rank of every stage has all of its KV. Else others than victims prefill.

        Raises:
            ValueError: no fetch of this sequence is in flight.
        """
        self._fetches.running.pop(seq, None)
        if self._prefetches.finish(seq, is_ok):
            return False
        sequence = self._fetches.finish(seq)
        if sequence.is_freeing_blocks:
            # A complete fetch has ended its source; that of a prefetch is not known any more.
            is_repeated = not (is_ok or sequence.is_finished) and sequence.seq == seq
            if is_repeated:
                sequence.num_source_tokens = sequence.request.kv_source_tokens
                self._fetches.add(sequence)
            self._finalize(sequence)
            return is_repeated
        if is_ok:
            if sequence.seq == seq:
                # Those of a prefetch were counted when it was adopted.
                num_tokens = sequence.request.kv_source_tokens - sequence.num_scheduled_tokens
                self._counters.fetched_tokens += num_tokens
            self._fetches.use_fetched(sequence)
        else:
            self._counters.failed_fetches += 1
            self._kv_cache.free(sequence)
            self._queues.enqueue(sequence)
        return False

    def pop_cancellations(self) -> list[int]:
        """Return the sequences whose fetch in flight has to end soon, or starts no more."""
        return self._fetches.pop_cancellations() + self._prefetches.pop_cancellations()

    def on_chunk_computed(self, sequence: Sequence, start: int) -> None:
        """Note a computed row that does not end its prompt, from its first token."""
        request = sequence.request
        if not request.reports_first_chunk or sequence.is_finished:
            return
        if request.kv_ticket and start == sequence.num_reused_tokens:
            self._first_chunks.append(request.kv_ticket)

    def pop_first_chunks(self) -> list[int]:
        """Return the tickets of prompts whose first of several chunks is computed, once each."""
        tickets, self._first_chunks = self._first_chunks, []
        return tickets

    def pop_readable(self) -> list[ReadableKv]:
        """Return the KV that can be fetched in addition since the last call."""
        return self.readable.pop_new()

    def hold(self, sequence: Sequence, now: float) -> ReadableKv | None:
        """Hold the KV of a sequence that `max_tokens` has ended."""
        hold = self._kv_cache.hold(sequence, now)
        if hold is None:
            self.readable.confirm(sequence.request.kv_ticket)
        else:
            self.readable.on_held(hold)
        return hold

    def renew(self, tickets: Iterable[int], now: float) -> None:
        """Begin the leases of holds and prefetches anew; unknown tickets are ignored."""
        tickets = list(tickets)
        self._holds.renew(tickets, now)
        self._prefetches.renew(tickets, now)

    def release(self, tickets: Iterable[int]) -> None:
        """Release holds and prefetches that nobody needs; unknown tickets are ignored."""
        tickets = list(tickets)
        self._holds.release(tickets)
        self._prefetches.release(tickets)

    def pop_revocations(self, now: float) -> list[int]:
        """Return the tickets that must not be served any more, since the last call.

        Their leases have expired, nobody needs them, or a sequence needs their blocks. Each is
        answered with `confirm_revocation`.
        """
        return self._holds.pop_revocations(now) + self.readable.pop_revocations()

    def confirm_revocation(self, ticket: int) -> None:
        """Return the blocks of a ticket, which nobody reads any more, to the pool.

        Also permitted for a ticket that was not revoked: its reader has all of the blocks.
        """
        sequence = self.readable.confirm(ticket)
        if sequence is not None and sequence.is_freeing_blocks:
            self._finalize(sequence)
        self._holds.confirm(ticket)
