"""Messages about the KV cache of a request that one engine prefills and another one decodes.

A router sends the prefill with a ticket (`SubmitRequest.kv_ticket`), under which the engine keeps
the KV blocks at the end of the request, and the rest of the request to another engine with the
source of these blocks (`SubmitRequest.kv_source`). They are sent only to engines that announce a
`kv_endpoint`.
"""

from typing import Annotated

import msgspec
from msgspec import Meta

from gllm.messages.base import WireMessage
from gllm.messages.tickets import Ticket

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
    """Part of a submission that belongs to a hand-off; see SubmitRequest."""

    ticket: int = 0
    """Ticket under which the KV blocks are kept at the end; 0 to free them."""
    source: KvSource | None = None
    """Engine that holds the KV cache of the first tokens; None to compute it."""


class ReleaseKvHolds(WireMessage, frozen=True):
    """Command to the engine that holds KV blocks: free them; unknown tickets are ignored."""

    tickets: Tickets


class RenewKvHolds(WireMessage, frozen=True):
    """Command to the engine that holds KV blocks: extend leases; unknown tickets are ignored."""

    tickets: Tickets
