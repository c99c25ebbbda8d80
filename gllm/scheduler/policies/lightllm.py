"""Policy `lightllm`: whole prompts if the expected peak of the KV cache fits.

Source: LightLLM's router, as in Vidur (arXiv 2405.05465).
"""

from gllm.scheduler.admission import UNBOUNDED_HORIZON, AdmissionController
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.policies.whole_prompt import WholePromptPolicy
from gllm.scheduler.policy import SchedulerLoad
from gllm.scheduler.sequence import Sequence

MAX_WAITING_ITERATIONS = 10
"""Iterations of all decodes between two attempts to start prompts, as in Vidur."""


class PeakAdmission(AdmissionController):
    """Admission if the cache holds all sequences up to `max_tokens` of each.

    The peak is that of the base class, with the longest outputs in place of the expected ones. In a
    simulation `max_tokens` is the true length, as in Vidur.
    """

    predicts_lengths = True

    def _horizon(self, candidate: Sequence) -> int:
        """Look ahead to the end of every sequence."""
        return UNBOUNDED_HORIZON

    def _tokens_left(self, sequence: Sequence) -> int:
        """Return the number of tokens up to `max_tokens`; at least 1."""
        return max(1, sequence.request.max_tokens - sequence.num_output_tokens)


class LightLlmPolicy(WholePromptPolicy):
    """Prompts while nothing decodes, otherwise every MAX_WAITING_ITERATIONS iterations."""

    runs_prefill_first = True
    counts_idle_turns = True
    admission: type[AdmissionController] = PeakAdmission

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._last_attempt = 0
        """Number of plans with decodes before the last attempt."""

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
