"""Messages about transfers of KV blocks, between the scheduler and the process that moves KV."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gllm.messages.base import Int64, WireMessage
from gllm.messages.handoff import Ticket

FetchNumber = Int64
"""Sequence of a fetch; used again once the fetch has ended."""
BlockId = Annotated[int, Meta(ge=0, lt=2**31)]
TokenCount = Annotated[int, Meta(ge=0, lt=2**31)]


class ServeKv(WireMessage, frozen=True):
    """Command: let another engine read KV blocks under a key (ticket), until RevokeKv.

    Sent again with the same ticket for further blocks, as the prefill goes on. A ticket that has
    ended is not served again; KvRevoked answers.
    """

    ticket: Ticket
    num_tokens: TokenCount
    """Tokens from the start of the sequence whose keys and values are in the blocks."""
    block_ids: list[BlockId]
    """The first one begins with the first token."""
    step: Annotated[int, Meta(ge=0, lt=2**47)] = 0
    """Step that computes the last of these tokens and runs or will run; 0: all are computed."""
    is_partial: bool = False
    """True if further tokens will be served under the ticket."""
    lane: Annotated[int, Meta(ge=0, le=1)] = 0
    """Lane of the step."""


class RevokeKv(WireMessage, frozen=True):
    """Command: no longer let another engine read the KV blocks under a key (ticket).

    KvRevoked answers.
    """

    ticket: Ticket


class FetchKv(WireMessage, frozen=True):
    """Command: fetch keys and values of tokens from another engine; KvFetched answers.

    The blocks may not be used for anything else until then.
    """

    fetch: FetchNumber
    ticket: Ticket
    endpoint: bytes
    """Address of the other engine's KV transfer process, as that engine has published it."""
    first_token: TokenCount
    """First token to fetch, counted from the start of the sequence."""
    num_tokens: TokenCount
    block_ids: list[BlockId]
    """Blocks of these tokens; the first one has `first_token`, at its offset within a block."""
    is_per_layer: bool = False
    """True if the other engine may compute the tokens meanwhile: layers arrive one by one."""


class CancelKvFetch(WireMessage, frozen=True):
    """Command: end a fetch of KV blocks early; KvFetched answers as always."""

    fetch: FetchNumber


class KvFetchStarted(WireMessage, frozen=True):
    """Report that the first bytes of a fetch of KV blocks have arrived."""

    fetch: FetchNumber


class KvFetched(WireMessage, frozen=True):
    """Report that a fetch of KV blocks has ended on all machines, with bytes and duration.

    None of its blocks is written any more.
    """

    fetch: FetchNumber
    is_ok: bool
    """True if all bytes have arrived while the other engine held the ticket. Otherwise the blocks
    have undefined contents."""
    num_bytes: int = 0
    """Bytes that have arrived."""
    seconds: float = 0.0
    """Measured duration."""
    cause: str = ""
    """Reason for a failure."""


class KvRevoked(WireMessage, frozen=True):
    """Report that no engine reads the blocks of a ticket any more, so that they can be reused."""

    ticket: Ticket


class KvMoverGone(WireMessage, frozen=True):
    """Local report that the KV transfer process has ended and accesses no block any more."""


class KvMoverStuck(WireMessage, frozen=True):
    """Report to the head process that the KV transfer process does not read or answer commands."""


class KvTransferTotals(WireMessage, frozen=True):
    """Counts, bytes and durations of KV transfers between engines.

    They are those of one scheduler since its last report, or of an engine since its start.
    """

    num_fetched: int = 0
    """Fetches that have got all bytes."""
    num_failed: int = 0
    """Other fetches: their tokens are computed."""
    num_bytes: int = 0
    """Bytes that fetches have got, failed ones too."""
    seconds: float = 0.0
    """Total duration of the fetches that have got all bytes."""
    num_served: int = 0
    """Tickets under which blocks were served."""
    num_pushed: int = 0
    """Tickets that were served from the begin of the prefill on."""

    def __add__(self, other: "KvTransferTotals") -> "KvTransferTotals":
        """Return the sums."""
        mine, theirs = msgspec.structs.astuple(self), msgspec.structs.astuple(other)
        return KvTransferTotals(*(one + more for one, more in zip(mine, theirs, strict=True)))


KvCommand = ServeKv | RevokeKv | FetchKv | CancelKvFetch
"""Commands of the driver."""
KvReport = KvFetchStarted | KvFetched | KvRevoked | KvMoverGone
"""Answers of the mover."""
