"""Prefetches: KV that is fetched before its request arrives, while another engine computes it.

A sequence without rows stands for the request until then, so a prefetch has a rank, can be a victim
and is admitted as any other fetch. It keeps counting as a row in flight once it is complete: only
this module frees its blocks.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from gllm.scheduler.kv_cache_manager import KVCacheManager
from gllm.scheduler.kv_fetches import KvFetch, KvFetches
from gllm.scheduler.kv_holds import HOLD_LEASE_SECONDS
from gllm.scheduler.sequence import SchedulerRequest, Sequence


class PrefetchRequest(NamedTuple):
    """Request whose prompt another engine computes."""

    ticket: int
    prompt_token_ids: list[int]
    max_tokens: int
    priority: int = 0
    cache_salt: str = ""
    age_seconds: float = 0.0
    predicted_output_tokens: int = 0
    kv_source: object = None
    """See SchedulerRequest."""


@dataclass(slots=True, eq=False)
class _Prefetch:
    ticket: int
    sequence: Sequence
    lease_end: float
    is_complete: bool = False


class KvPrefetches:
    """Prefetches by ticket, until their request arrives or they are released."""

    def __init__(self, kv_cache: KVCacheManager, fetches: KvFetches, max_model_len: int) -> None:
        self._max_model_len = max_model_len
        self._kv_cache = kv_cache
        self._fetches = fetches
        self._by_ticket: dict[int, _Prefetch] = {}
        self.started: dict[int, _Prefetch] = {}
        """Those that have blocks, by the id of their sequence."""
        self._adopted: list[KvFetch] = []
        self._cancelled_seqs: set[int] = set()
        """Fetches in flight whose cancellation has been reported."""
        self._num_added = 0

    @property
    def is_in_flight(self) -> bool:
        """True if a prefetch has started and not ended."""
        return any(not prefetch.is_complete for prefetch in self.started.values())

    @property
    def has_pending(self) -> bool:
        """True if a prefetch may have to be started or may expire."""
        return bool(self._by_ticket or self._adopted)

    def add(self, request: PrefetchRequest, now: float) -> int:
        """Add a prefetch and return the id of its sequence, which is negative.

        Raises:
            ValueError: The request could not run, or the ticket is in use.
        """
        if request.ticket in self._by_ticket:
            raise ValueError(f"ticket {request.ticket} has a prefetch already")
        seq = -1 - self._num_added
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
        standing.check(self._max_model_len)
        self._num_added += 1
        token_ids = standing.initial_token_ids(seq)
        arrival = now - request.age_seconds
        sequence = Sequence(seq, standing, token_ids, len(token_ids), arrival_time=arrival)
        lease_end = now + HOLD_LEASE_SECONDS
        self._by_ticket[request.ticket] = _Prefetch(request.ticket, sequence, lease_end)
        return seq

    def start(self, now: float) -> list[KvFetch]:
        """Start the prefetches that fit, and return their fetches; expired ones are released.

        A fetch of no tokens has a source that is needed no longer.
        """
        fetches, self._adopted = self._adopted, []
        for prefetch in list(self._by_ticket.values()):
            if prefetch.lease_end <= now:
                self._remove(prefetch)
            elif prefetch.sequence.seq not in self.started:
                fetch = self._fetches.start_prefetch(prefetch.sequence, now)
                if fetch is not None:
                    self.started[fetch.seq] = prefetch
                    prefetch.is_complete = not fetch.num_tokens
                    fetches.append(fetch)
        return fetches

    def adopt(self, sequence: Sequence, ticket: int) -> bool:
        """Give a new sequence the blocks of its prefetch.

        Returns:
            True if the sequence has blocks and waits for the rest of its fetch, or needs none.
        """
        prefetch = self._by_ticket.get(ticket)
        if prefetch is None:
            return False
        own = prefetch.sequence
        if own.seq not in self.started or not _is_same(own, sequence):
            self._remove(prefetch)
            return False
        del self._by_ticket[ticket], self.started[own.seq]
        self._kv_cache.running.pop(own.seq, None)
        sequence.start_with_blocks(own.block_ids, own.num_scheduled_tokens)
        sequence.num_published_blocks = own.num_published_blocks
        self._kv_cache.running[sequence.seq] = sequence
        # Its driver forgets the source of the sequence.
        self._adopted.append(KvFetch(sequence.seq, 0, 0, [], is_early=True))
        if prefetch.is_complete:
            self._fetches.use_fetched(sequence)
        else:
            self._fetches.adopt(own, sequence)
        return True

    def record_progress(self, seq: int) -> None:
        """Record that bytes of a prefetch have arrived; other sequences are ignored."""
        if seq in self.started:
            self.started[seq].sequence.has_fetched_bytes = True

    def finish(self, seq: int, is_ok: bool) -> bool:
        """End a fetch; return False if it is none of a prefetch."""
        prefetch = self.started.get(seq)
        if prefetch is None:
            return False
        prefetch.is_complete = prefetch.sequence.has_fetched_bytes = True
        if not is_ok or prefetch.sequence.is_freeing_blocks:
            self._remove(prefetch)
        return True

    def renew(self, tickets: Iterable[int], now: float) -> None:
        """Begin the leases of prefetches anew; unknown tickets are ignored."""
        for ticket in tickets:
            if ticket in self._by_ticket:
                self._by_ticket[ticket].lease_end = now + HOLD_LEASE_SECONDS

    def release(self, tickets: Iterable[int]) -> None:
        """Free the blocks of prefetches that nobody needs; unknown tickets are ignored."""
        for ticket in tickets:
            if ticket in self._by_ticket:
                self._remove(self._by_ticket[ticket])

    def release_started(self) -> None:
        """Free the blocks of all prefetches."""
        for prefetch in list(self.started.values()):
            self._remove(prefetch)

    def pop_cancellations(self) -> list[int]:
        """Free complete victims; return the fetches in flight that have to end, once each."""
        seqs = []
        for seq, prefetch in list(self.started.items()):
            if not prefetch.sequence.is_freeing_blocks:
                continue
            if prefetch.is_complete:
                self._remove(prefetch)
            elif seq not in self._cancelled_seqs:
                self._cancelled_seqs.add(seq)
                seqs.append(seq)
        return seqs

    def _remove(self, prefetch: _Prefetch) -> None:
        """Forget a prefetch; its blocks are freed once nothing is written to them any more."""
        self._by_ticket.pop(prefetch.ticket, None)
        sequence = prefetch.sequence
        if sequence.seq not in self.started:
            self._adopted.append(KvFetch(sequence.seq, 0, 0, [], is_early=True))
            return
        sequence.is_finished = True
        if prefetch.is_complete:
            del self.started[sequence.seq]
            self._cancelled_seqs.discard(sequence.seq)
            self._kv_cache.free(sequence)


def _is_same(own: Sequence, sequence: Sequence) -> bool:
    """Return True if a sequence is the one that a prefetch stands for."""
    num_tokens = own.request.kv_source_tokens
    return (
        not own.is_freeing_blocks
        and sequence.request.kv_source_tokens == num_tokens
        and sequence.request.cache_salt == own.request.cache_salt
        and sequence.token_ids[:num_tokens] == own.token_ids[:num_tokens]
    )
