"""Throttling by predicted time instead of tokens.

Owns the policy `balance`. A token late in a long prompt attends to more than an early one, and so
does a decode with a long context: rows are weighed by what a cost model, fitted to the steps that
the stages report, says they take. Until it is fitted a row weighs its tokens, as under `throttle`.
"""

import math

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.policy import SchedulerLoad, ThrottlePolicy
from gllm.scheduler.stage_work import StageWork, count_query_key_pairs
from gllm.scheduler.step_cost import OnlineStepCostFit, StepCostCoefficients


class BalancePolicy(ThrottlePolicy):
    """The budgets of `throttle`, in prefill tokens at the beginning of a prompt: what takes as
    long as k of those costs k."""

    learns = True

    def __init__(self, config: SchedulerConfig) -> None:
        super().__init__(config)
        self._fit = OnlineStepCostFit()
        self._pair = 0.0
        """Cost of a query-key pair."""
        self._decode = 1.0
        """Cost of a decode without its context."""
        self._context = 0.0
        """Cost of a token that a decode attends to."""

    def observe(self, work: StageWork, seconds: float) -> None:
        """Follow the fit."""
        self._fit.observe(work, seconds)
        fitted = self._fit.fitted
        if fitted is not None and fitted.token > 0:
            self._weigh(fitted)

    def decodes(self, load: SchedulerLoad) -> float:
        """(4) in cost: an even share of what all running decodes cost together."""
        if not load.ready:
            return 0.0
        total = load.decoding * self._decode + load.decode_context * self._context
        # The last decode exceeds the budget by half of one on average; one always runs.
        return max(total / self._config.stages - total / load.decoding / 2, self._decode)

    def decode_cost(self, context: int) -> float:
        """Its token and its context."""
        return self._decode + context * self._context

    def prefill(self, load: SchedulerLoad) -> float:
        """(3) in cost, less what the decodes at hand cost more than an even share would, so that
        the micro-batch as a whole takes its share of time."""
        budget = super().prefill(self._weighed(load))
        if not budget or not load.decoding:
            return budget
        total = load.decoding * self._decode + load.decode_context * self._context
        excess = load.scheduled_cost - total / self._config.stages
        return max(budget - excess, self._config.min_prefill_tokens)

    def chunk(self, start: int, most: int, budget: float) -> tuple[int, float]:
        """The positive root of tokens * (1 + pair * (start + (tokens + 1) / 2)) = budget."""
        half = self._pair / 2
        linear = 1 + self._pair * (start + 0.5)
        root = (math.sqrt(linear**2 + 4 * half * budget) - linear) / (2 * half) if half else budget
        tokens = min(most, max(1, math.ceil(root)))
        return tokens, tokens + self._pair * count_query_key_pairs(start, tokens)

    def _weighed(self, load: SchedulerLoad) -> SchedulerLoad:
        """The load record with costs for tokens, so that the equations see time."""
        return load._replace(
            waiting_tokens=load.waiting_tokens + self._pair * load.waiting_pairs,
            begun_tokens=load.begun_tokens + self._pair * load.begun_pairs,
        )

    def _weigh(self, fitted: StepCostCoefficients) -> None:
        self._pair = fitted.pair / fitted.token
        self._decode = 1 + fitted.decode / fitted.token
        self._context = fitted.context / fitted.token
