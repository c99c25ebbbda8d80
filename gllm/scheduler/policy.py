"""How much of a micro-batch goes to decodes and to prefill: policies by name.

Owns the throttling equations. Knows nothing of sequences and blocks: a policy sees a load record,
returns budgets and says what rows cost of them. A policy is a class, or a variation of one, and one
line of policies.py.

Source of equations and symbols: arXiv 2504.14775, section on token throttling; where the paper is
silent (suspension with nothing decoding, remainders of #RD / #PP_depth) docs/scheduler.md says what
was chosen.
"""

import math
from typing import NamedTuple, Protocol

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.stage_work import StageWork

PREFILL_TOKENS_PER_DECODE = 8
"""Prefill tokens for each decode of a micro-batch at which prefill has 8/9 of it."""
YIELDED_TOKENS_PER_DECODE = 4
"""Tokens that each decode of a micro-batch takes off the chunk that would suit prefill best.
docs/scheduler.md has the measurements behind both."""


class SchedulerLoad(NamedTuple):
    """What a policy may know when it fills a micro-batch."""

    waiting_tokens: float
    """#WP: prompt tokens neither cached nor scheduled, over all requests."""
    waiting_pairs: float
    """Query-key pairs that those tokens will bring."""
    begun_tokens: float
    """What is scheduled already of the prompt that is served first."""
    begun_pairs: float
    """The same in query-key pairs."""
    decoding: int
    """#RD: sequences in decode, in flight or not."""
    decode_context: int
    """Tokens that those hold in the cache."""
    ready: int
    """S: those of them that can run now."""
    scheduled: int
    """Decodes in this micro-batch; 0 while they are being chosen."""
    scheduled_cost: float
    """What they cost of the policy's budget."""
    kv_free: float
    """KV_free: free share of the KV cache, evictable blocks counted as free, 0..1."""
    decode_plans: int
    """k: plans issued so far that carried decodes."""


class SchedulingPolicy(Protocol):
    """Budgets for one micro-batch, in a unit of the policy's own. Caps (max_num_batched_tokens,
    blocks, #WP) are applied later."""

    prefill_leads: bool
    """Prefill is chosen first, and decodes run only in micro-batches without any."""
    learns: bool
    """It wants to hear how long steps took."""

    def decodes(self, load: SchedulerLoad) -> float:
        """Budget for decodes: they are taken until it is used up, the last one may exceed it."""

    def decode_cost(self, context: int) -> float:
        """What a decode with that many tokens in the cache costs."""

    def prefill(self, load: SchedulerLoad) -> float:
        """Budget for prefill; `load.kv_free` is what the decodes have left."""

    def chunk(self, start: int, most: int, budget: float) -> tuple[int, float]:
        """Tokens of a chunk after `start` earlier ones, 1 to `most`, and what they cost."""

    def observe(self, work: StageWork, seconds: float) -> None:
        """A step's work and how long the slowest stage took for it."""


class TokenBudgetPolicy:
    """What policies have in common that budget tokens: each costs one."""

    prefill_leads = False
    learns = False

    def decode_cost(self, context: int) -> float:
        """One token."""
        return 1

    def chunk(self, start: int, most: int, budget: float) -> tuple[int, float]:
        """As many as fit."""
        tokens = min(most, max(1, math.ceil(budget)))
        return tokens, tokens

    def observe(self, work: StageWork, seconds: float) -> None:
        """Learns nothing."""


class PaperThrottlePolicy(TokenBudgetPolicy):
    """Token throttling: decodes spread evenly (4), prefill by waiting tokens and free cache (3).

    `by_waiting` and `by_cache` switch off the two factors of (3) for the paper's ablation; the
    threshold below which prefill pauses holds in all of them.
    """

    def __init__(
        self, config: SchedulerConfig, by_waiting: bool = True, by_cache: bool = True
    ) -> None:
        self._config = config
        self._by_waiting = by_waiting
        self._by_cache = by_cache

    def decodes(self, load: SchedulerLoad) -> float:
        """(4), with the remainder of #RD / #PP_depth going to the first plans of each round."""
        share, rest = divmod(load.decoding, self._config.stages)
        share += load.decode_plans % self._config.stages < rest
        return min(load.ready, max(1, share))

    def prefill(self, load: SchedulerLoad) -> float:
        """(3); where nothing decodes, (1): there is nobody to hold cache back for."""
        config = self._config
        if load.decoding and load.kv_free <= config.kv_threshold:
            return 0
        tokens = float(config.max_prefill_tokens)
        if self._by_waiting:
            tokens = min(tokens, self._paced(load))
        if self._by_cache and load.decoding:
            spare = (load.kv_free - config.kv_threshold) / (1 - config.kv_threshold)
            tokens = min(tokens, config.max_prefill_tokens * spare)
        return math.ceil(max(tokens, config.min_prefill_tokens))

    def _paced(self, load: SchedulerLoad) -> float:
        return load.waiting_tokens / self._config.prefill_iterations


class ThrottlePolicy(PaperThrottlePolicy):
    """The paper's, but for how waiting tokens become chunks while few sequences decode."""

    def _paced(self, load: SchedulerLoad) -> float:
        """#WP / #T, but #WP counts a half-scheduled prompt whole, or its chunks would shrink as it
        is consumed; at most PREFILL_PER_DECODE tokens for each decode in the micro-batch: with that
        share the pipeline is prefill's already, and larger chunks only fill it more slowly; at
        least the chunk that suits prefill best, less what it has to yield to decodes."""
        work = load.waiting_tokens + load.begun_tokens
        paced = min(
            work / self._config.prefill_iterations, PREFILL_TOKENS_PER_DECODE * load.scheduled
        )
        return max(paced, self._efficient_chunk(work) - YIELDED_TOKENS_PER_DECODE * load.scheduled)

    def _efficient_chunk(self, work: float) -> float:
        """Tokens of the equal chunks that take `work` prefill tokens through an idle pipeline
        soonest.

        With n tokens in a chunk that is (work / n + stages - 1) steps of a time like
        hypot(n, ridge_tokens), the rounded roofline; its derivative is zero where
        n ** 3 = work * ridge_tokens ** 2 / (stages - 1). One stage has nothing to fill.
        """
        if self._config.stages == 1:
            return work
        best = math.cbrt(work * self._config.ridge_tokens**2 / (self._config.stages - 1))
        return work / math.ceil(work / best) if work else 0


class SarathiPolicy(TokenBudgetPolicy):
    """One token budget: every ready decode, then prefill chunks up to the budget.

    Source: "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (OSDI'24).
    """

    def __init__(self, config: SchedulerConfig) -> None:
        assert config.max_num_batched_tokens is not None
        self._budget = config.max_num_batched_tokens

    def decodes(self, load: SchedulerLoad) -> float:
        """All that can run."""
        return load.ready

    def prefill(self, load: SchedulerLoad) -> float:
        """All that the cap leaves."""
        return self._budget


class PrefillFirstPolicy(SarathiPolicy):
    """Prefill whenever there is any, decodes in between: short TTFT, stalls in the stream."""

    prefill_leads = True
