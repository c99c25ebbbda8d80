"""Preemption: free KV blocks of sequences so that a sequence of better rank can run.

Rank is priority, then arrival. docs/scheduler.md proves that every sequence still finishes.
"""

import math
from collections.abc import Collection

from gllm.scheduler.admission import AdmissionController
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_cache_manager import KVCacheManager
from gllm.scheduler.plan import SchedulerCounters
from gllm.scheduler.queues import SequenceQueues, rank_of
from gllm.scheduler.sequence import Sequence


class PreemptionManager:
    """Preempts low-priority sequences: frees their KV blocks and queues them for recomputation."""

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        admission: AdmissionController,
        queues: SequenceQueues,
        counters: SchedulerCounters,
    ) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._reserve = math.ceil(config.kv_threshold * config.num_blocks)
        self._kv_cache = kv_cache
        self._admission = admission
        self._queues = queues
        self._counters = counters

    def allocate_decode(self, sequence: Sequence, num_tokens: int) -> bool:
        """Allocate KV blocks for the next `num_tokens` tokens of a decode, preempting if necessary.

        Preempts sequences of worse rank, worst first, until enough blocks are free or about to be
        freed. A victim with rows in flight frees its blocks when its last row commits; until then
        the decode stalls.

        Returns:
            True if the blocks are allocated.
        """
        missing = self._kv_cache.num_missing_blocks(sequence, num_tokens)
        if not missing:
            return True
        pool = self._kv_cache.block_pool
        if missing > pool.num_free_blocks:
            self._preempt_for_decode(sequence, missing)
            if missing > pool.num_free_blocks:
                return False
        sequence.block_ids += pool.allocate(missing)
        return True

    def _preempt_for_decode(self, sequence: Sequence, missing: int) -> None:
        """Preempt sequences until `missing` blocks are free or about to be freed.

        Revokes holds first. Then come fetches without any bytes: they lose nothing, and are fetched
        later. They are of any rank, but each gives way to worse ranks only once. Then come
        sequences of worse rank.
        """
        kv_cache = self._kv_cache
        pool, running = kv_cache.block_pool, kv_cache.running
        pending = kv_cache.num_reclaimable_blocks()
        if kv_cache.holds and pending < missing:
            pending += kv_cache.holds.revoke_worst(missing - pending)
        rank = sequence.rank
        fetches = [
            s
            for s in running.values()
            if s.is_fetching and not s.has_fetched_bytes and (s.rank > rank or not s.has_yielded)
        ]
        victims = sorted(fetches, key=rank_of, reverse=True)
        others = [s for s in running.values() if s.rank > rank]
        for victim in victims + sorted(others, key=rank_of, reverse=True):
            if pending >= missing:
                break
            if not victim.is_freeing_blocks:
                pending += pool.count_exclusive(victim.block_ids)
                victim.has_yielded |= victim.rank < rank
                self.preempt(victim)

    def preempt_for_head(self) -> None:
        """Preempt sequences until the first waiting sequence can be prefilled to its end.

        Preempts half-prefilled sequences of worse rank first, worst first, because they do not
        advance while it waits; then decodes of a worse priority. A fetch does advance, so only one
        of a worse priority is preempted. Preempts nothing if the blocks of all these sequences
        would not be enough.
        """
        head = self._queues.head
        if head is None:
            return
        owners = self._kv_cache.remaining_sequences()
        rank = head.rank
        priority = rank[0]
        yielding = [
            s
            for s in owners
            if s.rank > rank
            and (s.rank[0] > priority or (s.is_prefilling and not s.is_fetch_ending))
        ]
        if not yielding:
            return
        yielding.sort(key=rank_of, reverse=True)
        yielding.sort(key=lambda s: not s.is_prefilling)
        victims: dict[int, Sequence] = {}
        while not self._fits(head, victims, len(owners)):
            if len(victims) == len(yielding):
                return
            victim = yielding[len(victims)]
            victims[victim.seq] = victim
        for victim in victims.values():
            self.preempt(victim)

    def _fits(self, head: Sequence, victims: Collection[int], num_owners: int) -> bool:
        """Return True if the first waiting sequence fits in the cache after preempting `victims`.

        Its whole prefill has to fit above the share of the cache at which prefill pauses.

        Args:
            head: the first waiting sequence.
            victims: ids of sequences to preempt.
            num_owners: number of sequences that hold blocks, victims included.
        """
        kv_cache = self._kv_cache
        num_victims = len(victims)
        is_running = head.seq in kv_cache.running
        if is_running:
            num_tokens = head.num_prefill_tokens - head.num_scheduled_tokens
            missing = kv_cache.num_missing_blocks(head, num_tokens)
        elif num_owners - num_victims >= self._max_num_seqs or not self._admission.is_admissible(
            head, victims
        ):
            return False
        else:
            missing = kv_cache.num_admission_blocks(head)
        reserve = self._reserve if num_owners > num_victims + is_running else 0
        return missing + reserve <= kv_cache.num_reclaimable_blocks(victims)

    def preempt(self, victim: Sequence) -> None:
        """Free the KV blocks of a sequence and return it to the prefill queue.

        If it has rows in flight, this happens when the last of them commits.
        """
        self._queues.remove(victim)
        if victim.num_rows_in_flight:
            victim.is_preempting = True
            return
        self._admission.on_preempted(victim)
        self._kv_cache.free(victim)
        self._counters.preemptions += 1
        self._queues.enqueue(victim)
