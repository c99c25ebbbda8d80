"""Preemption: free KV blocks of sequences so that a sequence of better rank can run.

Rank is priority, then arrival. docs/scheduler.md proves that every sequence still finishes.
"""

import math
from collections.abc import Collection

from gllm.scheduler.admission import AdmissionController
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_cache_manager import KVCacheManager
from gllm.scheduler.queue_tally import SchedulerCounters
from gllm.scheduler.queues import SequenceQueues, rank_of
from gllm.scheduler.sequence import Sequence


class PreemptionManager:
    """Policy that selects victims, frees their KV blocks and returns them to the prefill queue."""

    def __init__(
        self,
        config: SchedulerConfig,
        memory: KVCacheManager,
        admission: AdmissionController,
        queues: SequenceQueues,
        counts: SchedulerCounters,
    ) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._reserve = math.ceil(config.kv_threshold * config.num_blocks)
        self._memory = memory
        self._admission = admission
        self._queues = queues
        self._counts = counts

    def allocate_decode(self, sequence: Sequence, num_tokens: int) -> bool:
        """Free the KV blocks for the next `num_tokens` tokens of a decode, preempting if necessary.

        Preempts sequences of worse rank, worst first, until enough blocks are free or about to be
        freed. A victim with rows in flight frees its blocks when its last row commits; until then
        the decode stalls.

        Returns:
            True if enough blocks are free now.
        """
        pool = self._memory.pool
        missing = self._memory.missing(sequence, num_tokens)
        if missing <= pool.available:
            return True
        pending = self._memory.returning()
        victims = [s for s in self._memory.holders.values() if s.rank > sequence.rank]
        for victim in sorted(victims, key=rank_of, reverse=True):
            if pending >= missing:
                break
            if not victim.leaving:
                pending += pool.sole(victim.blocks)
                self.preempt(victim)
        return missing <= pool.available

    def make_way(self) -> None:
        """Preempt sequences until the first waiting sequence can be prefilled to its end.

        Preempts half-prefilled sequences of worse rank first, worst first, because they do not
        advance while it waits; then decodes of a worse priority. Preempts nothing if the blocks of
        all these sequences would not be enough.
        """
        head = self._queues.head
        if head is None:
            return
        owners = self._memory.owners()
        priority, rank = head.request.priority, head.rank
        yielding = [
            s for s in owners if (s.request.priority > priority or s.prefilling) and s.rank > rank
        ]
        if not yielding:
            return
        yielding.sort(key=lambda s: (not s.prefilling, (-s.request.priority, -s.seq)))
        victims: dict[int, Sequence] = {}
        while not self._fits(head, victims, len(owners)):
            if len(victims) == len(yielding):
                return
            victim = yielding[len(victims)]
            victims[victim.seq] = victim
        for victim in victims.values():
            self.preempt(victim)

    def _fits(self, head: Sequence, victims: Collection[int], owners: int) -> bool:
        """Return True if the first waiting sequence fits in the cache after preempting `victims`.

        Its whole prefill has to fit above the share of the cache at which prefill pauses.

        Args:
            head: the first waiting sequence.
            victims: sequence numbers to preempt.
            owners: number of sequences that hold blocks, victims included.
        """
        memory = self._memory
        num_victims = len(victims)
        missing = memory.missing(head, head.target - head.scheduled)
        if head.seq not in memory.holders:
            if owners - num_victims >= self._max_num_seqs:
                return False
            if not self._admission.is_admissible(head, victims):
                return False
            shared = memory.shareable(head)
            missing += memory.pool.idle(shared) - len(shared)
        reserve = self._reserve if owners > num_victims + (head.seq in memory.holders) else 0
        return missing + reserve <= memory.returning(victims)

    def preempt(self, victim: Sequence) -> None:
        """Free the KV blocks of a sequence and return it to the prefill queue.

        If it has rows in flight, this happens when the last of them commits.
        """
        self._queues.remove(victim)
        if victim.in_flight:
            victim.evicting = True
            return
        self._admission.on_preempted(victim)
        self._memory.release(victim)
        self._counts.preemptions += 1
        self._queues.enqueue(victim)
