"""Interface of routing policies.

A policy is one class and one line of policy_registry.py.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from random import Random
from typing import ClassVar

from gllm.routing.prefix_index import PrefixIndex
from gllm.routing.state import EngineSnapshot, RoutingRequest


class RoutingPolicy(ABC):
    """Base class of routing policies, which choose the engine that serves a request."""

    uses_prefixes: ClassVar[bool] = False
    """True if `choose` reads the prefix index. The index stays empty otherwise."""
    uses_statistics: ClassVar[bool] = True
    """True if `choose` reads the statistics of the engines or the expected output of the request. A
    simulated router leaves them out otherwise."""
    uses_request_counts: ClassVar[bool] = False
    """True if `choose` reads `num_requests` of the engines and no other statistics."""
    uses_step_costs: ClassVar[bool] = False
    """True if `choose` reads the step cost models of the engines, which a simulated router leaves
    out otherwise."""
    uses_ongoing: ClassVar[bool] = False
    """True if `choose` reads the unfinished requests of the engines, which routers track only for
    such a policy."""
    waits_for_room: ClassVar[bool] = False
    """True if `choose` may return None although there are engines: the request then waits at the
    router until one of them has room (`has_room`)."""
    places_in_heartbeats: ClassVar[bool] = False
    """True if a router may collect requests for a heartbeat and place them together, longest
    prompts first (`--placement-heartbeat`)."""
    packs_requests: ClassVar[bool] = False
    """True if `choose` fills some engines and leaves others idle on purpose, so that their loads
    are not to be made equal."""
    length_predictor: ClassVar[str] = "by-max-tokens"
    """Name of the predictor of output lengths that a router uses without `--length-predictor`."""

    def __init__(self, rng: Random) -> None:
        """Create the policy; `rng` breaks ties, so that a seed repeats a run."""
        self._rng = rng
        self.prefixes = PrefixIndex()
        """KV blocks that the engines have cached; the router fills it if `uses_prefixes`."""

    @abstractmethod
    def choose(self, request: RoutingRequest, engines: Sequence[EngineSnapshot]) -> str | None:
        """Return the name of the engine that serves a request; None if there is no engine.

        Args:
            request: the request.
            engines: engines that can run the request and may get it.
        """

    def has_room(self, engine: EngineSnapshot, num_prompt_tokens: int = 1) -> bool:
        """Return True if an engine may get a request; only a policy with `waits_for_room` refuses.

        Args:
            engine: state of the engine.
            num_prompt_tokens: tokens to prefill.
        """
        return True
