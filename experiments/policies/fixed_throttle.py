"""Token throttling with constants: chunks by a given ridge and by the decodes of the micro-batch.

`throttle` had this rule before it fitted the step time. A chunk is #WP / #T tokens, at most eight
per decode of the micro-batch, and at least the chunk that computes the waiting prompts soonest on
an idle pipeline, less four per decode.
"""

import math

from gllm.scheduler.policy import PaperThrottlePolicy, SchedulerLoad
from gllm.scheduler.step_cost import DEFAULT_RIDGE_TOKENS

PREFILL_TOKENS_PER_DECODE = 8
"""Prefill tokens per decode of a micro-batch at which prefill has 8/9 of it."""
YIELDED_TOKENS_PER_DECODE = 4
"""Tokens that each decode of a micro-batch subtracts from the best size of a prefill chunk."""


class FixedThrottlePolicy(PaperThrottlePolicy):
    """`throttle-paper` whose chunks grow while few sequences decode, for a known ridge."""

    def _tokens_by_waiting(self, load: SchedulerLoad) -> float:
        """Return the chunk size; a half-scheduled prompt counts whole."""
        work = load.num_waiting_tokens + load.num_started_tokens
        num_decodes = load.num_scheduled_decodes
        paced = min(work / self._config.prefill_iterations, PREFILL_TOKENS_PER_DECODE * num_decodes)
        return max(paced, self._efficient_chunk(work) - YIELDED_TOKENS_PER_DECODE * num_decodes)

    def _efficient_chunk(self, work: float) -> float:
        """Return the size of equal chunks that compute `work` tokens soonest on an idle pipeline.

        (work / n + stages - 1) steps of a time like hypot(n, ridge) are shortest where
        n ** 3 = work * ridge ** 2 / (stages - 1). A single stage has no pipeline to fill.
        """
        if self._config.stages == 1:
            return work
        ridge = self._config.ridge_tokens or DEFAULT_RIDGE_TOKENS
        best = math.cbrt(work * ridge**2 / (self._config.stages - 1))
        return work / math.ceil(work / best) if work else 0
