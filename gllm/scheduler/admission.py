"""Admission: decide when a waiting sequence gets its first KV blocks.

Policies choose the rule. By the default rule a sequence is admitted if it and all running sequences
are expected to fit in the cache until they finish; `output_lengths` predicts the lengths of
outputs. Sequences that start together would leave the cache half empty under this rule. Admission
therefore looks only HORIZON_TOKENS ahead while the share of recomputed tokens is small: preempted
sequences then return at different times.

Source of the expected peak: "Past-Future Scheduler for LLM Serving under SLA Guarantees"
(ASPLOS'25, arXiv 2507.10150).
"""

from collections.abc import Container, Mapping

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_cache_manager import KVCacheManager
from gllm.scheduler.output_lengths import LimitLengthPredictor, OutputLengths
from gllm.scheduler.sequence import Sequence

HORIZON_TOKENS = 32
"""Tokens per decode that admission looks ahead while it may risk preemptions."""
MAX_RECOMPUTED_SHARE = 0.15
"""Recomputed tokens per computed token up to which admission may risk preemptions.
docs/scheduler.md has the measurements behind both constants."""

UNBOUNDED_HORIZON = 2**62
"""Horizon in tokens that is longer than every output."""


class AdmissionController:
    """Decides whether a waiting sequence may get KV blocks now or would soon cause a preemption.

    Predicts the output lengths of all sequences that hold blocks, and admits the waiting one if
    their blocks suffice over a horizon. The horizon is short while few tokens were recomputed after
    preemptions, and unlimited otherwise.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        output_lengths: OutputLengths | None = None,
    ) -> None:
        self.output_lengths = LimitLengthPredictor(config.expected_output_tokens, output_lengths)
        self._expects = config.expected_output_tokens > 0
        self._block_size = config.block_size
        self._kv_cache = kv_cache
        self._credit = 0.0
        """Tokens that may still be recomputed."""
        self._most_credit = config.num_blocks * config.block_size

    def on_scheduled(self, num_tokens: int) -> None:
        """Increase the number of tokens that preemptions may recompute, by a share of these tokens.

        Args:
            num_tokens: tokens of the micro-batch that was scheduled.
        """
        self._credit = min(self._credit + MAX_RECOMPUTED_SHARE * num_tokens, self._most_credit)

    def on_preempted(self, victim: Sequence) -> None:
        """Subtract a preempted sequence's computed tokens from those that may be recomputed."""
        self._credit -= max(0, victim.num_computed_tokens - victim.num_reused_tokens)

    def is_admissible(self, sequence: Sequence, victims: Container[int] = ()) -> bool:
        """Return True if a waiting sequence may allocate KV blocks.

        Args:
            sequence: a sequence without blocks.
            victims: sequence ids that would be preempted for it.
        """
        owners = [s for s in self._kv_cache.remaining_sequences() if s.seq not in victims]
        if not owners or not (self._expects or sequence.has_run):
            return True
        shared = self._kv_cache.find_shareable_blocks(sequence)
        missing = sequence.num_missing_blocks(sequence.num_prefill_tokens, self._block_size) - len(
            shared
        )
        pool = self._kv_cache.block_pool
        free = self._kv_cache.num_reclaimable_blocks(victims) - pool.count_unreferenced(shared)
        return missing < free and self._fits(sequence, missing, owners, free)

    def _fits(self, candidate: Sequence, missing: int, owners: list[Sequence], free: int) -> bool:
        """Return True if the expected demand for new blocks never exceeds `free`.

        Assumes that all decodes advance at the same rate, each with one partially filled block.

        Args:
            candidate: the sequence to admit.
            missing: blocks that its prefill needs.
            owners: sequences that hold blocks and keep them.
            free: blocks that are free or about to be freed.
        """
        size = self._block_size
        horizon = self._horizon(candidate)
        all_needed = [owner.num_missing_blocks(owner.num_tokens, size) for owner in owners]
        # Nobody frees blocks, and all run until the horizon: no demand is above this one.
        highest = missing + sum(all_needed) + (len(owners) + 1) * (horizon // size + 1)
        if highest <= free:
            return True
        growths = [(min(self._tokens_left(candidate), horizon), missing, 0)]
        for owner, needed in zip(owners, all_needed, strict=True):
            missing += needed
            own = len(owner.block_ids) - owner.num_reused_tokens // size
            growths.append((min(self._tokens_left(owner), horizon), needed, own))
        count = len(growths)
        growths.sort()
        for tokens, needed, own in growths:
            if missing + count * (tokens // size + 1) > free:
                return False
            if tokens == horizon:
                return True
            # After these tokens the sequence has finished and freed all its blocks.
            missing -= needed
            free += own
            count -= 1
        return True

    def select_decodes(self, ready: Mapping[int, Sequence]) -> list[Sequence]:
        """Return the decodes that may run in the next micro-batch: all that are ready.

        Args:
            ready: decodes that can run, by sequence id, in the order of service.
        """
        return list(ready.values())

    def _num_free(self, victims: Container[int]) -> int:
        """Return the number of free blocks, those of victims included."""
        if victims:
            return self._kv_cache.num_reclaimable_blocks(victims)
        return self._kv_cache.block_pool.num_free_blocks

    def _horizon(self, candidate: Sequence) -> int:
        """Return the number of tokens per decode to look ahead."""
        if self._credit >= candidate.num_prefill_tokens:
            return HORIZON_TOKENS
        return UNBOUNDED_HORIZON

    def _tokens_left(self, sequence: Sequence) -> int:
        """Return the expected number of tokens that a sequence still generates; at least 1."""
        if not self._expects:
            return 1
        generated = sequence.num_output_tokens
        return max(
            1, self.output_lengths.predict(sequence.request.max_tokens, generated) - generated
        )
