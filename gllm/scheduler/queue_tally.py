"""Running sums over the queues, so that a policy's load record needs no loop over sequences.

Maintains #WP, #RD and related sums; the scheduler reports every change.
"""

from dataclasses import dataclass

from gllm.scheduler.policy import SchedulerLoad
from gllm.scheduler.sequence import Sequence
from gllm.scheduler.stage_work import count_query_key_pairs


@dataclass
class SchedulerCounters:
    """Totals since the start of the scheduler, for SchedulerStats."""

    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    fetched_tokens: int = 0
    failed_fetches: int = 0


class QueueTally:
    """Sums over the sequences that wait for prefill and over those in decode."""

    def __init__(self) -> None:
        self.decoding_seqs: set[int] = set()
        self.num_decode_plans = 0
        self.num_waiting_tokens = 0
        self._num_waiting_pairs = 0.0
        self.num_decode_context_tokens = 0

    def add_waiting(self, sequence: Sequence) -> None:
        """Add the unscheduled prefill tokens of a sequence."""
        self._change_waiting(sequence, 1)

    def remove_waiting(self, sequence: Sequence) -> None:
        """Subtract the unscheduled prefill tokens of a sequence."""
        self._change_waiting(sequence, -1)

    def _change_waiting(self, sequence: Sequence, sign: int) -> None:
        num_tokens = sequence.num_waiting_tokens
        start = sequence.num_prefill_tokens - num_tokens
        self.num_waiting_tokens += sign * num_tokens
        self._num_waiting_pairs += sign * count_query_key_pairs(start, num_tokens)

    def add_decode(self, sequence: Sequence) -> None:
        """Add a sequence to the decodes; it must not be among them."""
        self.decoding_seqs.add(sequence.seq)
        self.num_decode_context_tokens += sequence.num_scheduled_tokens

    def on_decodes_scheduled(self, num_tokens: int) -> None:
        """Add the scheduled tokens of sequences in decode to the sum of contexts."""
        self.num_decode_context_tokens += num_tokens

    def remove_decode(self, sequence: Sequence) -> None:
        """Remove a sequence from the decodes, if it is among them."""
        if sequence.seq in self.decoding_seqs:
            self.decoding_seqs.remove(sequence.seq)
            self.num_decode_context_tokens -= sequence.num_scheduled_tokens

    def load(
        self,
        num_ready: int,
        head: Sequence | None,
        free_share: float,
        num_scheduled_decodes: int,
        decode_cost: float,
        depth: int,
    ) -> SchedulerLoad:
        """Return the load record for a policy.

        Args:
            num_ready: decodes that can run now.
            head: the sequence that is prefilled next.
            free_share: free share of the KV cache, 0..1.
            num_scheduled_decodes: decodes already in the micro-batch.
            decode_cost: their cost in the unit of the policy's budget.
            depth: micro-batches over which the decodes are spread.
        """
        num_started, num_reused = 0, 0
        if head is not None:
            num_started = head.num_scheduled_tokens - head.num_reused_tokens
            num_reused = head.num_reused_tokens
        return SchedulerLoad(
            num_waiting_tokens=self.num_waiting_tokens,
            num_waiting_pairs=self._num_waiting_pairs,
            num_started_tokens=num_started,
            num_started_pairs=count_query_key_pairs(num_reused, num_started),
            num_decoding=len(self.decoding_seqs),
            num_decode_context_tokens=self.num_decode_context_tokens,
            num_ready_decodes=num_ready,
            num_scheduled_decodes=num_scheduled_decodes,
            scheduled_decode_cost=decode_cost,
            kv_free=free_share,
            num_decode_plans=self.num_decode_plans,
            depth=depth,
        )
