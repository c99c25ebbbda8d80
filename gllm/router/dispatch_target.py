"""Records of where a router's request is: at an attached engine, or waiting for one."""

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
    """Interface of an engine that gives KV blocks to other engines or fetches theirs."""

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
    accepts_moves: bool = False
    """True if it understands HandOffSequence."""
    accepts_checkpoints: bool = False
    """True if it understands KeepComputedKv and PrefetchKv of a checkpoint."""


@dataclass(slots=True, eq=False)
class DispatchTarget:
    """An attached engine, as the router's client sees it: how to send to it, and its requests."""

    name: str
    numerics: str
    """Digest of all that decides the tokens; engines with the same one continue each other's
    output."""
    send: SendFunction
    kv: KvPeer | None = None
    """None if the engine neither gives nor fetches KV blocks."""
    run: int = 0
    """Random number of this start of its process."""
    attached_at: float = 0.0
    """Time in seconds."""
    choices: dict[int, SubmittedChoice] = field(default_factory=dict)
    """Running choices by their ids in messages to the engine."""
    streams: dict[RequestStream, "Submitted"] = field(default_factory=dict)
    """In order of submission."""

    @property
    def kv_endpoint(self) -> bytes:
        """KV endpoint of the engine; empty if it takes part in no KV transfers."""
        return b"" if self.kv is None else self.kv.endpoint()


class Submitted(NamedTuple):
    """Start of the waiting time and generated tokens of a request when it was sent to an engine."""

    waits_since: float
    """Time since which it has waited for an engine that computes it."""
    num_output_tokens: int
    """Tokens that earlier engines have generated."""


class Parked(NamedTuple):
    """Start and reason of the wait of a request that no engine runs."""

    since: float
    """Time since which it has waited, including the time at an engine that has returned it
    unfinished."""
    cause: str
    """Reason for which it left its engine: a key of `num_migrations`; empty if it is new."""
