"""Policy `balance`: throttling by predicted time instead of tokens.

A token late in a long prompt attends to more tokens than an early one, and so does a decode with a
long context. The policy weighs rows by the time that a cost model predicts for them; the model is
fitted to the step times that the stages report. Until it is fitted, a row weighs its tokens, as
under `throttle`.
"""

import math

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.policy import SchedulerLoad
from gllm.scheduler.stage_work import StageWork, count_query_key_pairs
from gllm.scheduler.step_cost import OnlineStepCostFit
from gllm.scheduler.throttle_policy import ThrottlePolicy


class BalancePolicy(ThrottlePolicy):
    """Policy `balance`: like `throttle`, but evens out the predicted times of the micro-batches.

    `throttle` evens out their numbers of tokens. Here a linear model of the step time is fitted
    while the pipeline runs. Costs are relative to a prefill token at the start of a prompt: work
    that takes as long as k such tokens costs k.
    """

    learns_step_times = True

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._cost_fit = OnlineStepCostFit()
        self._pair_cost = 0.0
        """Cost per query-key pair."""
        self._base_decode_cost = 1.0
        """Cost of a decode without its context."""
        self._context_token_cost = 0.0
        """Cost per token that a decode attends to."""

    def observe_step(self, work: StageWork, seconds: float) -> None:
        """Fit the cost model to a completed step and update the costs."""
        super().observe_step(work, seconds)
        self._cost_fit.observe_step(work, seconds)
        coefficients = self._cost_fit.coefficients
        if coefficients is not None and coefficients.token > 0:
            self._pair_cost = coefficients.pair / coefficients.token
            self._base_decode_cost = 1 + coefficients.decode / coefficients.token
            self._context_token_cost = coefficients.context_token / coefficients.token

    def decode_budget(self, load: SchedulerLoad) -> float:
        """Return (4) in cost: an even share of the cost of all running decodes."""
        # The base class stores the load for its averages.
        if not super().decode_budget(load):
            return 0.0
        total = self._total_decode_cost(load)
        # The last decode exceeds the budget by half of one on average; at least one always runs.
        return max(total / load.depth - total / load.num_decoding / 2, self._base_decode_cost)

    def decode_cost(self, num_context_tokens: int) -> float:
        """Return the cost of a decode's token and its context."""
        return self._base_decode_cost + num_context_tokens * self._context_token_cost

    def prefill_budget(self, load: SchedulerLoad) -> float:
        """Return (3) in cost, less the cost of the scheduled decodes above an even share.

        The micro-batch as a whole therefore takes its share of time.
        """
        budget = super().prefill_budget(self._load_in_cost(load))
        if not budget or not load.num_decoding:
            return budget
        excess = load.scheduled_decode_cost - self._total_decode_cost(load) / load.depth
        return max(budget - excess, self._config.min_prefill_tokens)

    def size_chunk(self, start: int, max_tokens: int, budget: float) -> tuple[int, float]:
        """Return the number of tokens that cost the budget, and the cost.

        It is the positive root of tokens * (1 + pair * (start + (tokens + 1) / 2)) = budget.
        """
        half = self._pair_cost / 2
        linear = 1 + self._pair_cost * (start + 0.5)
        root = (math.sqrt(linear**2 + 4 * half * budget) - linear) / (2 * half) if half else budget
        num_tokens = min(max_tokens, max(1, math.ceil(root)))
        return num_tokens, num_tokens + self._pair_cost * count_query_key_pairs(start, num_tokens)

    def _total_decode_cost(self, load: SchedulerLoad) -> float:
        return (
            load.num_decoding * self._base_decode_cost
            + load.num_decode_context_tokens * self._context_token_cost
        )

    def _load_in_cost(self, load: SchedulerLoad) -> SchedulerLoad:
        """Return the load record with costs in place of prefill tokens."""
        waiting = load.num_waiting_tokens + self._pair_cost * load.num_waiting_pairs
        started = load.num_started_tokens + self._pair_cost * load.num_started_pairs
        return load._replace(num_waiting_tokens=waiting, num_started_tokens=started)
