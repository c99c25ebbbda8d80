"""Requests of a router by engine and phase, as pair policies count them."""

from collections.abc import Hashable
from dataclasses import dataclass

HEAVY_TOKENS = 128
"""Predicted output tokens above which a decode is heavy (TetriInfer, section 5.1)."""


@dataclass(slots=True)
class PairedRequest:
    """One unfinished request and its engines."""

    num_prompt_tokens: int
    num_output_tokens: int
    """Predicted number of output tokens."""
    prefill: str = ""
    """Engine of the prefill; empty once that has ended."""
    decode: str = ""
    """Engine of the decode; empty until it is chosen."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens in the KV cache at the predicted end."""
        return self.num_prompt_tokens + self.num_output_tokens

    @property
    def is_heavy(self) -> bool:
        """True if the request has a long output."""
        return self.num_output_tokens > HEAVY_TOKENS


@dataclass(slots=True)
class PairLoad:
    """Requests of one engine, those included that are only assigned to it."""

    num_prefills: int = 0
    """Requests that it prefills or is going to prefill."""
    prefill_tokens: int = 0
    """Their prompt tokens."""
    num_decodes: int = 0
    """Requests that it decodes or is going to decode."""
    num_heavy_decodes: int = 0
    """Those with a long output."""
    decode_tokens: int = 0
    """KV tokens of all its decodes at their predicted ends."""

    @property
    def num_light_decodes(self) -> int:
        """Number of decodes with a short output."""
        return self.num_decodes - self.num_heavy_decodes


class PairLoads:
    """Unfinished requests by engine and phase; each call takes constant time."""

    def __init__(self) -> None:
        self._requests: dict[Hashable, PairedRequest] = {}
        self._loads: dict[str, PairLoad] = {}

    def __len__(self) -> int:
        """Return the number of unfinished requests."""
        return len(self._requests)

    def of(self, engine: str) -> PairLoad:
        """Return the load of an engine, which changes with the next call of another method."""
        return self._loads.get(engine) or PairLoad()

    def add(self, key: Hashable, request: PairedRequest) -> None:
        """Add a request, or replace it."""
        self.remove(key)
        self._requests[key] = request
        self._count(request, 1)

    def get(self, key: Hashable) -> PairedRequest | None:
        """Return a request, which is not to be changed; None if it is unknown."""
        return self._requests.get(key)

    def set_engines(self, key: Hashable, prefill: str, decode: str) -> None:
        """Set the engines of a request. Raises KeyError for an unknown one."""
        request = self._requests[key]
        self._count(request, -1)
        request.prefill, request.decode = prefill, decode
        self._count(request, 1)

    def on_prefill_ended(self, key: Hashable) -> None:
        """Count a request as load of its decode engine alone; an unknown one is ignored."""
        if request := self._requests.get(key):
            self.set_engines(key, "", request.decode)

    def remove(self, key: Hashable) -> None:
        """Forget a request; an unknown one is ignored."""
        if request := self._requests.pop(key, None):
            self._count(request, -1)

    def on_engine_lost(self, engine: str) -> None:
        """Let no request count for an engine any more."""
        if engine not in self._loads:
            return
        for key, request in self._requests.items():
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
