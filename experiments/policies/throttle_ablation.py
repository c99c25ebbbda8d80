"""The paper's throttle without one of its factors: the ablation of arXiv 2504.14775, Figure 15.

The threshold below which prefill pauses holds in both.
"""

from gllm.scheduler.policy import PaperThrottlePolicy, SchedulerLoad


class NoWaitingTokensPolicy(PaperThrottlePolicy):
    """`throttle-paper` without the factor for waiting tokens (WT)."""

    def _tokens_by_waiting(self, load: SchedulerLoad) -> float:
        """Return #MaxP."""
        return self._config.max_prefill_tokens


class NoFreeCachePolicy(PaperThrottlePolicy):
    """`throttle-paper` without the factor for the free cache (UT)."""

    def _tokens_by_free_cache(self, load: SchedulerLoad) -> float:
        """Return #MaxP."""
        return self._config.max_prefill_tokens
