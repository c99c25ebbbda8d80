"""Routing policy `deferred`: a request waits at the router until an engine has room for it.

Requests are bound to an engine as late as possible, so that none waits at one engine while another
is idle, whatever their lengths turn out to be.

Source: deferred routing of "Vidur" (MLSys'24, arXiv 2405.05465), which gives no rule for the room.
"""

from collections.abc import Sequence

from gllm.routing.policies.simple import choose_least, weighted_requests
from gllm.routing.policy import RoutingPolicy
from gllm.routing.state import EngineSnapshot, RoutingRequest

SPARE_BATCHES = 2
"""Micro-batches of prompts that may wait at an engine in addition to one per stage: the engine
computes them while its report and the next requests are on their way."""


class DeferredPolicy(RoutingPolicy):
    """Routing policy `deferred`: of the engines with room, the one with the fewest requests.

    An engine has room if it has a free place, the prompts that wait there and this one fit into a
    few micro-batches, and its KV cache has space for them. Without such an engine the request
    stays at the router, except one that an engine has had already: that one goes to the engine
    with the fewest requests. Source: "Vidur" (MLSys'24, arXiv 2405.05465).
    """

    waits_for_room = True

    def choose(self, request: RoutingRequest, engines: Sequence[EngineSnapshot]) -> str | None:
        """Return the engine with the fewest requests among those with room; None if there is none.

        A weight below 1 scales the limits of an engine.
        """
        able = [engine for engine in engines if self.has_room(engine, request.num_prompt_tokens)]
        if not able and request.is_moved:
            able = list(engines)
        return choose_least(able, weighted_requests, self._rng)

    def has_room(self, engine: EngineSnapshot, num_prompt_tokens: int = 1) -> bool:
        """Return True if an engine can begin soon with a prompt."""
        num_requests, num_waiting = engine.num_requests, engine.num_waiting_tokens
        if num_requests >= max(1, int(engine.max_num_seqs * engine.weight)):
            return False
        num_batches = (engine.num_stages + SPARE_BATCHES) * engine.weight
        num_tokens = num_waiting + num_prompt_tokens
        if num_waiting and num_tokens > num_batches * engine.max_num_batched_tokens:
            return False
        num_free = engine.num_kv_tokens * engine.weight - engine.num_used_kv_tokens
        return not num_requests or num_tokens <= num_free
