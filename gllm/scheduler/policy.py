"""Scheduling policies: the share of a micro-batch for decodes and for prefill.

Contains the throttling equations. From a load record a policy returns budgets and the cost of rows;
`fill` decides which phase gets its rows first. A policy is a class and one line of
policy_registry.py.

Source of equations and symbols: arXiv 2504.14775, section on token throttling. Where the paper is
silent (suspension with nothing decoding, remainders of #RD / #PP_depth) docs/scheduler.md states
the choice.
"""

import math
from typing import TYPE_CHECKING, NamedTuple, Protocol

from gllm.scheduler.admission import AdmissionController
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import ScheduledRow
from gllm.scheduler.stage_work import StageWork
from gllm.scheduler.step_cost import OnlineStepCurveFit

if TYPE_CHECKING:
    from gllm.scheduler.micro_batch import MicroBatchFiller


class SchedulerLoad(NamedTuple):
    """Waiting tokens, decodes and free KV cache of a pipeline: the input of scheduling policies."""

    num_waiting_tokens: float
    """#WP: prompt tokens neither cached nor scheduled, over all requests."""
    num_waiting_pairs: float
    """Query-key pairs of the waiting tokens."""
    num_waiting_prompts: int
    """Prompts with waiting tokens."""
    num_started_tokens: float
    """Tokens already scheduled of the prompt that is prefilled next."""
    num_started_pairs: float
    """Query-key pairs of these tokens."""
    num_decoding: int
    """#RD: sequences in decode, in flight or not."""
    num_decode_context_tokens: int
    """Tokens of the decoding sequences in the cache."""
    num_ready_decodes: int
    """S: decoding sequences that can run now."""
    num_scheduled_decodes: int
    """Decodes in this micro-batch; 0 while they are being selected."""
    scheduled_decode_cost: float
    """Cost of these decodes in the unit of the policy's budget."""
    kv_free: float
    """KV_free: free share of the KV cache, evictable blocks counted as free, 0..1."""
    num_decode_plans: int
    """k: plans with decodes issued so far."""
    depth: int
    """#PP_depth: micro-batches over which the decodes are spread."""


class SchedulingPolicy(Protocol):
    """Interface of scheduling policies: decide how many decodes and prefill tokens run next.

    Budgets are in a unit that the policy defines, such as tokens or predicted time. The scheduler
    applies the limits of tokens (max_num_batched_tokens), KV blocks and waiting tokens afterwards.
    """

    learns_step_times: bool
    """True if the policy learns from step times, so that `observe_step` is called for every
    step."""
    admission: type[AdmissionController]
    """Class of the controller that admits waiting sequences to the KV cache."""

    @property
    def curve_fit(self) -> OnlineStepCurveFit | None:
        """Step time by tokens that the policy fits; None if it fits none."""

    @property
    def prefill_batch_tokens(self) -> int:
        """Prompt tokens per micro-batch that the policy aims at; 0 if it has no such number."""

    def fill(self, batch: "MicroBatchFiller", now: float) -> list[ScheduledRow]:
        """Return the rows of the next micro-batch, which may mix both phases.

        Args:
            batch: schedules rows by the budgets of this policy.
            now: current time in seconds.
        """

    def leads_with_prefill(self, follows_decodes: bool) -> bool:
        """Return True if prefill precedes decodes where a micro-batch has one phase.

        Args:
            follows_decodes: the previous micro-batch has decodes.
        """

    def accepts_prompt(self, num_tokens: int, max_tokens: float) -> bool:
        """Return True if a prompt may follow other prefill in a micro-batch.

        Args:
            num_tokens: tokens of the prompt that are neither cached nor scheduled.
            max_tokens: tokens that fit into the micro-batch and its prefill budget.
        """

    def decode_budget(self, load: SchedulerLoad) -> float:
        """Return the budget for decodes; the last decode may exceed it."""

    def decode_cost(self, num_context_tokens: int) -> float:
        """Return the cost of a decode with that many tokens in the cache."""

    def prefill_budget(self, load: SchedulerLoad) -> float:
        """Return the budget for prefill; `load.kv_free` accounts for the scheduled decodes."""

    def size_chunk(self, start: int, max_tokens: int, budget: float) -> tuple[int, float]:
        """Return the size of a prefill chunk and its cost.

        Args:
            start: tokens of the sequence before the chunk.
            max_tokens: upper limit of the chunk, at least 1.
            budget: remaining prefill budget.

        Returns:
            Tokens, 1 to `max_tokens`, and their cost.
        """

    def observe_step(self, work: StageWork, seconds: float) -> None:
        """Learn from the measured time of a completed step.

        Args:
            work: tokens and context of the step.
            seconds: its interval in a full pipeline, at least the time of its slowest stage
                (gllm/scheduler/step_intervals.py).
        """


