"""Queues of the scheduler: sequences waiting for prefill, and decodes ready to run.

Updates the running sums of `Tally` with every change of a queue.
"""

from bisect import bisect_left, insort
from operator import attrgetter

from gllm.scheduler.kv_cache_manager import KVCacheManager
from gllm.scheduler.policy import SchedulerLoad
from gllm.scheduler.queue_tally import QueueTally
from gllm.scheduler.sequence import Sequence

rank_of = attrgetter("rank")


class SequenceQueues:
    """The sequences that can be scheduled.

    Args:
        memory: KV cache of the pipeline, for the prefix cache and the free share.
        lookahead: schedule a decode before the token of its previous step is known.
    """

    def __init__(self, memory: KVCacheManager, lookahead: bool) -> None:
        self.waiting: list[Sequence] = []
        """Sequences with unscheduled prefill, best rank (priority, then arrival) first."""
        self.ready: dict[int, Sequence] = {}
        """Decodes that can run, by sequence number; the one that became ready first comes first."""
        self.tally = QueueTally()
        self._memory = memory
        self._lookahead = lookahead

    @property
    def head(self) -> Sequence | None:
        """The waiting sequence of the best rank; None if none waits."""
        return self.waiting[0] if self.waiting else None

    def enqueue(self, sequence: Sequence) -> None:
        """Add a sequence to the prefill queue.

        Tokens that the prefix cache holds now are not counted as waiting.
        """
        sequence.expected = self._memory.cached_tokens(sequence)
        self.tally.wait(sequence)
        insort(self.waiting, sequence, key=rank_of)

    def dequeue(self, sequence: Sequence) -> None:
        """Remove a sequence from the prefill queue if it is there."""
        index = bisect_left(self.waiting, sequence.rank, key=rank_of)
        if index < len(self.waiting) and self.waiting[index] is sequence:
            self.tally.wait(sequence, -1)
            del self.waiting[index]

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from both queues and from the running sums."""
        self.dequeue(sequence)
        self.ready.pop(sequence.seq, None)
        self.tally.leave(sequence)

    def make_ready(self, sequence: Sequence) -> None:
        """Append a sequence to the ready decodes if it has no prefill left and can decode."""
        if not sequence.prefilling and sequence.can_decode(self._lookahead):
            self.ready.setdefault(sequence.seq, sequence)
            self.tally.decode(sequence)

    def load(self, decodes: int = 0, cost: float = 0.0) -> SchedulerLoad:
        """Return the load record for a policy.

        Args:
            decodes: number of decodes already in the micro-batch.
            cost: their cost, in the unit of the policy's budget.
        """
        free = self._memory.free_share
        return self.tally.load(len(self.ready), self.head, free, decodes, cost)
