"""Messages about the KV cache of a request that one engine prefills and another one decodes.

A router sends the prefill with a ticket (`SubmitRequest.kv_ticket`), under which the engine keeps
the KV blocks at the end of the request, and the rest of the request to another engine with the
source of these blocks (`SubmitRequest.kv_source`). They are sent only to engines that announce a
`kv_endpoint`.

The blocks can be fetched while the prompt is computed: the first engine reports KvPushStarted, and
the router sends PrefetchKv to the second one. The rest of the request follows as always.
"""

import secrets
from typing import Annotated

import msgspec
from msgspec import Meta

from gllm.messages.base import TokenId, WireMessage

MAX_TICKET = 2**63 - 1
Ticket = Annotated[int, Meta(ge=1, le=MAX_TICKET)]
"""Random number; a ticket is used for one submission, and by one receiver."""


def make_ticket() -> int:
    """Return a random ticket that cannot be guessed, never 0."""
    return secrets.randbelow(MAX_TICKET) + 1


MAX_TICKETS = 1024
"""Most tickets per message."""
Tickets = Annotated[list[Ticket], Meta(max_length=MAX_TICKETS)]


class KvSource(msgspec.Struct, frozen=True, array_like=True):
    """KV cache of a request's first tokens that an engine holds."""

    engine: str
    """Name of the engine that holds it."""
    run: int
    """Random number of the start of that engine's head process."""
    ticket: Ticket
    num_tokens: Annotated[int, Meta(ge=1)]
    """Leading tokens of the request whose KV is held."""
    endpoint: bytes
    """`AnnounceEngine.kv_endpoint` of the engine; routers pass it on unread."""
    is_foreign: bool = False
    """True if a router of another project hands the request off: the prefix cache of the receiver
    never has these blocks."""


class KvHandoff(msgspec.Struct, frozen=True):
    """Fields of a request that is handed off between a prefill and a decode engine."""

    ticket: int = 0
    """Ticket under which the KV blocks are kept at the end; 0 to free them."""
    source: KvSource | None = None
    """Engine that holds the KV cache of the first tokens; None to compute it."""


class KvPushStarted(WireMessage, frozen=True):
    """Report of the prefill engine: the KV blocks of a prompt can be fetched from now on."""

    ticket: Ticket


class FirstChunkComputed(WireMessage, frozen=True):
    """Report of the prefill engine: the first chunk of a prompt is computed, and others follow.

    Sent to routers that choose the decode engine then; of a prompt of one chunk the end says it.
    """

    ticket: Ticket


class PrefetchKv(WireMessage, frozen=True):
    """Command to the decode engine: fetch the KV blocks of a prompt that is still computed.

    SubmitRequest follows with the same source, or ReleaseKvHolds with its ticket.
    """

    source: KvSource
    """Engine that computes the KV of the whole prompt."""
    prompt: list[TokenId]
    max_tokens: Annotated[int, Meta(ge=1)]
    priority: int = 0
    cache_salt: str = ""
    age_seconds: Annotated[float, Meta(ge=0)] = 0.0
    """Time since the request was first submitted."""
    predicted_output_tokens: Annotated[int, Meta(ge=0)] = 0
    """Predicted length of the output in tokens; 0 without a prediction."""


class ReleaseKvHolds(WireMessage, frozen=True):
    """Command to an engine that holds or prefetches KV blocks: free them.

    Unknown tickets are ignored.
    """

    tickets: Tickets


class RenewKvHolds(WireMessage, frozen=True):
    """Command to the engine that holds or prefetches KV blocks: extend leases.

    Unknown tickets are ignored.
    """

    tickets: Tickets


HandoffCommand = PrefetchKv | ReleaseKvHolds | RenewKvHolds
"""Commands of a router about KV blocks."""
