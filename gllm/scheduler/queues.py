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
"""Sort key of sequences: their rank."""


class SequenceQueues:
    """The sequences that can be scheduled.

    Args:
        kv_cache: KV cache of the pipeline, for the prefix cache and the free share.
        async_scheduling: schedule a decode before the token of its previous step is known.
        depth: micro-batches over which policies spread the decodes.
    """

    def __init__(self, kv_cache: KVCacheManager, async_scheduling: bool, depth: int) -> None:
        self.waiting: list[Sequence] = []
        """Sequences with unscheduled prefill, best rank (priority, then arrival) first."""
        self.ready: dict[int, Sequence] = {}
        """Decodes that can run, by sequence id; the one that became ready first comes first."""
        self.tally = QueueTally()
        self.depth = depth
        self._kv_cache = kv_cache
        self._async_scheduling = async_scheduling

    @property
    def head(self) -> Sequence | None:
        """The waiting sequence of the best rank; None if none waits."""
        return self.waiting[0] if self.waiting else None

    def enqueue(self, sequence: Sequence) -> None:
        """Add a sequence to the prefill queue.

        Tokens that the prefix cache holds now or that are fetched are not counted as waiting.
        """
        num_cached_tokens = self._kv_cache.count_cached_tokens(sequence)
        num_expected_tokens = max(num_cached_tokens, sequence.num_source_tokens)
        sequence.num_expected_cached_tokens = num_expected_tokens
        self.tally.add_waiting(sequence)
        insort(self.waiting, sequence, key=rank_of)

    def dequeue(self, sequence: Sequence) -> None:
        """Remove a sequence from the prefill queue if it is there."""
        index = bisect_left(self.waiting, sequence.rank, key=rank_of)
        if index < len(self.waiting) and self.waiting[index] is sequence:
            self.tally.remove_waiting(sequence)
            del self.waiting[index]

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from both queues and from the running sums."""
        self.dequeue(sequence)
        self.ready.pop(sequence.seq, None)
        self.tally.remove_decode(sequence)

    def make_ready(self, sequence: Sequence) -> None:
        """Append a sequence to the ready decodes if it has no prefill left and can decode."""
        num_scheduled = sequence.num_scheduled_tokens
        if num_scheduled < sequence.num_prefill_tokens:
            return
        if num_scheduled < len(sequence.token_ids) or self._async_scheduling:
            if self._async_scheduling and not sequence.can_decode_ahead:
                return
            seq = sequence.seq
            if seq not in self.ready:
                self.ready[seq] = sequence
            if seq not in self.tally.decoding_seqs:
                self.tally.add_decode(sequence)

    def load(self, num_decodes: int = 0, decode_cost: float = 0.0) -> SchedulerLoad:
        """Return the load record for a policy.

        Args:
            num_decodes: number of decodes already in the micro-batch.
            decode_cost: their cost, in the unit of the policy's budget.
        """
        free = self._kv_cache.free_share
        return self.tally.load(
            len(self.ready), self.head, free, num_decodes, decode_cost, self.depth
        )
