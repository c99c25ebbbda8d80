"""Preemption: free KV blocks of sequences so that a sequence of better rank can run.

Rank is priority, then arrival. docs/scheduler.md proves that every sequence still finishes.
"""

import math
from collections.abc import Container

from gllm.scheduler.admission import AdmissionController
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_cache_manager import KVCacheManager
from gllm.scheduler.plan import SchedulerCounters
from gllm.scheduler.queues import SequenceQueues, rank_of
from gllm.scheduler.sequence import Sequence

_NO_SEQUENCE = -(2**63)
"""Id that no sequence has: a victim that frees nothing, beside which all blocks count as free that
return without a step."""


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
            pending += kv_cache.holds.revoke_oldest(missing - pending)
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
        would not be enough, or if revoked holds are.
        """
        head = self._queues.head
        if head is None:
            return
        owners = self._kv_cache.remaining_sequences()
        if self._kv_cache.holds and self._revoke_for_head(head, len(owners)):
            return
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
        while not self._fits(head, victims, len(owners) - len(victims)):
            if len(victims) == len(yielding):
                return
            victim = yielding[len(victims)]
            victims[victim.seq] = victim
        for victim in victims.values():
            self.preempt(victim)

    def _revoke_for_head(self, head: Sequence, num_owners: int) -> bool:
        """Revoke the holds that the first waiting sequence needs; return True if it fits then.

        A request that the fleet hands off needs no hold that its router renews: it waits until the
        blocks are fetched. In a burst each prompt would otherwise take the blocks of another one,
        which the decode engine then would have to compute.
        """
        return self._kv_cache.holds.revoke_until(
            lambda: self._fits(head, (_NO_SEQUENCE,), num_owners),
            only_foreign=head.request.is_fleet_handoff,
        )

    def _fits(self, head: Sequence, victims: Container[int], num_others: int) -> bool:
        """Return True if the first waiting sequence fits in the cache after preempting `victims`.

        Its whole prefill has to fit above the share of the cache at which prefill pauses.

        Args:
            head: the first waiting sequence.
            victims: ids of sequences to preempt.
            num_others: number of sequences that have blocks and keep them.
        """
        kv_cache = self._kv_cache
        is_running = head.seq in kv_cache.running
        if is_running:
            num_tokens = head.num_prefill_tokens - head.num_scheduled_tokens
            missing = kv_cache.num_missing_blocks(head, num_tokens)
        elif num_others >= self._max_num_seqs or not self._admission.is_admissible(head, victims):
            return False
        else:
            missing = kv_cache.num_admission_blocks(head)
        reserve = self._reserve if num_others > is_running else 0
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
