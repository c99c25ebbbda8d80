"""Queues of the scheduler: sequences waiting for prefill, and decodes ready to run.

Updates the running sums of `Tally` with every change of a queue.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_cache_manager import KVCacheManager
from gllm.scheduler.policy import SchedulerLoad
from gllm.scheduler.prefill_order import PrefillOrder
from gllm.scheduler.queue_tally import QueueTally
from gllm.scheduler.sequence import Sequence

rank_of = attrgetter("rank")
"""Sort key of sequences: their rank."""


class QueueSnapshot(NamedTuple):
    """Copy of the queues: sequence ids and sums, for tests and diagnostics."""

    waiting_seqs: list[int]
    """Sequences with unscheduled prefill, in the order of prefill."""
    ready_seqs: list[int]
    """Decodes that can run now, in the order in which they became ready."""
    decoding_seqs: frozenset[int]
    """All sequences in decode, those in flight included: #RD."""
    load: SchedulerLoad
    """Load record of a policy for an empty micro-batch."""


class SequenceQueues:
    """The sequences that can be scheduled.

    Args:
        kv_cache: KV cache of the pipeline, for the prefix cache and the free share.
        config: resolved configuration; policies spread the decodes over its stages at first.
    """

    def __init__(self, kv_cache: KVCacheManager, config: SchedulerConfig) -> None:
        self.waiting: list[Sequence] = []
        """Sequences with unscheduled prefill, in the order of prefill; fcfs: best rank first."""
        self.ready: dict[int, Sequence] = {}
        """Decodes that can run, by sequence id; the one that became ready first comes first."""
        self.tally = QueueTally()
        self.depth = config.stages
        self._kv_cache = kv_cache
        self._async_scheduling = config.async_scheduling
        order = PrefillOrder(config.prefill_order, config.prefill_group)
        self._order = order
        self._key: Callable[[Sequence], Any] = order.key if order.forms_groups else rank_of

    @property
    def head(self) -> Sequence | None:
        """The waiting sequence that is prefilled first; None if none waits."""
        return self.waiting[0] if self.waiting else None

    def form_group(self) -> None:
        """Sort the next group of waiting sequences if the last one has been prefilled."""
        if self._order.forms_groups:
            self._order.form_group(self.waiting)

    def enqueue(self, sequence: Sequence) -> None:
        """Add a sequence to the prefill queue.

        Tokens that the prefix cache holds now or that are fetched are not counted as waiting.
        """
        num_cached_tokens = self._kv_cache.count_cached_tokens(sequence)
        num_expected_tokens = max(num_cached_tokens, sequence.num_source_tokens)
        sequence.num_expected_cached_tokens = num_expected_tokens
        self.tally.add_waiting(sequence)
        self._order.join(sequence)
        insort(self.waiting, sequence, key=self._key)

    def dequeue(self, sequence: Sequence) -> None:
        """Remove a sequence from the prefill queue if it is there."""
        index = bisect_left(self.waiting, self._key(sequence), key=self._key)
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
        if num_scheduled < sequence.num_tokens or self._async_scheduling:
            if self._async_scheduling and not sequence.can_decode_ahead:
                return
            seq = sequence.seq
            if seq not in self.ready:
                self.ready[seq] = sequence
            if seq not in self.tally.decoding_seqs:
                self.tally.add_decode(sequence)

    def describe(self) -> QueueSnapshot:
        """Return the present state."""
        waiting_seqs = [sequence.seq for sequence in self.waiting]
        decoding_seqs = frozenset(self.tally.decoding_seqs)
        return QueueSnapshot(waiting_seqs, list(self.ready), decoding_seqs, self.load())

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
