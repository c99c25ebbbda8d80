"""Engines and requests for tests of pair policies."""

from gllm.routing.disaggregation.policy import PairRequest
from gllm.routing.state import EngineSnapshot
from gllm.scheduler.plan import SchedulerStats


def engine(
    name: str,
    role: str,
    num_tokens: int = 16_000,
    state: str = "ready",
    num_sent_tokens: int = 0,
    **stats: float,
) -> EngineSnapshot:
    """Return an engine whose KV cache holds `num_tokens` tokens."""
    return EngineSnapshot(
        name,
        role,
        state,
        stats=SchedulerStats(**stats),  # type: ignore[arg-type]
        num_blocks=num_tokens // 16,
        block_size=16,
        num_sent_tokens=num_sent_tokens,
    )


def fleet(num_prefill: int, num_decode: int, num_tokens: int = 16_000) -> list[EngineSnapshot]:
    """Return idle engines p0, p1, ..., d0, d1, ..."""
    prefill = [engine(f"p{number}", "prefill", num_tokens) for number in range(num_prefill)]
    return prefill + [engine(f"d{number}", "decode", num_tokens) for number in range(num_decode)]


def pair_request(
    key: int, num_prompt_tokens: int = 100, num_output_tokens: int = 50
) -> PairRequest:
    """Return a request whose output length is known."""
    return PairRequest(key, num_prompt_tokens, num_output_tokens)
