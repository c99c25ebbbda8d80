"""How much of a micro-batch goes to decodes and to prefill: policies by name.

Owns the throttling equations. Knows nothing of sequences and blocks: a policy sees a load record
and returns budgets in tokens. A policy is a class, or a variation of
one, and one line of POLICIES.

Source of equations and symbols: arXiv 2504.14775, section on token throttling; where the paper is
silent (suspension with nothing decoding, remainders of #RD / #PP_depth) docs/scheduler.md says what
was chosen.
"""

import math
from collections.abc import Callable
from typing import NamedTuple, Protocol

from gllm.scheduler.config import SchedulerConfig


class Load(NamedTuple):
    """What a policy may know when it fills a micro-batch."""

    waiting_tokens: int
    """#WP: prompt tokens neither cached nor scheduled, over all requests."""
    decoding: int
    """#RD: sequences in decode, in flight or not."""
    ready: int
    """S: those of them that can run now."""
    kv_free: float
    """KV_free: free share of the KV cache, evictable blocks counted as free, 0..1."""
    decode_plans: int
    """k: plans issued so far that carried decodes."""


class Policy(Protocol):
    """Budgets for one micro-batch. Caps (max_num_batched_tokens, blocks, #WP) are applied later."""

    prefill_leads: bool
    """Prefill is chosen first, and decodes run only in micro-batches without any."""

    def decodes(self, load: Load) -> int:
        """Decode tokens to schedule."""

    def prefill(self, load: Load) -> int:
        """Prefill tokens to schedule; `load.kv_free` is what the decodes have left."""


class Throttle:
    """Token throttling: decodes spread evenly (4), prefill by waiting tokens and free cache (3).

    `by_waiting` and `by_cache` switch off the two factors of (3) for the paper's ablation; the
    threshold below which prefill pauses holds in all of them.
    """

    prefill_leads = False

    def __init__(
        self, config: SchedulerConfig, by_waiting: bool = True, by_cache: bool = True
    ) -> None:
        self._config = config
        self._by_waiting = by_waiting
        self._by_cache = by_cache

    def decodes(self, load: Load) -> int:
        """(4), with the remainder of #RD / #PP_depth going to the first plans of each round."""
        share, rest = divmod(load.decoding, self._config.stages)
        share += load.decode_plans % self._config.stages < rest
        return min(load.ready, max(1, share))

    def prefill(self, load: Load) -> int:
        """(3); where nothing decodes, (1): there is nobody to hold cache back for."""
        config = self._config
        if load.decoding and load.kv_free <= config.kv_threshold:
            return 0
        tokens = float(config.max_prefill_tokens)
        if self._by_waiting:
            tokens = min(tokens, load.waiting_tokens / config.prefill_iterations)
        if self._by_cache and load.decoding:
            spare = (load.kv_free - config.kv_threshold) / (1 - config.kv_threshold)
            tokens = min(tokens, config.max_prefill_tokens * spare)
        return math.ceil(max(tokens, config.min_prefill_tokens))


class Sarathi:
    """One token budget: every ready decode, then prefill chunks up to the budget.

    Source: "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve" (OSDI'24).
    """

    prefill_leads = False

    def __init__(self, config: SchedulerConfig) -> None:
        assert config.max_num_batched_tokens is not None
        self._budget = config.max_num_batched_tokens

    def decodes(self, load: Load) -> int:
        """All that can run."""
        return load.ready

    def prefill(self, load: Load) -> int:
        """All that the cap leaves."""
        return self._budget


class PrefillFirst(Sarathi):
    """Prefill whenever there is any, decodes in between: short TTFT, stalls in the stream."""

    prefill_leads = True


POLICIES: dict[str, Callable[[SchedulerConfig], Policy]] = {
    "throttle": Throttle,
    "throttle-no-wt": lambda config: Throttle(config, by_waiting=False),
    "throttle-no-ut": lambda config: Throttle(config, by_cache=False),
    "sarathi": Sarathi,
    "prefill-first": PrefillFirst,
}
