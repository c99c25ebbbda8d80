"""Preemption: who gives KV blocks back so that a sequence of better rank can run.

docs/scheduler.md says why every sequence ends nevertheless.
"""

import math
from collections.abc import Collection

from gllm.scheduler.admission import Admission
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.memory import Memory
from gllm.scheduler.queues import SequenceQueues, rank_of
from gllm.scheduler.sequence import Sequence
from gllm.scheduler.tally import Counts


class Preemption:
    """Takes blocks from sequences and lets these wait again."""

    def __init__(
        self,
        config: SchedulerConfig,
        memory: Memory,
        admission: Admission,
        queues: SequenceQueues,
        counts: Counts,
    ) -> None:
        self._max_num_seqs = config.max_num_seqs
        self._reserve = math.ceil(config.kv_threshold * config.num_blocks)
        self._memory = memory
        self._admission = admission
        self._queues = queues
        self._counts = counts

    def allocate_decode(self, sequence: Sequence, num_tokens: int) -> bool:
        """Return whether a decode's blocks are available, preempting for them if necessary.

        Preempts sequences of worse rank, the worst first. A victim with rows in flight frees its
        blocks when the last of them commits; until then the result is False.
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
        """Preempt for the sequence that prefill is served to first, if it cannot be prefilled.

        Half-prefilled sequences of worse rank come first, the worst before the others: they do not
        advance while it waits. Then decodes of a worse priority. Nothing is preempted where all of
        these together would not be enough.
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
        """Return whether the head could be prefilled to its end without these `victims`, above the
        share of the cache at which prefill pauses. owners: sequences that keep their blocks."""
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
        """Take a sequence's blocks, at its last commit if it has rows in flight."""
        self._queues.remove(victim)
        if victim.in_flight:
            victim.evicting = True
            return
        self._admission.on_preempted(victim)
        self._memory.release(victim)
        self._counts.preemptions += 1
        self._queues.enqueue(victim)
