"""Routing policy `predict`: the engine with the earliest predicted first token.

The prediction is made from the step cost model that each engine fits to its own steps, so engines
may differ in their devices, stages and load.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from gllm.routing.policies.prefix_aware import count_cached_tokens
from gllm.routing.policy import RoutingPolicy
from gllm.routing.prefix_index import PrefixIndex
from gllm.routing.state import EngineSnapshot, RoutingRequest, median_coefficients
from gllm.scheduler.plan import SchedulerStats
from gllm.scheduler.step_cost import DEFAULT_RIDGE_TOKENS, StepCostCoefficients

PREFILL_ITERATIONS, TOKENS_PER_DECODE = 8, 8
"""Estimate of a chunk beside decodes while no prompts queue: a part of the waiting prefill, up to a
number of tokens for each decode of the micro-batch."""
SPARED_TOKENS = 4
"""Tokens by which each of these decodes makes the chunk smaller that is best on idle stages."""
DEFAULT_COEFFICIENTS = StepCostCoefficients(step=0.005, token=1e-4)
"""Step costs of engines while no engine of the fleet has fitted any; only their relation to each
other matters then."""
TIE_RATIO = 1.05
"""Predictions up to this factor apart count as equal."""


class Prediction(NamedTuple):
    """Predicted time to first token and time per output token of a request on one engine."""

    ttft_seconds: float
    tpot_seconds: float


class _Load(NamedTuple):
    """Figures that the micro-batches of an engine share while a request is prefilled."""

    base_seconds: float
    """Time of a micro-batch without its prefill, on the slowest stage."""
    chunk_tokens: int
    """Prefill tokens per micro-batch."""


def predict_latency(
    request: RoutingRequest, engine: EngineSnapshot, num_cached_tokens: int
) -> Prediction:
    """Predict the time to first token and per output token of a request on an engine.

    The first token comes after the waiting prefill and the request's own, in micro-batches that
    also run the engine's decodes. It also has to wait until finished requests have left enough KV
    blocks and places among the max_num_seqs; the later time counts. Other requests are assumed to
    be as long as this one.

    Args:
        request: prompt length and expected output length of the request.
        engine: load of the engine, and its fitted step time model.
        num_cached_tokens: prompt tokens in the engine's prefix cache.
    """
    costs = engine.coefficients or DEFAULT_COEFFICIENTS
    num_tokens = request.num_prompt_tokens - num_cached_tokens
    ahead = engine.num_uncomputed_tokens
    load = _load(engine, costs, ahead + num_tokens)
    tpot = _predict_tpot(request, engine, costs)
    mean_pairs = (min(ahead, request.num_prompt_tokens) + 1) / 2
    queue = ahead * (load.base_seconds / load.chunk_tokens + costs.token + costs.pair * mean_pairs)
    wait = max(queue, _seat_seconds(request, engine, num_tokens, tpot))
    own = math.ceil(num_tokens / load.chunk_tokens) * load.base_seconds
    own += costs.predict_chunk_seconds(num_cached_tokens, num_tokens)
    # The last chunk passes the other stages too; in a full pipeline it first waits for a slot.
    last_chunk = load.base_seconds + costs.token * min(num_tokens, load.chunk_tokens)
    is_full = engine.stats.in_flight >= engine.num_stages
    return Prediction(wait + own + (engine.num_stages - 1 + is_full) * last_chunk, tpot)


def predict_all(
    request: RoutingRequest, engines: Sequence[EngineSnapshot], prefixes: PrefixIndex
) -> Mapping[str, Prediction]:
    """Predict the time to first token and per output token of a request on each engine, by name.

    An engine without a step time model gets the median model of the others.
    """
    known = [engine.coefficients for engine in engines if engine.coefficients is not None]
    typical = median_coefficients(known) or DEFAULT_COEFFICIENTS
    cached = count_cached_tokens(request, engines, prefixes)
    return {
        engine.name: predict_latency(
            request,
            engine if engine.coefficients is not None else engine._replace(coefficients=typical),
            cached[engine.name],
        )
        for engine in engines
    }


class PredictPolicy(RoutingPolicy):
    """Routing policy `predict`: the engine with the least predicted time to first token.

    Only engines that meet the request's limit of the time per output token are considered, if there
    are any. Source: shortest expected delay, as in Winston, "Optimality of the Shortest Line
    Discipline" (1977), with delays from the engines' own step cost models.
    """

    uses_prefixes = True
    uses_step_costs = True

    def choose(self, request: RoutingRequest, engines: Sequence[EngineSnapshot]) -> str | None:
        """Return the engine with the least predicted TTFT; of about equal ones the emptiest."""
        if not engines:
            return None
        predictions = predict_all(request, engines, self.prefixes)
        objective = request.slo.tpot_seconds if request.slo is not None else None
        if objective is not None:
            # The fastest engines, if none meets the objective.
            fastest = min(prediction.tpot_seconds for prediction in predictions.values())
            limit = max(objective, TIE_RATIO * fastest)
            engines = [
                engine for engine in engines if predictions[engine.name].tpot_seconds <= limit
            ]
        delays = {
            engine.name: predictions[engine.name].ttft_seconds / engine.weight for engine in engines
        }
        longest = min(delays.values()) * TIE_RATIO
        equal = [engine for engine in engines if delays[engine.name] <= longest]
        self._rng.shuffle(equal)
        return min(equal, key=lambda engine: (engine.num_requests, engine.stats.kv_usage)).name


def _load(engine: EngineSnapshot, costs: StepCostCoefficients, num_tokens: int) -> _Load:
    """Return the micro-batches in which an engine prefills that many tokens."""
    stats = engine.stats
    # Every stage runs a share of the decodes in each micro-batch.
    num_decodes = stats.running / engine.num_stages
    base = costs.step + (costs.token + costs.decode) * num_decodes
    base += costs.context_token * stats.decode_context_tokens / engine.num_stages
    chunk = engine.max_num_batched_tokens - math.ceil(num_decodes)
    chunk = min(chunk, _estimate_chunk(engine.num_stages, num_tokens, stats))
    return _Load(base, max(1, min(chunk, num_tokens)))


def _estimate_chunk(num_stages: int, num_tokens: int, stats: SchedulerStats) -> int:
    """Estimate the prefill tokens per micro-batch.

    While prompts queue, every micro-batch takes as many as those in flight, whatever the engine's
    policy. Otherwise they are estimated for `throttle`, which chooses by its fitted step time and
    averages, which a router does not have: the best size on idle stages is that for a step time
    like hypot(n, DEFAULT_RIDGE_TOKENS).
    """
    if stats.waiting_tokens > stats.in_flight_prefill_tokens > 0:
        return math.ceil(stats.in_flight_prefill_tokens / max(1, stats.in_flight))
    num_decodes = -(-stats.running // num_stages)
    edges = max(1, num_stages - 1)
    best = math.cbrt(num_tokens * DEFAULT_RIDGE_TOKENS**2 / edges)
    paced = min(num_tokens / PREFILL_ITERATIONS, TOKENS_PER_DECODE * num_decodes)
    return math.ceil(max(paced, best - SPARED_TOKENS * num_decodes, 1))


def _predict_tpot(
    request: RoutingRequest, engine: EngineSnapshot, costs: StepCostCoefficients
) -> float:
    """Return the predicted time per output token once the request decodes.

    A sequence gets a token each time that its micro-batch has passed all stages. Prefill takes
    part in these micro-batches as often as it has so far, in relation to all tokens that the
    prompts so far lead to.
    """
    stats = engine.stats
    length = request.num_prompt_tokens + request.num_output_tokens
    capacity = engine.num_blocks * engine.block_size
    num_sequences = min(engine.num_requests + 1, engine.max_num_seqs)
    if capacity:
        # Those that do not fit wait for their KV blocks.
        num_sequences = min(num_sequences, max(stats.running, capacity // length) + 1)
    num_decodes = max(1.0, num_sequences / engine.num_stages)
    num_expected = stats.decode_tokens + stats.running * request.num_output_tokens / 2
    prefill = stats.prefill_tokens / num_expected if num_expected else 0.0
    seconds = costs.step + (costs.token * (1 + prefill) + costs.decode) * num_decodes
    context = stats.decode_context_tokens + request.num_prompt_tokens
    seconds += costs.context_token * context / engine.num_stages
    return engine.num_stages * seconds


def _seat_seconds(
    request: RoutingRequest, engine: EngineSnapshot, num_tokens: int, tpot: float
) -> float:
    """Return the time until enough sequences have finished to make place for a request.

    Running sequences are at random points of their output, so each of them ends at a rate of one
    per time of a whole output and then frees its share of the KV cache.
    """
    stats = engine.stats
    if not stats.running:
        return 0.0
    seconds_per_output = request.num_output_tokens * tpot
    num_seats = engine.max_num_seqs - stats.running
    missing_seats = stats.waiting + engine.num_sent + 1 - num_seats
    wait = max(0, missing_seats) / stats.running * seconds_per_output
    capacity = engine.num_blocks * engine.block_size
    missing_tokens = engine.num_waiting_tokens + num_tokens - capacity * (1 - stats.kv_usage)
    held_tokens = capacity * stats.kv_usage
    if capacity and missing_tokens > 0 and held_tokens > 0:
        wait = max(wait, missing_tokens / held_tokens * seconds_per_output)
    return wait
