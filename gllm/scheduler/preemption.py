"""Preemption: who gives KV blocks back so that a sequence of better rank can run.

docs/scheduler.md says why every sequence ends nevertheless.
"""

from gllm.scheduler.admission import Admission
from gllm.scheduler.memory import Memory
from gllm.scheduler.queues import SequenceQueues, rank_of
from gllm.scheduler.sequence import Sequence
from gllm.scheduler.tally import Counts


class Preemption:
    """Takes blocks from sequences and lets these wait again."""

    def __init__(
        self, memory: Memory, admission: Admission, queues: SequenceQueues, counts: Counts
    ) -> None:
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
