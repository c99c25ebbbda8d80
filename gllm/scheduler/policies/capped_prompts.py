"""Base of the policies that batch prompts up to a number of tokens; a longer prompt runs alone."""

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.policies.whole_prompt import WholePromptPolicy
from gllm.scheduler.policy import SchedulerLoad


class CappedPromptPolicy(WholePromptPolicy):
    """Whole prompts in the order of the queue: several of them have at most `max_tokens` together.

    A prompt longer than that is the only one of its micro-batch.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        assert config.prefill_batch_tokens is not None
        self._max_tokens = config.prefill_batch_tokens
        self._prompt_budget: float = self._max_tokens
        """Prefill budget of the present micro-batch."""

    def prefill_budget(self, load: SchedulerLoad) -> float:
        """Return the limit of several prompts."""
        self._prompt_budget = self._max_tokens
        return self._prompt_budget

    def size_chunk(self, start: int, max_tokens: int, budget: float) -> tuple[int, float]:
        """Return all tokens of the first prompt, and of others those within the budget."""
        if budget < self._prompt_budget:
            # Fewer tokens than expected may be in the prefix cache.
            max_tokens = min(max_tokens, int(budget))
        return max_tokens, max_tokens
