"""Running sums over all sequences: what a policy may know, without looking at each.

Owns #WP, #RD and what goes with them. Knows nothing of why a sequence waits or decodes: the
scheduler says when.
"""

from dataclasses import dataclass

from gllm.scheduler.policy import SchedulerLoad
from gllm.scheduler.sequence import Sequence
from gllm.scheduler.stage_work import count_query_key_pairs


@dataclass
class SchedulerCounters:
    """The counters of Stats."""

    steps: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0


class QueueTally:
    """Sums over the sequences that wait for prefill and those in decode."""

    def __init__(self) -> None:
        self.decoding: set[int] = set()
        self.decode_plans = 0
        self.waiting_tokens = 0
        self._waiting_pairs = 0.0
        self._decode_context = 0

    def wait(self, sequence: Sequence, sign: int = 1) -> None:
        """It has prefill to schedule; with sign -1, what it had is taken back."""
        tokens = sequence.waiting_tokens
        self.waiting_tokens += sign * tokens
        self._waiting_pairs += sign * count_query_key_pairs(sequence.target - tokens, tokens)

    def decode(self, sequence: Sequence) -> None:
        """It is in decode from now on, if it was not before."""
        if sequence.seq not in self.decoding:
            self.decoding.add(sequence.seq)
            self._decode_context += sequence.scheduled

    def decoded(self, sequence: Sequence, tokens: int) -> None:
        """Its next decode was scheduled."""
        if sequence.seq in self.decoding:
            self._decode_context += tokens

    def leave(self, sequence: Sequence) -> None:
        """It is not in decode any more."""
        if sequence.seq in self.decoding:
            self.decoding.remove(sequence.seq)
            self._decode_context -= sequence.scheduled

    def load(
        self, ready: int, first: Sequence | None, kv_free: float, decodes: int, decode_cost: float
    ) -> SchedulerLoad:
        """The record for a policy. first: the sequence that prefill is served to first. decodes:
        those in the micro-batch already, and what the policy takes them to cost."""
        begun = (first.scheduled - first.reused, first.reused) if first else (0, 0)
        return SchedulerLoad(
            waiting_tokens=self.waiting_tokens,
            waiting_pairs=self._waiting_pairs,
            begun_tokens=begun[0],
            begun_pairs=count_query_key_pairs(begun[1], begun[0]),
            decoding=len(self.decoding),
            decode_context=self._decode_context,
            ready=ready,
            scheduled=decodes,
            scheduled_cost=decode_cost,
            kv_free=kv_free,
            decode_plans=self.decode_plans,
        )
