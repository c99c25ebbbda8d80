"""Messages about the KV cache of a request that one engine prefills and another one decodes.

A router sends the prefill with a ticket (`SubmitRequest.kv_ticket`), under which the engine keeps
the KV blocks at the end of the request, and the rest of the request to another engine with the
source of these blocks (`SubmitRequest.kv_source`). They are sent only to engines that announce a
`kv_endpoint`.

A running request moves to another engine in the same way: HandOffSequence gives it a ticket and
ends it at its next token. It can be copied to another engine's prefix cache while it runs
(KeepComputedKv, and PrefetchKv as a checkpoint), so that it is not computed again if its engine is
lost.

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
    """Return a random key for the transfer of a request's KV blocks, never 0.

    It cannot be guessed, so that only its receivers can read the blocks.
    """
    return secrets.randbelow(MAX_TICKET) + 1


MAX_TICKETS = 1024
"""Most tickets per message."""
Tickets = Annotated[list[Ticket], Meta(max_length=MAX_TICKETS)]


class KvSource(msgspec.Struct, frozen=True, array_like=True):
    """Address of the KV cache of a request's first tokens at the engine that has computed them."""

    engine: str
    """Name of the engine that holds it."""
    run: int
    """Random number of the start of that engine's head process."""
    ticket: Ticket
    """Key of the KV blocks at that engine."""
    num_tokens: Annotated[int, Meta(ge=1)]
    """Leading tokens of the request whose KV is held."""
    endpoint: bytes
    """`AnnounceEngine.kv_endpoint` of the engine; routers pass it on unread."""
    is_foreign: bool = False
    """True if a router of another project hands the request off: the prefix cache of the receiver
    never has these blocks."""


class KvHandoff(msgspec.Struct, frozen=True):
    """KV transfer fields of a request that is prefilled on one engine and decoded on another."""

    ticket: int = 0
    """Key under which the KV blocks are kept for another engine when the request ends; 0 to free
    them."""
    source: KvSource | None = None
    """Address of the KV cache of the first tokens at another engine; None to compute it."""
    is_ticket_foreign: bool = False
    """As in SubmitRequest."""
    num_cached_tokens: int | None = None
    """Prompt tokens that the engine of the source had in its prefix cache; None without source."""


class KvPushStarted(WireMessage, frozen=True):
    """Report of the prefill engine: KV blocks of a prompt can be fetched while it is computed."""

    ticket: Ticket
    """Key of the KV blocks."""


class FirstChunkComputed(WireMessage, frozen=True):
    """Report of the prefill engine: the first of several prefill chunks of a prompt is computed.

    Sent to routers that choose the decode engine at this time. If the prompt has only one chunk,
    they choose it when its first token arrives.
    """

    ticket: Ticket
    """Key of the prompt's KV blocks."""


class PrefetchKv(WireMessage, frozen=True):
    """Command to the decode engine: fetch KV blocks of a prompt that another engine still computes.

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
    is_checkpoint: bool = False
    """True if the request runs elsewhere, and `prompt` has its output so far, too: no request
    follows, and the blocks go into the prefix cache."""


class ReleaseKvHolds(WireMessage, frozen=True):
    """Command to an engine: free KV blocks that it keeps for another engine or has prefetched.

    It keeps none later under a ticket that it does not know yet: there is no order between this
    message, the end of the prefill and AbortSequences.
    """

    tickets: Tickets
    """Keys of the KV blocks."""


class RenewKvHolds(WireMessage, frozen=True):
    """Command to an engine: keep KV blocks for another engine, or prefetched ones, for longer.

    Each renewal restarts the lease, after which the blocks are freed. Unknown tickets are ignored.
    """

    tickets: Tickets
    """Keys of the KV blocks."""


class HandOffSequence(WireMessage, frozen=True):
    """Command to an engine: end a running sequence at its next token, for another engine.

    Its end has the reason `length` and the ticket under which the KV blocks are kept, if they are.
    Nothing happens if the sequence has no token yet, is one of several of a request, has a ticket
    or ends at its next token anyway.
    """

    seq: Annotated[int, Meta(ge=0)]
    """Wire id of the sequence."""
    ticket: Ticket
    """Key of the KV blocks."""


class KeepComputedKv(WireMessage, frozen=True):
    """Command to an engine: keep the KV of a running sequence's first tokens for another engine.

    The sequence goes on. Nothing happens if it has ended, or has not computed these tokens.
    """

    seq: Annotated[int, Meta(ge=0)]
    """Wire id of the sequence."""
    ticket: Ticket
    """Key of the KV blocks."""
    num_tokens: Annotated[int, Meta(ge=1)]
    """Leading tokens of prompt and output."""


HandoffCommand = PrefetchKv | ReleaseKvHolds | RenewKvHolds | HandOffSequence | KeepComputedKv
"""Commands of a router about KV blocks."""
