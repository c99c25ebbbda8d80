"""Routing policies that look at nothing but the load of the engines.

A weight below 1 scales the load that an engine gets: an engine of weight 1/2 with one request
counts like an engine of weight 1 with two.
"""

from collections.abc import Callable, Sequence
from random import Random

from gllm.routing.policy import RoutingPolicy
from gllm.routing.smooth_round_robin import SmoothRoundRobin
from gllm.routing.state import EngineSnapshot, RoutingRequest


def weighted_requests(engine: EngineSnapshot) -> float:
    """Return an engine's load: (unfinished requests + 1) / weight."""
    return (engine.num_requests + 1) / engine.weight


def choose_least(
    engines: Sequence[EngineSnapshot], load: Callable[[EngineSnapshot], float], rng: Random
) -> str | None:
    """Return the name of the engine with the least load; ties are broken at random.

    Random ties keep routers that share engines from all choosing the same one. Returns None without
    engines.

    Args:
        engines: engines to choose from.
        load: returns the load of an engine.
        rng: breaks ties.
    """
    if not engines:
        return None
    loads = [load(engine) for engine in engines]
    least = min(loads)
    return rng.choice([engine.name for engine, x in zip(engines, loads, strict=True) if x == least])


class RoundRobinPolicy(RoutingPolicy):
    """Routing policy `round-robin`: all engines in turn, in proportion to their weights."""

    uses_statistics = False

    def __init__(self, rng: Random) -> None:
        super().__init__(rng)
        self._turns = SmoothRoundRobin()

    def choose(self, request: RoutingRequest, engines: Sequence[EngineSnapshot]) -> str | None:
        """Return the next engine of the round-robin order."""
        return self._turns.choose({engine.name: engine.weight for engine in engines})


class RandomPolicy(RoutingPolicy):
    """Routing policy `random`: a random engine, with probabilities in proportion to the weights."""

    uses_statistics = False

    def choose(self, request: RoutingRequest, engines: Sequence[EngineSnapshot]) -> str | None:
        """Return an engine with a probability in proportion to its weight."""
        if not engines:
            return None
        weights = [engine.weight for engine in engines]
        return self._rng.choices(engines, weights)[0].name


class LeastRequestsPolicy(RoutingPolicy):
    """Routing policy `least-requests`: the engine with the fewest unfinished requests."""

    uses_statistics = False
    uses_request_counts = True

    def choose(self, request: RoutingRequest, engines: Sequence[EngineSnapshot]) -> str | None:
        """Return the engine with the fewest requests."""
        return choose_least(engines, weighted_requests, self._rng)


class LeastTokensPolicy(RoutingPolicy):
    """Routing policy `least-tokens`: the engine with the fewest waiting and decode context tokens.

    Prompt tokens count until they are computed: an engine that computes a long prompt is not idle.
    """

    def choose(self, request: RoutingRequest, engines: Sequence[EngineSnapshot]) -> str | None:
        """Return the engine with the fewest tokens."""

        def weighted_tokens(engine: EngineSnapshot) -> float:
            num_tokens = engine.num_uncomputed_tokens + engine.stats.decode_context_tokens
            return (num_tokens + request.num_prompt_tokens) / engine.weight

        return choose_least(engines, weighted_tokens, self._rng)


class PendingTokensPolicy(RoutingPolicy):
    """Routing policy `pending-tokens`: the engine with the fewest prompt tokens plus decodes.

    A prompt counts until its first token, also while it is computed; each decode counts as one
    token.

    Source: JSQ of "Splitwise" (ISCA'24, arXiv 2311.18677); its simulator has the count.
    """

    uses_statistics = False
    uses_ongoing = True

    def choose(self, request: RoutingRequest, engines: Sequence[EngineSnapshot]) -> str | None:
        """Return the engine with the fewest pending tokens."""

        def weighted_tokens(engine: EngineSnapshot) -> float:
            num_tokens = sum(
                1 if ongoing.num_output_tokens else ongoing.num_prompt_tokens
                for ongoing in engine.ongoing
            )
            return (num_tokens + request.num_prompt_tokens) / engine.weight

        return choose_least(engines, weighted_tokens, self._rng)


class PowerOfTwoPolicy(RoutingPolicy):
    """Routing policy `power-of-two`: of two random engines, the one with fewer requests.

    Several routers with outdated statistics do not all choose the same engine then. Source:
    Mitzenmacher, "The Power of Two Choices in Randomized Load Balancing" (2001).
    """

    uses_statistics = False
    uses_request_counts = True

    def choose(self, request: RoutingRequest, engines: Sequence[EngineSnapshot]) -> str | None:
        """Return the one with fewer requests of two random engines."""
        pair = self._rng.sample(engines, min(2, len(engines)))
        return choose_least(pair, weighted_requests, self._rng)
