"""Requests per second that an engine sustains, predicted from its step costs and request lengths.

In a full pipeline each stage computes without a pause. A request takes its prefill and its share of
the decode steps of a batch; the batch is the largest within the seats, the KV cache and the limit
of the time per output token.
"""

from typing import NamedTuple

from gllm.routing.state import EngineSnapshot
from gllm.scheduler.step_cost import StepCostCoefficients

LENGTH_DECAY = 0.99
"""Factor on the weight of a request's lengths with each later one."""
USED_SHARE = 0.8
"""Share of the highest rate that is planned with: at the highest one, queues grow without end."""


class RecentLengths(NamedTuple):
    """Moving averages of the prompt and output lengths of requests, in tokens."""

    prompt: float
    output: float

    def mix(self, latest: "RecentLengths") -> "RecentLengths":
        """Return the average updated with the latest request."""
        pairs = zip(self, latest, strict=True)
        return RecentLengths(*(LENGTH_DECAY * old + (1 - LENGTH_DECAY) * new for old, new in pairs))


def sustained_rate(
    engine: EngineSnapshot,
    costs: StepCostCoefficients,
    lengths: RecentLengths,
    tpot_seconds: float | None = None,
) -> float:
    """Return the requests per second that an engine can serve in steady state, by a formula.

    Args:
        engine: number of stages and limits of batch size and KV cache.
        costs: step time model of its slowest stage.
        lengths: mean prompt and output lengths of its requests.
        tpot_seconds: limit of the time per output token in seconds; None for no limit.
    """
    context = lengths.prompt + lengths.output / 2
    batch = float(engine.max_num_seqs) / engine.num_stages
    if engine.num_kv_tokens:
        batch = min(batch, engine.num_kv_tokens / context / engine.num_stages)
    per_decode = costs.token + costs.decode + costs.context_token * context
    if tpot_seconds is not None and per_decode:
        batch = min(batch, (tpot_seconds / engine.num_stages - costs.step) / per_decode)
    batch = max(1.0, batch)
    prefill = costs.token * lengths.prompt + costs.pair * lengths.prompt**2 / 2
    decode = lengths.output * (costs.step / batch + per_decode)
    return USED_SHARE / max(1e-9, prefill + decode)
