"""Interface of routing policies.

A policy is one class and one line of policy_registry.py.
"""

from collections.abc import Sequence
from typing import Protocol

from gllm.routing.prefix_index import PrefixIndex
from gllm.routing.state import EngineSnapshot, RoutingRequest


class RoutingPolicy(Protocol):
    """Rule that chooses the engine of a request."""

    uses_prefixes: bool
    """True if `choose` reads the prefix index. The index stays empty otherwise."""

    def choose(
        self,
        request: RoutingRequest,
        engines: Sequence[EngineSnapshot],
        prefixes: PrefixIndex,
        now: float,
    ) -> str | None:
        """Return the name of the engine that serves a request; None if there is no engine.

        Args:
            request: the request.
            engines: engines that can run the request and may get it.
            prefixes: KV blocks that engines have cached.
            now: current time in seconds.
        """
