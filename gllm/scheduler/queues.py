"""Queues of the scheduler: sequences that wait for prefill, and decodes that can run.

Keeps the running sums of `Tally` in step with both.
"""

from bisect import bisect_left, insort
from operator import attrgetter

from gllm.scheduler.memory import Memory
from gllm.scheduler.policy import Load
from gllm.scheduler.sequence import Sequence
from gllm.scheduler.tally import Tally

rank_of = attrgetter("rank")


class SequenceQueues:
    """Which sequences can be scheduled. lookahead: decodes run before their token is known."""

    def __init__(self, memory: Memory, lookahead: bool) -> None:
        self.waiting: list[Sequence] = []
        """Sequences with prefill to schedule, best rank first."""
        self.ready: dict[int, Sequence] = {}
        """Decodes that can run, oldest-ready first."""
        self.tally = Tally()
        self._memory = memory
        self._lookahead = lookahead

    @property
    def head(self) -> Sequence | None:
        """The sequence that prefill is served to first."""
        return self.waiting[0] if self.waiting else None

    def enqueue(self, sequence: Sequence) -> None:
        """Let it wait for prefill; what is cached for it now is not counted as waiting."""
        sequence.expected = self._memory.cached_tokens(sequence)
        self.tally.wait(sequence)
        insort(self.waiting, sequence, key=rank_of)

    def dequeue(self, sequence: Sequence) -> None:
        """Remove it from those that wait, if it is among them."""
        index = bisect_left(self.waiting, sequence.rank, key=rank_of)
        if index < len(self.waiting) and self.waiting[index] is sequence:
            self.tally.wait(sequence, -1)
            del self.waiting[index]

    def remove(self, sequence: Sequence) -> None:
        """Schedule it no more."""
        self.dequeue(sequence)
        self.ready.pop(sequence.seq, None)
        self.tally.leave(sequence)

    def make_ready(self, sequence: Sequence) -> None:
        """Append it to the decodes that can run, if it is one."""
        if not sequence.prefilling and sequence.can_decode(self._lookahead):
            self.ready.setdefault(sequence.seq, sequence)
            self.tally.decode(sequence)

    def load(self, decodes: int = 0, cost: float = 0.0) -> Load:
        """The load record for a policy; decodes and cost: of those in the micro-batch already."""
        free = self._memory.free_share
        return self.tally.load(len(self.ready), self.head, free, decodes, cost)
