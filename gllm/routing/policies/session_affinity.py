"""Routing policy `session`: the requests of a session go to one engine.

Source of the hash: Thaler and Ravishankar, "Using Name-Based Mappings to Increase Hit Rates"
(1998), with weights as in Schindelhauer and Schomaker, "Weighted Distributed Hash Tables" (2005).
Source of the limit: Mirrokni et al., "Consistent Hashing with Bounded Loads" (arXiv 1608.01350).
"""

import math
from collections.abc import Sequence
from hashlib import blake2b

from gllm.routing.policies.simple import choose_least, weighted_requests
from gllm.routing.policy import RoutingPolicy
from gllm.routing.state import EngineSnapshot, RoutingRequest

MAX_RELATIVE_LOAD = 1.5
"""Requests of an engine in relation to the mean from which sessions go elsewhere."""
MAX_EXTRA_REQUESTS = 4
"""Requests above that limit, so that few running requests do not move sessions."""


class SessionAffinityPolicy(RoutingPolicy):
    """Routing policy `session`: requests of a session go to one engine, unless it is overloaded.

    The engine follows from a hash of the session, and an overloaded one is replaced by the next in
    the hash order. When an engine comes or goes, only its own sessions move. Requests without a
    session go to the engine with the fewest requests.
    """

    uses_statistics = False
    uses_request_counts = True

    def choose(self, request: RoutingRequest, engines: Sequence[EngineSnapshot]) -> str | None:
        """Return the session's engine."""
        if not request.session or not engines:
            return choose_least(engines, weighted_requests, self._rng)
        mean = (sum(engine.num_requests for engine in engines) + 1) / len(engines)
        limit = MAX_RELATIVE_LOAD * mean + MAX_EXTRA_REQUESTS
        # The engine with the fewest requests never exceeds the limit.
        candidates = [engine for engine in engines if engine.num_requests + 1 <= limit]
        return max(
            candidates, key=lambda candidate: _rendezvous_score(request.session, candidate)
        ).name


def _rendezvous_score(session: str, engine: EngineSnapshot) -> float:
    """Return the weighted score of an engine for a session; the highest one has the session."""
    text = f"{session}\0{engine.name}".encode()
    number = int.from_bytes(blake2b(text, digest_size=8).digest())
    return -engine.weight / math.log((number + 1) / (2**64 + 2))
