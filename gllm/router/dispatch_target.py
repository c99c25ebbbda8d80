"""Place of a request of a router: at an engine, or parked."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from gllm.messages.handoff import HandoffCommand
from gllm.runtime.head.request_client import SendFunction
from gllm.runtime.head.request_stream import RequestStream, SubmittedChoice

ChooseEngine = Callable[[RequestStream, frozenset[str]], str | None]
"""Function that chooses one of the named engines for a request; None: none, the request is parked.

The names are never empty. For a request with tokens they are those of engines with equal numerics;
others only if none of these was chosen for some time.
"""


class KvPeer(NamedTuple):
    """KV transfer interface of an engine that gives KV blocks to others or fetches theirs."""

    run: int
    """Random number of this start of its head process."""
    endpoint: Callable[[], bytes]
    """Returns the address and layout of its KV cache; empty while it has none."""
    send: Callable[[HandoffCommand], None]
    """Sends a command about KV blocks."""
    digest: Callable[[], str] = str
    """Returns the digest of what decides the numbers in its KV cache; empty if unknown."""
    accepts_prefetches: bool = False
    """True if it understands PrefetchKv."""


@dataclass(slots=True, eq=False)
class DispatchTarget:
    """An attached engine and the requests that run on it."""

    name: str
    numerics: str
    """Digest: engines of the same one continue each other's output."""
    send: SendFunction
    kv: KvPeer | None = None
    """None if the engine takes part in no hand-offs."""
    choices: dict[int, SubmittedChoice] = field(default_factory=dict)
    """By wire id."""
    streams: dict[RequestStream, "Submitted"] = field(default_factory=dict)
    """In order of submission."""

    @property
    def kv_endpoint(self) -> bytes:
        """KV endpoint of the engine; empty if it takes part in no KV transfers."""
        return b"" if self.kv is None else self.kv.endpoint()


class Submitted(NamedTuple):
    """Figures of a request at its submission to an engine."""

    waits_since: float
    """Time since which it has waited for an engine that computes it."""
    num_output_tokens: int


class Parked(NamedTuple):
    """Waiting time and cause of a request that runs on no engine."""

    since: float
    """Time since which it has waited; what it waited for an engine that gave it back counts."""
    cause: str
    """Cause of its departure from its engine: a key of `num_migrations`; empty if it is new."""
