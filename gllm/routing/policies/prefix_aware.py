"""Routing policy `prefix-aware`: the engine with the fewest tokens to compute for a request.

These are the tokens that wait on the engine and those of the prompt that its prefix cache does not
have, so that a cached prefix outweighs as many waiting tokens.
"""

from collections.abc import Mapping, Sequence

from gllm.routing.policies.simple import choose_least
from gllm.routing.policy import RoutingPolicy
from gllm.routing.prefix_index import PrefixIndex
from gllm.routing.state import EngineSnapshot, RoutingRequest

TOKENS_PER_REQUEST = 16
"""Waiting tokens that count as much as one running request, which delays the prefill of others by
its decodes."""


def count_cached_tokens(
    request: RoutingRequest, engines: Sequence[EngineSnapshot], prefixes: PrefixIndex
) -> Mapping[str, int]:
    """Return the number of a request's prompt tokens in each engine's prefix cache, by name.

    The last token never counts: an engine always computes it to sample from it.
    """
    cached = prefixes.cached_blocks(request.block_hashes)
    return {
        engine.name: min(
            cached.get(engine.name, 0), (request.num_prompt_tokens - 1) // engine.block_size
        )
        * engine.block_size
        for engine in engines
    }


class PrefixAwarePolicy(RoutingPolicy):
    """Routing policy `prefix-aware`: the engine with the fewest tokens to compute for the request.

    These are the request's tokens that the engine has not cached, the waiting prefill tokens, and
    some for each running request.

    Source: the cost of NVIDIA Dynamo's KV router, with running requests instead of their blocks: a
    decode delays a prefill by its token, not by its context.
    """

    uses_prefixes = True

    def choose(self, request: RoutingRequest, engines: Sequence[EngineSnapshot]) -> str | None:
        """Return the engine with the fewest tokens to compute."""
        cached = count_cached_tokens(request, engines, self.prefixes)

        def num_tokens(engine: EngineSnapshot) -> float:
            own = request.num_prompt_tokens - cached[engine.name]
            running = TOKENS_PER_REQUEST * engine.num_requests
            return (engine.num_uncomputed_tokens + running + own) / engine.weight

        return choose_least(engines, num_tokens, self._rng)
