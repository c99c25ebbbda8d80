"""Admission: when a waiting sequence gets KV blocks.

A sequence is admitted if it is expected to fit in the cache together with those that hold blocks,
until they end. Output lengths are expected as `output_lengths` says. Sequences that start together
leave the cache half empty under this rule, so admission looks only HORIZON_TOKENS ahead as long as
few tokens have been computed again: preempted sequences return staggered.

Source of the expected peak: "Past-Future Scheduler for LLM Serving under SLA Guarantees"
(ASPLOS'25, arXiv 2507.10150).
"""

from collections.abc import Container

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.memory import Memory
from gllm.scheduler.output_lengths import OutputLengths
from gllm.scheduler.sequence import Sequence

HORIZON_TOKENS = 32
"""Tokens of each decode that admission looks ahead while it may risk preemptions."""
RECOMPUTED_SHARE = 0.15
"""Tokens computed again for each token computed, up to which it may.
docs/scheduler.md has the measurements behind both."""

UNBOUNDED = 2**62
"""A horizon behind every end."""


class Admission:
    """Decides whether waiting sequences get blocks."""

    def __init__(self, config: SchedulerConfig, memory: Memory) -> None:
        self.lengths = OutputLengths(config.expected_output_tokens)
        self._expects = config.expected_output_tokens > 0
        self._size = config.block_size
        self._memory = memory
        self._credit = 0.0
        """Tokens that may be computed again."""
        self._most_credit = config.num_blocks * config.block_size

    def on_scheduled(self, num_tokens: int) -> None:
        """Count the tokens of a plan."""
        self._credit = min(self._credit + RECOMPUTED_SHARE * num_tokens, self._most_credit)

    def on_preempted(self, victim: Sequence) -> None:
        """Count what a sequence that loses its blocks has computed in vain."""
        self._credit -= max(0, victim.computed - victim.reused)

    def is_admissible(self, sequence: Sequence, victims: Container[int] = ()) -> bool:
        """Return whether a waiting sequence may have blocks.

        victims: sequences that would be preempted for it.
        """
        memory = self._memory
        owners = [s for s in memory.owners() if s.seq not in victims]
        if not owners or not (self._expects or sequence.epoch):
            return True
        shared = memory.shareable(sequence)
        missing = sequence.blocks_missing(sequence.target, self._size) - len(shared)
        free = memory.returning(victims) - memory.pool.idle(shared)
        return missing < free and self._fits(sequence, missing, owners, free)

    def _fits(self, candidate: Sequence, missing: int, owners: list[Sequence], free: int) -> bool:
        """Return whether no more than `free` blocks are expected to be missing at any time.

        missing: blocks that the candidate lacks for its prefill. All decodes are taken to advance
        in step, and each to need one block that it fills in part.
        """
        size = self._size
        horizon = HORIZON_TOKENS if self._credit >= candidate.target else UNBOUNDED
        growths = [(min(self._tokens_left(candidate), horizon), missing, 0)]
        for owner in owners:
            needed = owner.blocks_missing(len(owner.tokens), size)
            missing += needed
            own = len(owner.blocks) - owner.reused // size
            growths.append((min(self._tokens_left(owner), horizon), needed, own))
        count = len(growths)
        growths.sort()
        for tokens, needed, own in growths:
            if missing + count * (tokens // size + 1) > free:
                return False
            if tokens == horizon:
                return True
            # After these tokens it has ended and given back what it lacked and what it has.
            missing -= needed
            free += own
            count -= 1
        return True

    def _tokens_left(self, sequence: Sequence) -> int:
        """Return the tokens that a sequence is expected to generate yet; at least 1."""
        if not self._expects:
            return 1
        generated = len(sequence.tokens) - sequence.prompt_len
        return max(1, self.lengths.expected(sequence.request.max_tokens, generated) - generated)
