"""KV that moves between engines: the scheduler's table of fetches, prefetches and tickets.

The driver asks what to begin and to revoke, and reports what has ended. Whoever moves the bytes
answers each fetch with `finish_fetch` and each revocation with `confirm_revocation`.

A fetch replaces the prefill of a waiting sequence whose KV another engine holds. It counts as a row
in flight. Aborts and victims therefore wait for its end, and its blocks return to the pool only
when they are no longer written. What the prefix cache has is not fetched. A sequence whose fetch
fails is prefilled like a preempted one and fetches nothing again. A victim waits for another start
of its fetch.

Blocks of the prefix cache's disk tier are fetched in the same way (`is_kv_on_disk`). A request that
cannot be admitted yet is read ahead: a sequence in no queue stands for it until the read ends,
takes no place among max_num_seqs, and leaves the blocks in the prefix cache without a reference. So
nothing has to be given back, and running sequences may evict them.

A prefetch begins before its request arrives, while the other engine computes the KV. A sequence
without rows stands for the request until then, so a prefetch has a rank, can be a victim and is
admitted as any other fetch. It keeps counting as a row in flight once it is complete: only this
module frees its blocks.

A checkpoint is a prefetch of a request that goes on at the other engine: once it is complete, its
blocks are left in the prefix cache without a reference. The other engine keeps what it has computed
of the running sequence until it was read (`keep_computed`).
"""

from bisect import insort
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass
from typing import NamedTuple

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_cache_manager import KVCacheManager
from gllm.scheduler.kv_holds import HOLD_LEASE_SECONDS, ReadableKv, ReadablePrompts
from gllm.scheduler.micro_batch import MicroBatchFiller
from gllm.scheduler.plan import SchedulerCounters
from gllm.scheduler.queues import SequenceQueues, rank_of
from gllm.scheduler.sequence import SchedulerRequest, Sequence

MAX_RELEASED_TICKETS = 4096
"""Tickets that were released before their blocks were kept, and are remembered."""
READ_AHEAD_SHARE = 0.25
"""Share of the KV blocks that may be read from disk for sequences that are not admitted yet."""


class KvFetch(NamedTuple):
    """Command to fetch KV of a sequence from another engine: tokens, destination blocks, source."""

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
    """True if no request has the blocks yet. Another engine may still compute the tokens; those on
    disk are complete, and their request is queued."""


class PrefetchRequest(NamedTuple):
    """Request to start fetching KV of a prompt that another engine is still computing."""

    ticket: int
    """Key of the KV at the other engine; the later request has it as `kv_source_ticket`."""
    prompt_token_ids: list[int]
    max_tokens: int
    priority: int = 0
    cache_salt: str = ""
    age_seconds: float = 0.0
    predicted_output_tokens: int = 0
    is_checkpoint: bool = False
    """True if no request is expected: the blocks go into the prefix cache."""
    kv_source: object = None
    """Address of the KV, and the fields up to `predicted_output_tokens`: as of SchedulerRequest."""


@dataclass(slots=True, eq=False)
class _Prefetch:
    ticket: int
    sequence: Sequence
    lease_end: float
    is_checkpoint: bool = False
    is_complete: bool = False


@dataclass(slots=True, eq=False)
class _ReadAhead:
    sequence: Sequence
    """Waiting sequence whose blocks are read."""
    first_token: int
    num_tokens: int
    """Tokens that are read from `first_token` on; 0 if memory had them all, or the read failed."""
    seq: int
    """Negative id of the sequence that stands for it; 0 if nothing is read."""
    is_complete: bool = False


