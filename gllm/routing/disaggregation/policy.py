"""Interface of pair policies: which engine prefills a request and which one decodes it.

A pair policy is one class in a file of its own and one line of policy_registry.py. The router and
the simulator call it in the same way:

1. `choose` when a request arrives, and again for a request that waits or has lost its engine.
2. `choose_decode` at `decode_choice`, unless `choose` has named the decode engine already, and
   again if the chosen engine is lost or refuses.
3. `on_prefill_ended` and `on_ended`, `on_engine_lost` when that happens.
4. `role_changes` from time to time; the caller applies them.
"""

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from enum import Enum
from random import Random
from typing import ClassVar, NamedTuple

from gllm.routing.disaggregation.pair_loads import PairedRequest, PairLoads
from gllm.routing.state import EngineSnapshot


class DecodeChoice(Enum):
    """Time at which a pair policy chooses the decode engine of a request."""

    ARRIVAL = "arrival"
    """Together with the prefill engine, when the request arrives."""
    FIRST_CHUNK = "first_chunk"
    """After the first prefill chunk of the request."""
    PREFILL_END = "prefill_end"
    """When the prompt has been computed."""


class PairRequest(NamedTuple):
    """Lengths of a request whose prefill and decode engines are to be chosen."""

    key: Hashable
    """Unique among the unfinished requests of the caller."""
    num_prompt_tokens: int
    """Tokens to prefill."""
    num_output_tokens: int
    """Predicted number, at least 1."""


class EnginePair(NamedTuple):
    """Names of the engines that prefill and decode a request."""

    prefill: str
    """Name of the engine that prefills."""
    decode: str | None = None
    """Name of the engine that decodes; None if it is chosen later. The prefill engine itself if
    both phases run there: then no KV is transferred."""


class RoleChange(NamedTuple):
    """Command to change an engine's role to prefill, decode or mixed."""

    engine: str
    role: str
    """prefill, decode or mixed."""


class PairPolicy(ABC):
    """Base class of policies that choose the prefill and the decode engine of each request."""

    decode_choice: ClassVar[DecodeChoice]
    """Time at which the decode engine is chosen."""

    def __init__(self, rng: Random) -> None:
        """Create the policy; `rng` breaks ties, so that a seed repeats a run."""
        self._rng = rng
        self.loads = PairLoads()
        """Unfinished requests of the caller by engine and phase."""

    @abstractmethod
    def choose(
        self, request: PairRequest, engines: Sequence[EngineSnapshot], now: float
    ) -> EnginePair | None:
        """Return the engines of a new request; None if there are no engines.

        The request counts as load of its engines from now on. A request that is chosen again
        leaves those that it had.

        Args:
            request: the request.
            engines: engines of all roles that take requests.
            now: time in seconds.
        """

    @abstractmethod
    def choose_decode(
        self, request: PairRequest, engines: Sequence[EngineSnapshot], now: float
    ) -> str | None:
        """Return the decode engine of a prefilled request; None without engines.

        The prefill engine itself if it is best that no KV is transferred. The request counts as
        load of the engine from now on. Arguments as of `choose`.
        """

    def on_prefill_ended(self, key: Hashable, now: float) -> None:
        """Count a request that has its first token as load of its decode engine alone."""
        if request := self.loads.requests.get(key):
            self.loads.set_engines(key, "", request.decode)

    def on_ended(self, key: Hashable, now: float) -> None:
        """Remove a request that has ended; an unknown one is ignored."""
        self.loads.remove(key)

    def on_engine_lost(self, engine: str) -> None:
        """Remove an engine; its requests stay until their engines are chosen again."""
        self.loads.on_engine_lost(engine)

    def role_changes(self, engines: Sequence[EngineSnapshot], now: float) -> list[RoleChange]:
        """Return the role changes that the policy decides.

        Of several routers only the leading one applies them. The default changes none.

        Args:
            engines: all attached engines.
            now: time in seconds.
        """
        return []

    def _assign(self, request: PairRequest, pair: EnginePair) -> EnginePair:
        """Count a request as load of its engines, in place of those that it had; return them."""
        self.loads.add(
            request.key,
            PairedRequest(
                request.num_prompt_tokens,
                request.num_output_tokens,
                pair.prefill,
                pair.decode or "",
            ),
        )
        return pair

    def _assign_decode(self, request: PairRequest, engine: str) -> str:
        """Count a request as load of its decode engine; return the engine."""
        known = self.loads.requests.get(request.key)
        if known is None:
            self._assign(request, EnginePair("", engine))
        else:
            self.loads.set_engines(request.key, known.prefill, engine)
        return engine


def engines_of(role: str, engines: Sequence[EngineSnapshot]) -> Sequence[EngineSnapshot]:
    """Return the engines whose role is the given one or mixed; all engines if there are none.

    Every engine can run both phases, so requests are served even if all engines of a role are lost.

    Args:
        role: prefill or decode.
        engines: engines to select from.
    """
    own = [engine for engine in engines if engine.role in (role, "mixed")]
    return own or engines
