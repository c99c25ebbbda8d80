"""Requests of a router by engine and phase, as pair policies count them."""

from collections.abc import Hashable
from dataclasses import dataclass

HEAVY_TOKENS = 128
"""Predicted output tokens above which a decode is heavy (TetriInfer, section 5.1)."""


@dataclass(slots=True)
class PairedRequest:
    """Unfinished request: its lengths, and the engines assigned to its prefill and its decode."""

    num_prompt_tokens: int
    num_output_tokens: int
    """Predicted number of output tokens."""
    prefill: str = ""
    """Engine of the prefill; empty once that has ended."""
    decode: str = ""
    """Engine of the decode; empty until it is chosen."""

    @property
    def num_tokens(self) -> int:
        """Number of KV tokens when the predicted output is complete."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def is_heavy(self) -> bool:
        """True if the predicted output is longer than HEAVY_TOKENS (TetriInfer's heavy decodes)."""
        return self.num_output_tokens > HEAVY_TOKENS


@dataclass(slots=True)
class PairLoad:
    """Requests and tokens that a router has assigned to one engine, for prefill and for decode."""

    num_prefills: int = 0
    """Requests that it prefills or is going to prefill."""
    prefill_tokens: int = 0
    """Their prompt tokens."""
    num_decodes: int = 0
    """Requests that it decodes or is going to decode."""
    num_heavy_decodes: int = 0
    """Those with a predicted output of more than HEAVY_TOKENS."""
    decode_tokens: int = 0
    """KV tokens of all its decodes at their predicted ends."""

    @property
    def num_light_decodes(self) -> int:
        """Number of decodes with a predicted output of at most HEAVY_TOKENS."""
        return self.num_decodes - self.num_heavy_decodes


class PairLoads:
    """Requests and tokens that a router has assigned to each engine, by phase.

    Computed from the router's unfinished requests; each update takes constant time.
    """

    def __init__(self) -> None:
        self.requests: dict[Hashable, PairedRequest] = {}
        """Unfinished requests, only modified by the methods of this object."""
        self._loads: dict[str, PairLoad] = {}

    def __len__(self) -> int:
        """Return the number of unfinished requests."""
        return len(self.requests)

    def of(self, engine: str) -> PairLoad:
        """Return the present load of an engine; the next update may change the object."""
        return self._loads.get(engine) or PairLoad()

    def add(self, key: Hashable, request: PairedRequest) -> None:
        """Add a request, or replace it."""
        self.remove(key)
        self.requests[key] = request
        self._count(request, 1)

    def set_engines(self, key: Hashable, prefill: str, decode: str) -> None:
        """Assign a request to other engines. Raises KeyError for an unknown request."""
        request = self.requests[key]
        self._count(request, -1)
        request.prefill, request.decode = prefill, decode
        self._count(request, 1)

    def remove(self, key: Hashable) -> None:
        """Remove a request; an unknown one is ignored."""
        if request := self.requests.pop(key, None):
            self._count(request, -1)

    def on_engine_lost(self, engine: str) -> None:
        """Remove an engine from its requests."""
        if engine not in self._loads:
            return
        for key, request in self.requests.items():
            if engine in (request.prefill, request.decode):
                prefill = "" if request.prefill == engine else request.prefill
                decode = "" if request.decode == engine else request.decode
                self.set_engines(key, prefill, decode)
        self._loads.pop(engine, None)

    def _count(self, request: PairedRequest, sign: int) -> None:
        if request.prefill:
            load = self._loads.setdefault(request.prefill, PairLoad())
            load.num_prefills += sign
            load.prefill_tokens += sign * request.num_prompt_tokens
        if request.decode:
            load = self._loads.setdefault(request.decode, PairLoad())
            load.num_decodes += sign
            load.num_heavy_decodes += sign * request.is_heavy
            load.decode_tokens += sign * request.num_tokens
