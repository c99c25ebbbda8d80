"""Policy `lightllm`: whole prompts if the expected peak of the KV cache fits.

Source: LightLLM's router, as in Vidur (arXiv 2405.05465).
"""

from experiments.policies import VIDUR_BATCHED_TOKENS
from gllm.scheduler.admission import UNBOUNDED_HORIZON, AdmissionController
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_cache_manager import KVCacheManager
from gllm.scheduler.output_lengths import OutputLengths
from gllm.scheduler.policies.whole_prompt import WholePromptPolicy
from gllm.scheduler.policy import PrefillLeads, SchedulerLoad
from gllm.scheduler.sequence import Sequence

MAX_WAITING_ITERATIONS = 10
"""Iterations of all decodes between two attempts to start prompts, as in Vidur."""


class PeakAdmission(AdmissionController):
    """Admission if the cache holds all sequences up to `max_tokens` of each.

    The peak is that of the base class, with the longest outputs in place of the expected ones. In a
    simulation `max_tokens` is the true length, as in Vidur.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        output_lengths: OutputLengths | None = None,
    ) -> None:
        super().__init__(config, kv_cache, output_lengths)
        self._expects = True

    def _horizon(self, candidate: Sequence) -> int:
        """Look ahead to the end of every sequence."""
        return UNBOUNDED_HORIZON

    def _tokens_left(self, sequence: Sequence) -> int:
        """Return the number of tokens up to `max_tokens`; at least 1."""
        return max(1, sequence.request.max_tokens - sequence.num_output_tokens)


class LightLlmPolicy(PrefillLeads, WholePromptPolicy):
    """Prompts while nothing decodes, otherwise every MAX_WAITING_ITERATIONS iterations."""

    default_batched_tokens = VIDUR_BATCHED_TOKENS
    admission: type[AdmissionController] = PeakAdmission

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._last_attempt = 0
        """Number of plans with decodes before the last attempt."""

    def decode_budget(self, load: SchedulerLoad) -> float:
        """Return the number of ready decodes; an attempt counts although no prompt waits."""
        if not load.num_waiting_tokens:
            self.prefill_budget(load)
        return super().decode_budget(load)

    def prefill_budget(self, load: SchedulerLoad) -> float:
        """Return max_num_batched_tokens, or 0 while prompts wait for their turn.

        A prompt that does not fit into one micro-batch is completed at once.
        """
        num_plans = load.num_decode_plans - self._last_attempt
        # Each micro-batch in flight has a plan per iteration.
        interval = MAX_WAITING_ITERATIONS * load.depth
        if load.num_decoding and not load.num_started_tokens and num_plans < interval:
            return 0
        self._last_attempt = load.num_decode_plans
        return super().prefill_budget(load)