class TokenBudgetPolicy:
    """Base of the policies whose budgets are numbers of tokens.

    Decodes come first, then prefill chunks in the same micro-batch; every prompt may be split.
    """

    learns_step_times = False
    curve_fit: OnlineStepCurveFit | None = None
    admission: type[AdmissionController] = AdmissionController

    @property
    def prefill_batch_tokens(self) -> int:
        """Prompt tokens per micro-batch that the policy aims at; 0 if it has no such number."""
        return 0

    def fill(self, batch: "MicroBatchFiller", now: float) -> list[ScheduledRow]:
        """Return rows of decodes, then of prefill within the remaining budget."""
        rows, cost = batch.schedule_decodes()
        return rows + batch.schedule_prefills(rows, cost, now)

    def leads_with_prefill(self, follows_decodes: bool) -> bool:
        """Return True after decodes: the phases alternate while both have work."""
        return follows_decodes

    def accepts_prompt(self, num_tokens: int, max_tokens: float) -> bool:
        """Return True: a prompt that does not fit is split."""
        return True

    def decode_cost(self, num_context_tokens: int) -> float:
        """Return 1: the cost of a decode is its token."""
        return 1

    def size_chunk(self, start: int, max_tokens: int, budget: float) -> tuple[int, float]:
        """Return the number of tokens within the budget, and the budget that they use."""
        num_tokens = min(max_tokens, max(1, math.ceil(budget)))
        return num_tokens, num_tokens

    def observe_step(self, work: StageWork, seconds: float) -> None:
        """Ignore step times."""


class PrefillLeads:
    """Mixin of policies that never mix phases: prefill if a prompt waits, otherwise decodes."""

    def fill(self, batch: "MicroBatchFiller", now: float) -> list[ScheduledRow]:
        """Return rows of prefill if there are any, otherwise of decodes."""
        return batch.fill_one_phase(True, now)

    def leads_with_prefill(self, follows_decodes: bool) -> bool:
        """Return True: prefill always precedes decodes."""
        return True


class PaperThrottlePolicy(TokenBudgetPolicy):
    """Policy `throttle-paper`: token throttling with the equations of the gLLM paper, unchanged.

    Decodes are spread evenly over the micro-batches in flight (equation 4). Prefill tokens are
    limited by the waiting tokens and the free KV cache (equation 3).
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self._config = config

    def decode_budget(self, load: SchedulerLoad) -> float:
        """Return equation (4): the decodes divided by the micro-batches in flight.

        The remainder of #RD / #PP_depth goes to the first micro-batches of each round.
        """
        share, remainder = divmod(load.num_decoding, load.depth)
        share += load.num_decode_plans % load.depth < remainder
        return min(load.num_ready_decodes, max(1, share))

    def prefill_budget(self, load: SchedulerLoad) -> float:
        """Return equation (3); without decodes (1), because no sequence needs cache to grow."""
        config = self._config
        if load.num_decoding and load.kv_free <= config.kv_threshold:
            return 0
        tokens = min(config.max_prefill_tokens, self._tokens_by_waiting(load))
        if load.num_decoding:
            tokens = min(tokens, self._tokens_by_free_cache(load))
        return math.ceil(max(tokens, config.min_prefill_tokens))

    def _tokens_by_waiting(self, load: SchedulerLoad) -> float:
        """Return the factor of (3) for waiting tokens."""
        return load.num_waiting_tokens / self._config.prefill_iterations

    def _tokens_by_free_cache(self, load: SchedulerLoad) -> float:
        """Return the factor of (3) for the free cache."""
        config = self._config
        spare = (load.kv_free - config.kv_threshold) / (1 - config.kv_threshold)
        return config.max_prefill_tokens * spare


class SarathiPolicy(TokenBudgetPolicy):
    """Policy `sarathi`: all ready decodes, then prefill chunks up to max_num_batched_tokens.

    Source: "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (OSDI'24).
    """

    def __init__(self, config: SchedulerConfig) -> None:
        assert config.max_num_batched_tokens is not None
        self._budget = config.max_num_batched_tokens

    def decode_budget(self, load: SchedulerLoad) -> float:
        """Return the number of all ready decodes."""
        return load.num_ready_decodes

    def prefill_budget(self, load: SchedulerLoad) -> float:
        """Return max_num_batched_tokens, which the scheduler reduces by the decodes."""
        return self._budget


class PrefillFirstPolicy(PrefillLeads, SarathiPolicy):
    """Policy `prefill-first`: prefill chunks while a prompt waits, else decodes; never both.

    Gives a short time to first token, but long gaps between the tokens of running sequences.
    """
