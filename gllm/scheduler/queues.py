"""Queues of the scheduler: sequences waiting for prefill, and decodes ready to run.

Every change of a queue updates the running sums over the sequences (#WP, #RD), so that the load
record of a policy needs no loop over sequences.
"""

from bisect import bisect_left, insort
from collections.abc import Callable
from operator import attrgetter
from typing import Any, NamedTuple

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_cache_manager import KVCacheManager
from gllm.scheduler.policy import SchedulerLoad
from gllm.scheduler.prefill_order import PrefillOrder
from gllm.scheduler.sequence import Sequence
from gllm.scheduler.speculation import Speculation
from gllm.scheduler.stage_work import count_query_key_pairs

rank_of = attrgetter("rank")
"""Sort key of sequences: their rank."""


class QueueSnapshot(NamedTuple):
    """Copy of the prefill and decode queues and of their load, for tests and diagnostics."""

    waiting_seqs: list[int]
    """Sequences with unscheduled prefill, in the order of prefill."""
    ready_seqs: list[int]
    """Decodes that can run now, in the order in which they became ready."""
    decoding_seqs: frozenset[int]
    """All sequences in decode, those in flight included: #RD."""
    load: SchedulerLoad
    """Load as a policy sees it before the micro-batch has any rows."""


class SequenceQueues:
    """Prefill queue and set of ready decodes, with totals of waiting tokens and decode context.

    Args:
        kv_cache: KV cache of the pipeline, for the prefix cache and the free share.
        config: resolved configuration; policies spread the decodes over its stages at first.
        speculation: guesses the next tokens of decodes; None for no guesses.
    """

    def __init__(
        self,
        kv_cache: KVCacheManager,
        config: SchedulerConfig,
        speculation: Speculation | None = None,
    ) -> None:
        self.waiting: list[Sequence] = []
        """Sequences with unscheduled prefill, in the order of prefill; fcfs: best rank first."""
        self.ready: dict[int, Sequence] = {}
        """Decodes that can run, by sequence id; the one that became ready first comes first."""
        self.decoding_seqs: set[int] = set()
        """Sequences in decode, those in flight included: #RD."""
        self.num_decode_plans = 0
        """Plans with decodes so far."""
        self.num_waiting_tokens = 0
        """#WP: prefill tokens neither cached nor scheduled, of all waiting sequences."""
        self._num_waiting_pairs = 0.0
        """Query-key pairs of these tokens."""
        self.num_decode_context_tokens = 0
        """Tokens in the KV cache of the sequences in decode."""
        self.depth = config.stages
        """#PP_depth: micro-batches over which policies spread the decodes."""
        self._kv_cache = kv_cache
        self._block_size = config.block_size
        self._async_scheduling = config.async_scheduling
        self.speculation = speculation
        """Guesses the next tokens of decodes; None for no guesses."""
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

    def count_waiting(self, sequence: Sequence, sign: int) -> None:
        """Add the unscheduled prefill tokens of a sequence to #WP, or subtract them (`sign` -1)."""
        num_tokens = sequence.num_waiting_tokens
        start = sequence.num_prefill_tokens - num_tokens
        self.num_waiting_tokens += sign * num_tokens
        self._num_waiting_pairs += sign * count_query_key_pairs(start, num_tokens)

    def enqueue(self, sequence: Sequence) -> None:
        """Add a sequence to the prefill queue.

        Tokens that are in the prefix cache or will be fetched are not counted as waiting.
        """
        num_cached_blocks = len(self._kv_cache.find_shareable_blocks(sequence))
        sequence.num_expected_cached_tokens = max(
            num_cached_blocks * self._block_size, sequence.num_source_tokens
        )
        self.count_waiting(sequence, 1)
        self._order.join(sequence)
        insort(self.waiting, sequence, key=self._key)

    def dequeue(self, sequence: Sequence) -> None:
        """Remove a sequence from the prefill queue if it is there."""
        index = bisect_left(self.waiting, self._key(sequence), key=self._key)
        if index < len(self.waiting) and self.waiting[index] is sequence:
            self.count_waiting(sequence, -1)
            del self.waiting[index]

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence from both queues and from the sums."""
        self.dequeue(sequence)
        self.ready.pop(sequence.seq, None)
        if sequence.seq in self.decoding_seqs:
            self.decoding_seqs.remove(sequence.seq)
            self.num_decode_context_tokens -= sequence.num_scheduled_tokens

    def make_ready(self, sequence: Sequence) -> None:
        """Append a sequence to the ready decodes if it has no prefill left and can decode."""
        num_scheduled = sequence.num_scheduled_tokens
        if num_scheduled < sequence.num_prefill_tokens:
            return
        seq = sequence.seq
        if self.speculation is not None:
            can_decode = self.speculation.prepare(sequence)
            if not can_decode:
                # A guess that it was ready with may have been wrong.
                self.ready.pop(seq, None)
        elif self._async_scheduling:
            # If all known tokens are scheduled, the last row in flight samples one more.
            num_tokens = max(sequence.num_tokens, num_scheduled + 1)
            can_decode = num_tokens < sequence.prompt_len + sequence.request.max_tokens
        else:
            can_decode = num_scheduled < sequence.num_tokens
        if not can_decode:
            return
        if seq not in self.ready:
            self.ready[seq] = sequence
        if seq not in self.decoding_seqs:
            self.decoding_seqs.add(seq)
            self.num_decode_context_tokens += num_scheduled

    def remove_ahead(self) -> None:
        """Remove ready decodes with rows in flight; the commits make them ready again."""
        for sequence in list(self.ready.values()):
            if sequence.num_rows_in_flight:
                del self.ready[sequence.seq]

    def append(self, sequence: Sequence, token_id: int) -> None:
        """Append a token of the output, with which guesses in flight may turn out to be wrong."""
        num_scheduled = sequence.num_scheduled_tokens
        sequence.append(token_id)
        if sequence.seq in self.decoding_seqs:
            self.num_decode_context_tokens += sequence.num_scheduled_tokens - num_scheduled

    def describe(self) -> QueueSnapshot:
        """Return a copy of the queues."""
        waiting_seqs = [sequence.seq for sequence in self.waiting]
        decoding_seqs = frozenset(self.decoding_seqs)
        return QueueSnapshot(waiting_seqs, list(self.ready), decoding_seqs, self.load())

    def load(self, num_decodes: int = 0, decode_cost: float = 0.0) -> SchedulerLoad:
        """Return the load of the pipeline, as input of a scheduling policy.

        Args:
            num_decodes: number of decodes already in the micro-batch.
            decode_cost: their cost, in the unit of the policy's budget.
        """
        num_started, num_reused = 0, 0
        if self.waiting:
            num_reused = self.waiting[0].num_reused_tokens
            num_started = self.waiting[0].num_scheduled_tokens - num_reused
        return SchedulerLoad(
            num_waiting_tokens=self.num_waiting_tokens,
            num_waiting_pairs=self._num_waiting_pairs,
            num_waiting_prompts=len(self.waiting),
            num_started_tokens=num_started,
            num_started_pairs=count_query_key_pairs(num_reused, num_started),
            num_decoding=len(self.decoding_seqs),
            num_decode_context_tokens=self.num_decode_context_tokens,
            num_ready_decodes=len(self.ready),
            num_scheduled_decodes=num_decodes,
            scheduled_decode_cost=decode_cost,
            kv_free=self._kv_cache.free_share,
            num_decode_plans=self.num_decode_plans,
            depth=self.depth,
        )