class SchedulerTransfers:
    """Manages KV transfers of a scheduler: fetches from other engines and blocks kept for them."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        queues: SequenceQueues,
        filler: MicroBatchFiller,
        counters: SchedulerCounters,
        finalize: Callable[[Sequence], None],
    ) -> None:
        """Create the manager of KV transfers of one scheduler.

        Args:
            config: resolved configuration of the scheduler.
            kv_cache: KV cache of the pipeline.
            queues: queues of the scheduler.
            filler: admits sequences to the KV cache.
            counters: counters of the scheduler, updated here.
            finalize: frees the blocks of a sequence that has ended or is preempted, once no row of
                it is in flight.
        """
        self.readable = ReadablePrompts(config.push_threshold, config.block_size)
        """Running prompts that can be fetched."""
        self.fetches: dict[int, KvFetch] = {}
        """Fetches and prefetches that have started and not ended, by their sequence."""
        self._pending: list[Sequence] = []
        """Sequences that wait for the start of their fetch, best rank first; those that no longer
        fetch are removed lazily."""
        self._fetching: dict[int, Sequence] = {}
        """Sequences that wait for the end of their fetch, by the sequence of the fetch, which
        differs for an adopted prefetch."""
        self._cancelled_seqs: set[int] = set()
        """Fetches in flight whose cancellation has been reported."""
        self._prefetches: dict[int, _Prefetch] = {}
        """By ticket, until their request arrives or they are released."""
        self.started_prefetches: dict[int, _Prefetch] = {}
        """Prefetches that have blocks, by the id of their sequence."""
        self._read_ahead: dict[int, _ReadAhead] = {}
        """By waiting sequence, until it is admitted or ends."""
        self.num_tokens_read_ahead = 0
        """Prompt tokens so far that were read ahead and used when their sequence was admitted."""
        self._released: list[KvFetch] = []
        """Fetches of no tokens, for prefetches whose source is needed no longer."""
        self._released_tickets: dict[int, None] = {}
        """Tickets that were released while nothing was kept or prefetched under them: their
        requests may run, or come later. The oldest are first."""
        self._num_prefetches = 0
        """Prefetches and sequences that were read ahead so far."""
        self._first_chunks: list[int] = []
        """Tickets of prompts whose first chunk is computed, which were not returned yet."""
        self._config = config
        self._kv_cache = kv_cache
        self._holds = kv_cache.holds
        self._queues = queues
        self._filler = filler
        self._counters = counters
        self._finalize = finalize

    @property
    def tickets(self) -> list[int]:
        """Tickets under which other engines may read blocks of this engine."""
        return [*(hold.ticket for hold in self._holds.holds), *self.readable.prompts]

    @property
    def has_pending_fetches(self) -> bool:
        """True if a fetch has to be started, or an unused source of KV has to be released."""
        return bool(self._pending or self._prefetches or self._released)

    @property
    def is_active(self) -> bool:
        """True while `start_fetches` has to be called between steps too: for leases or fetches."""
        return bool(
            self._holds or self.readable.prompts or self.fetches or self.has_pending_fetches
        )

    def returns_blocks(self, sequences: Collection[Sequence]) -> bool:
        """Return True if blocks will be freed without a step, when nothing fits and nothing runs.

        Blocks are freed when a fetch ends or another engine stops reading. Prefetches are released.
        Blocks kept for other engines are revoked if a sequence came from another engine, because
        two engines may otherwise wait for each other's blocks forever. What else needs such blocks
        has revoked them before (PreemptionManager), or is prefilled for another engine and waits.

        Args:
            sequences: all sequences of the scheduler, at least one.
        """
        holds = self._holds
        if self._fetching or self._kv_cache.loading or holds.num_revoked or self.readable.is_ending:
            return True
        for prefetch in list(self.started_prefetches.values()):
            self._remove(prefetch)
        if self.started_prefetches:
            # Their fetches end soon.
            return True
        if holds and any(
            sequence.request.kv_source_tokens and not sequence.request.is_kv_on_disk
            for sequence in sequences
        ):
            best = min(sequences, key=rank_of)
            num_blocks = best.num_missing_blocks(best.num_tokens, self._config.block_size)
            holds.revoke_oldest(num_blocks - self._kv_cache.block_pool.num_free_blocks)
        return holds.num_revoked > 0

    # Fetches.

    def add(self, sequence: Sequence) -> None:
        """Enqueue a new sequence, or continue it with the blocks of its prefetch."""
        request = sequence.request
        num_tokens = request.kv_source_tokens
        if num_tokens and self._adopt(sequence, request.kv_source_ticket):
            self._counters.fetched_tokens += num_tokens - sequence.num_reused_tokens
            return
        self._queues.enqueue(sequence)
        if num_tokens:
            insort(self._pending, sequence, key=rank_of)

    def prefetch(self, request: PrefetchRequest, now: float) -> int:
        """Fetch KV of a request that arrives later; return a negative sequence id for it.

        Raises:
            ValueError: the request could not run, or its ticket is in use or was released.
        """
        if request.ticket in self._prefetches:
            raise ValueError(f"ticket {request.ticket} has a prefetch already")
        if request.ticket in self._released_tickets:
            raise ValueError(f"ticket {request.ticket} was released")
        seq = -1 - self._num_prefetches
        standing = SchedulerRequest(
            seq,
            request.prompt_token_ids,
            request.max_tokens,
            priority=request.priority,
            cache_salt=request.cache_salt,
            # Stands for the token that is sampled by the other engine.
            outputs=[[0]],
            age_seconds=request.age_seconds,
            kv_source_tokens=len(request.prompt_token_ids),
            predicted_output_tokens=request.predicted_output_tokens,
            kv_source=request.kv_source,
        )
        standing.check(self._config.max_model_len)
        self._num_prefetches += 1
        token_ids = standing.initial_token_ids(seq)
        arrival = now - request.age_seconds
        sequence = Sequence(seq, standing, token_ids, len(token_ids), arrival_time=arrival)
        lease_end = now + HOLD_LEASE_SECONDS
        self._prefetches[request.ticket] = _Prefetch(
            request.ticket, sequence, lease_end, request.is_checkpoint
        )
        return seq

    def start_fetches(self, now: float) -> list[KvFetch]:
        """Admit sequences whose KV can be fetched; return the fetches to start.

        A sequence starts, in the order of the ranks, if its whole prefill fits into the free blocks
        and the admission rule permits it. It overtakes a prompt only if that one is admitted and
        still fits as well. Sequences that are read ahead follow, and prefetches; expired ones are
        released. Complete prefetches that are victims are freed first.

        Called before `Scheduler.schedule`. Each fetch of at least one token is answered with
        `finish_fetch`.
        """
        fetches: list[KvFetch] = []
        for prefetch in list(self.started_prefetches.values()):
            if prefetch.is_complete and prefetch.sequence.is_freeing_blocks:
                self._remove(prefetch)
        for seq, ahead in list(self._read_ahead.items()):
            if not ahead.sequence.is_fetch_pending:
                del self._read_ahead[seq]
        for sequence in list(self._pending):
            if not sequence.is_fetch_pending:
                continue
            earlier = self._read_ahead.get(sequence.seq)
            if earlier is not None and not earlier.is_complete:
                continue
            has_run = sequence.has_run
            if not self._fits(sequence) or not self._filler.admit(sequence, now):
                break
            self._pending.remove(sequence)
            if earlier is not None:
                del self._read_ahead[sequence.seq]
                if not has_run:
                    # What was read is a hit of the disk tier, not of the prefix cache in memory.
                    num_read = _count_read(earlier, sequence)
                    self.num_tokens_read_ahead += num_read
                    self._counters.prefix_hits -= num_read
            first_token = sequence.num_scheduled_tokens
            if sequence.request.kv_source_tokens <= first_token:
                # The prefix cache has all of these tokens.
                self._skip_prefill(sequence)
                fetches.append(KvFetch(sequence.seq, first_token, 0, []))
            else:
                self._queues.dequeue(sequence)
                self._fetching[sequence.seq] = sequence
                fetches.append(self._allocate(sequence))
        fetches += self._start_reading_ahead()
        released, self._released = self._released, []
        fetches += released
        for prefetch in list(self._prefetches.values()):
            if prefetch.lease_end <= now:
                self._remove(prefetch)
            elif prefetch.sequence.seq not in self.started_prefetches:
                fetches += self._start_prefetch(prefetch, now)
        return fetches

    def record_progress(self, seq: int) -> None:
        """Record that bytes have arrived, so that this fetch is not preempted first any more.

        Other sequences are ignored.
        """
        if seq in self._fetching:
            self._fetching[seq].has_fetched_bytes = True
        elif seq in self.started_prefetches:
            self.started_prefetches[seq].sequence.has_fetched_bytes = True

    def finish_fetch(self, seq: int, is_ok: bool) -> bool:
        """Complete a fetch: nothing is written to its blocks after this call.

        Returns True for a victim, whose fetch `start_fetches` returns again: its source is kept.

        Args:
            seq: sequence of the fetch.
            is_ok: every rank of every stage has all of its KV. Else others than victims prefill.

        Raises:
            ValueError: no fetch of this sequence is in flight.
        """
        self.fetches.pop(seq, None)
        self._cancelled_seqs.discard(seq)
        if (loader := self._kv_cache.loading.get(seq)) is not None:
            self._finish_reading_ahead(loader, is_ok)
            return False
        if (prefetch := self.started_prefetches.get(seq)) is not None:
            prefetch.is_complete = prefetch.sequence.has_fetched_bytes = True
            if is_ok and prefetch.is_checkpoint:
                own = prefetch.sequence
                own.num_computed_tokens = own.request.kv_source_tokens
                self._kv_cache.publish(own)
            if not is_ok or prefetch.is_checkpoint or prefetch.sequence.is_freeing_blocks:
                self._remove(prefetch)
            return False
        sequence = self._fetching.pop(seq, None)
        if sequence is None:
            raise ValueError(f"sequence {seq} has no fetch in flight")
        sequence.is_fetching = sequence.has_fetched_bytes = False
        sequence.num_rows_in_flight -= 1
        if sequence.is_freeing_blocks:
            # A complete fetch has ended its source; that of a prefetch is not known any more.
            is_repeated = not (is_ok or sequence.is_finished) and sequence.seq == seq
            if is_repeated:
                sequence.num_source_tokens = sequence.request.kv_source_tokens
                insort(self._pending, sequence, key=rank_of)
            self._finalize(sequence)
            return is_repeated
        if sequence.request.is_kv_on_disk:
            self._finish_load(sequence, is_ok)
        elif is_ok:
            if sequence.seq == seq:
                # Those of a prefetch were counted when it was adopted.
                num_tokens = sequence.request.kv_source_tokens - sequence.num_scheduled_tokens
                self._counters.fetched_tokens += num_tokens
            self._use_fetched(sequence)
        else:
            self._counters.failed_fetches += 1
            self._kv_cache.free(sequence)
            self._queues.enqueue(sequence)
        return False

    def _finish_load(self, sequence: Sequence, is_ok: bool) -> None:
        """Continue a sequence after its blocks were read from disk, or prefill it."""
        if is_ok:
            if not sequence.num_output_tokens:
                num_tokens = sequence.request.kv_source_tokens
                sequence.num_cached_tokens = min(num_tokens, sequence.prompt_len)
            self._use_fetched(sequence)
        else:
            self._kv_cache.free(sequence)
            self._queues.enqueue(sequence)

    def pop_cancellations(self) -> list[int]:
        """Return the sequences whose fetch is cancelled, since the last call.

        Those with a fetch in flight have ended or are victims; `finish_fetch` is still due for
        them. The others have ended or were prefilled before their fetch began. Negative ids are
        those of prefetches, and of sequences that are read ahead for others that have ended, or
        while a decode lacks a block. Nothing is freed here: a step log has no entry for the call.
        """
        seqs = [sequence.seq for sequence in self._pending if not sequence.is_fetch_pending]
        if seqs:
            self._pending = [sequence for sequence in self._pending if sequence.is_fetch_pending]
        cancelled = [seq for seq, sequence in self._fetching.items() if sequence.is_freeing_blocks]
        cancelled += self._find_useless_loads()
        cancelled += [
            seq
            for seq, prefetch in self.started_prefetches.items()
            if prefetch.sequence.is_freeing_blocks and not prefetch.is_complete
        ]
        new = [seq for seq in cancelled if seq not in self._cancelled_seqs]
        self._cancelled_seqs.update(new)
        return seqs + new

    def _fits(self, sequence: Sequence) -> bool:
        """Return True if a sequence fits into the free blocks beside the first waiting sequence.

        Fetches would otherwise overtake prompts that wait for more blocks, again and again. They do
        not overtake one that is not admitted yet, which would take their blocks back.
        """
        kv_cache, head = self._kv_cache, self._queues.head
        is_overtaking = head is not None and not head.is_fetch_pending
        if head is not None and is_overtaking and head.seq not in kv_cache.running:
            return False
        missing = kv_cache.num_admission_blocks(sequence)
        if sequence.num_preemptions:
            # Fetches start before decodes are scheduled: a victim must not take back, again and
            # again, the blocks that it has lost to a decode.
            for decode in self._queues.ready.values():
                missing += kv_cache.num_missing_blocks(decode, decode.num_decode_tokens)
        if head is not None and is_overtaking:
            num_tokens = head.num_prefill_tokens - head.num_scheduled_tokens
            missing += kv_cache.num_missing_blocks(head, num_tokens)
        return missing <= kv_cache.block_pool.num_free_blocks

    def _start_reading_ahead(self) -> list[KvFetch]:
        """Return loads for sequences that wait for their admission, those of the best rank first.

        Each sequence is read ahead once, as far as READ_AHEAD_SHARE and the free blocks permit
        beside what the first waiting prompt needs and the share at which prefill pauses. What is
        evicted again before the admission is read by the sequence itself.
        """
        candidates = [
            sequence
            for sequence in self._pending
            if sequence.request.is_kv_on_disk
            and sequence.is_fetch_pending
            and not sequence.num_preemptions
            and sequence.seq not in self._read_ahead
        ]
        if not candidates:
            return []
        kv_cache, head = self._kv_cache, self._queues.head
        pool, size = kv_cache.block_pool, self._config.block_size
        room = int(READ_AHEAD_SHARE * pool.num_blocks)
        # Loads of aborted sequences count until they have ended.
        room -= sum(len(self.fetches[seq].block_ids) for seq in kv_cache.loading)
        complete = (ahead for ahead in self._read_ahead.values() if ahead.is_complete)
        room -= sum(-(-ahead.num_tokens // size) for ahead in complete)
        num_reserved = 0
        if head is not None and not head.is_fetch_pending and head.seq not in kv_cache.running:
            num_reserved = kv_cache.num_admission_blocks(head)
        fetches: list[KvFetch] = []
        for sequence in candidates:
            request = sequence.request
            shared = kv_cache.find_shareable_blocks(sequence)
            first_token = len(shared) * size
            num_left = -(-(request.kv_source_tokens - first_token) // size)
            if num_left <= 0:
                # Looked up once: queues may be long.
                done = _ReadAhead(sequence, first_token, 0, 0, is_complete=True)
                self._read_ahead[sequence.seq] = done
                continue
            spare = kv_cache.num_spare_blocks - pool.count_unreferenced(shared) - num_reserved
            num_blocks = min(num_left, room, spare)
            if num_blocks <= 0:
                break
            room -= num_blocks
            num_tokens = min(num_blocks * size, request.kv_source_tokens - first_token)
            fetches.append(self._read(sequence, shared, num_tokens))
        return fetches

    def _read(self, sequence: Sequence, shared: list[int], num_tokens: int) -> KvFetch:
        """Return the load of tokens behind the shared blocks of a waiting sequence."""
        self._num_prefetches += 1
        seq, request = -self._num_prefetches, sequence.request
        loader = Sequence(seq, request, sequence.token_ids[:], sequence.prompt_len)
        first_token = len(shared) * self._config.block_size
        self._kv_cache.start_loading(loader, shared, num_tokens)
        self._read_ahead[sequence.seq] = _ReadAhead(sequence, first_token, num_tokens, seq)
        # Prompts behind it need not wait for its load.
        self._queues.dequeue(sequence)
        block_ids = loader.block_ids[len(shared) :]
        fetch = KvFetch(seq, first_token, num_tokens, block_ids, request.kv_source, is_early=True)
        self.fetches[seq] = fetch
        return fetch

    def _finish_reading_ahead(self, loader: Sequence, is_ok: bool) -> None:
        """Leave blocks that were read in the prefix cache; those of a failed load become free."""
        ahead = self._read_ahead.get(loader.request.seq)
        if ahead is None or not ahead.sequence.is_fetch_pending:
            self._kv_cache.finish_loading(loader, None, is_ok)
            return
        ahead.is_complete = True
        if not is_ok:
            ahead.num_tokens = 0
        self._kv_cache.finish_loading(loader, ahead.sequence, is_ok)
        self._queues.enqueue(ahead.sequence)

    def _find_useless_loads(self) -> list[int]:
        """Return the loads in flight of sequences that wait no longer.

        While a decode lacks a block, all of those that were begun ahead give theirs back.
        """
        loading = self._kv_cache.loading
        if self._filler.is_decode_stalled:
            return list(loading)
        kept = {a.seq for a in self._read_ahead.values() if a.sequence.is_fetch_pending}
        return [seq for seq in loading if seq not in kept]

    def _start_prefetch(self, prefetch: _Prefetch, now: float) -> list[KvFetch]:
        """Admit the sequence of a prefetch, which is in no queue; return its fetch if it fits."""
        sequence = prefetch.sequence
        self._queues.count_waiting(sequence, 1)
        is_admitted = self._fits(sequence) and self._filler.admit(sequence, now)
        self._queues.count_waiting(sequence, -1)
        if not is_admitted:
            return []
        if prefetch.is_checkpoint:
            # Nothing is resumed: the cache has the blocks of the checkpoint before.
            num_cached = sequence.num_scheduled_tokens
            self._counters.resumed_cached_tokens -= num_cached
            self._counters.resumed_computed_tokens -= sequence.num_prefill_tokens - num_cached
        fetch = self._allocate(sequence, is_early=True)
        self.started_prefetches[sequence.seq] = prefetch
        prefetch.is_complete = not fetch.num_tokens
        if prefetch.is_complete and prefetch.is_checkpoint:
            self._remove(prefetch)
        return [fetch]

    def _allocate(self, sequence: Sequence, is_early: bool = False) -> KvFetch:
        """Allocate the blocks of an admitted sequence and return its fetch."""
        request, first_token = sequence.request, sequence.num_scheduled_tokens
        num_tokens = request.kv_source_tokens - first_token
        num_shared_blocks = len(sequence.block_ids)
        self._kv_cache.allocate(sequence, num_tokens)
        sequence.is_fetching = True
        sequence.num_rows_in_flight += 1
        block_ids = sequence.block_ids[num_shared_blocks:]
        fetch = KvFetch(
            sequence.seq, first_token, num_tokens, block_ids, request.kv_source, is_early
        )
        if num_tokens:
            self.fetches[sequence.seq] = fetch
        return fetch

    def _adopt(self, sequence: Sequence, ticket: int) -> bool:
        """Give a new sequence the blocks of its prefetch.

        Returns:
            True if the sequence has blocks and waits for the rest of its fetch, or needs none.
        """
        prefetch = self._prefetches.get(ticket)
        if prefetch is None:
            return False
        own = prefetch.sequence
        if own.seq not in self.started_prefetches or not _is_same(own, sequence):
            self._remove(prefetch)
            return False
        del self._prefetches[ticket], self.started_prefetches[own.seq]
        self._kv_cache.running.pop(own.seq, None)
        sequence.start_with_blocks(own.block_ids, own.num_scheduled_tokens)
        sequence.num_published_blocks = own.num_published_blocks
        self._kv_cache.running[sequence.seq] = sequence
        self._released.append(KvFetch(sequence.seq, 0, 0, [], is_early=True))
        if prefetch.is_complete:
            self._use_fetched(sequence)
            return True
        sequence.is_fetching = True
        sequence.has_fetched_bytes = own.has_fetched_bytes
        sequence.num_rows_in_flight += 1
        self._fetching[own.seq] = sequence
        return True

    def _remove(self, prefetch: _Prefetch) -> None:
        """Forget a prefetch; its blocks are freed once nothing is written to them any more."""
        self._prefetches.pop(prefetch.ticket, None)
        sequence = prefetch.sequence
        if sequence.seq not in self.started_prefetches:
            self._released.append(KvFetch(sequence.seq, 0, 0, [], is_early=True))
            return
        sequence.is_finished = True
        if prefetch.is_complete:
            del self.started_prefetches[sequence.seq]
            self._kv_cache.free(sequence)

    def _use_fetched(self, sequence: Sequence) -> None:
        """Continue a sequence with the KV of all tokens that were to be fetched."""
        num_tokens = sequence.request.kv_source_tokens
        sequence.num_scheduled_tokens = sequence.num_computed_tokens = num_tokens
        self._kv_cache.publish(sequence)
        self._queues.enqueue(sequence)
        self._skip_prefill(sequence)

    def _skip_prefill(self, sequence: Sequence) -> None:
        """Move a waiting sequence to the decodes if only its last output token lacks KV."""
        num_tokens = sequence.num_computed_tokens
        if sequence.num_output_tokens and num_tokens == sequence.num_tokens - 1:
            self._queues.dequeue(sequence)
            sequence.num_prefill_tokens = num_tokens
            self._queues.make_ready(sequence)

    # Tickets.

    def set_push_threshold(self, num_tokens: int) -> None:
        """Set the least number of tokens to compute of prompts that can be fetched meanwhile.

        Nothing happens if prompts cannot be fetched before their end at all.
        """
        if self.readable.is_enabled:
            self.readable.threshold_tokens = num_tokens

    def on_chunk_computed(self, sequence: Sequence, start: int) -> None:
        """Record the first computed chunk of a prompt with several chunks."""
        request = sequence.request
        if not request.reports_first_chunk or sequence.is_finished:
            return
        if request.kv_ticket and start == sequence.num_reused_tokens:
            self._first_chunks.append(request.kv_ticket)

    def pop_first_chunks(self) -> list[int]:
        """Return the tickets of prompts whose first of several chunks is computed."""
        tickets, self._first_chunks = self._first_chunks, []
        return tickets

    def hold(self, sequence: Sequence, now: float) -> ReadableKv | None:
        """Keep the KV blocks of a sequence that `max_tokens` has ended, for another engine.

        The sequence still has its blocks, and may have rows in flight beyond its end.

        Returns:
            The blocks that are kept; None if the request has no ticket, nothing was computed, or
            the ticket is in use or was released.
        """
        ticket = sequence.request.kv_ticket
        if ticket in self._released_tickets:
            # What can be fetched already is revoked, because the sequence ends.
            return None
        is_first = self.readable.confirm(ticket) is None
        num_tokens = min(sequence.num_computed_tokens, sequence.num_tokens - 1)
        if not ticket or num_tokens < 1 or ticket in self._holds:
            return None
        return self._hold(sequence, ticket, num_tokens, now, is_first)

    def keep_computed(self, sequence: Sequence, ticket: int, num_tokens: int, now: float) -> bool:
        """Keep the first tokens of a running sequence for another engine, while it goes on.

        Args:
            sequence: an unfinished sequence.
            ticket: key under which they can be read.
            num_tokens: leading tokens to keep.
            now: time in seconds.

        Returns:
            False if not all of them are computed, or the ticket is in use or was released.
        """
        num_computed = min(sequence.num_computed_tokens, sequence.num_tokens - 1)
        if not 0 < num_tokens <= num_computed:
            return False
        if ticket in self._holds or ticket in self._released_tickets:
            return False
        self._hold(sequence, ticket, num_tokens, now)
        return True

    def _hold(
        self,
        sequence: Sequence,
        ticket: int,
        num_tokens: int,
        now: float,
        is_first: bool = True,
    ) -> ReadableKv:
        block_ids = sequence.block_ids[: -(-num_tokens // self._config.block_size)]
        hold = ReadableKv(ticket, num_tokens, block_ids, is_first=is_first)
        self._holds.add(hold, sequence.request.is_ticket_foreign, now)
        self.readable.new.append(hold)
        return hold

    def pop_readable(self) -> list[ReadableKv]:
        """Return the KV that has become readable since the last call."""
        readable, self.readable.new = self.readable.new, []
        return readable

    def renew(self, tickets: Iterable[int], now: float) -> None:
        """Restart the leases of kept and prefetched blocks; unknown tickets are ignored."""
        tickets = list(tickets)
        self._holds.renew(tickets, now)
        for prefetch in map(self._prefetches.get, tickets):
            if prefetch is not None:
                prefetch.lease_end = now + HOLD_LEASE_SECONDS

    def release(self, tickets: Iterable[int]) -> None:
        """Free kept and prefetched blocks that are not needed, and keep none under these tickets.

        A ticket is released once, and never used again. The end of its request may arrive later.
        """
        for ticket in tickets:
            if ticket in self._holds:
                self._holds.release([ticket])
            elif (prefetch := self._prefetches.get(ticket)) is not None:
                self._remove(prefetch)
            else:
                self._released_tickets[ticket] = None
        while len(self._released_tickets) > MAX_RELEASED_TICKETS:
            del self._released_tickets[next(iter(self._released_tickets))]

    def pop_revocations(self, now: float) -> list[int]:
        """Return the tickets that must not be read any more, since the last call.

        Their leases have expired, no engine needs them, or a sequence needs their blocks. Each is
        answered with `confirm_revocation`.
        """
        return self._holds.pop_revocations(now) + self.readable.pop_revocations()

    def confirm_revocation(self, ticket: int) -> None:
        """Free the blocks of a ticket that no engine reads any more.

        Also permitted for a ticket that was not revoked: its reader has all of the blocks.
        """
        sequence = self.readable.confirm(ticket)
        if sequence is not None and sequence.is_freeing_blocks:
            self._finalize(sequence)
        self._holds.confirm(ticket)


def _count_read(ahead: _ReadAhead, sequence: Sequence) -> int:
    """Return the tokens that were read ahead, and that an admitted sequence has found in memory."""
    num_found = sequence.num_scheduled_tokens - ahead.first_token
    return max(0, min(num_found, ahead.num_tokens))


def _is_same(own: Sequence, sequence: Sequence) -> bool:
    """Return True if a sequence is the one that a prefetch stands for."""
    num_tokens = own.request.kv_source_tokens
    return (
        not own.is_freeing_blocks
        and sequence.request.kv_source_tokens == num_tokens
        and sequence.request.cache_salt == own.request.cache_salt
        and sequence.token_ids[:num_tokens] == own.token_ids[:num_tokens]
    )
