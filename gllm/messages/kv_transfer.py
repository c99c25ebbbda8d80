"""Messages about transfers of KV blocks, between the driver and the KV mover of its engine.

They travel from the driver to the head process, which distributes them to the data movers of the
workers' machines and collects the answers.
"""

from typing import Annotated

from msgspec import Meta

from gllm.messages.base import WireMessage
from gllm.messages.tickets import Ticket

FetchNumber = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""Number of a fetch, which the driver chooses; never used twice in a generation."""
BlockId = Annotated[int, Meta(ge=0, lt=2**31)]
TokenCount = Annotated[int, Meta(ge=0, lt=2**31)]


class ServeKv(WireMessage, frozen=True):
    """Command: let the owner of a ticket read blocks, until RevokeKv.

    With a ticket that is served: the same blocks and further ones, as the prefill goes on. A ticket
    that has ended is not served again; KvRevoked answers.
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


class RevokeKv(WireMessage, frozen=True):
    """Command: serve a ticket no longer; KvRevoked answers."""

    ticket: Ticket


class FetchKv(WireMessage, frozen=True):
    """Command: fetch keys and values of tokens from another engine; KvFetched answers.

    The blocks may not be used for anything else until then.
    """

    fetch: FetchNumber
    ticket: Ticket
    endpoint: bytes
    """KV mover of the other engine, as that engine has published it."""
    first_token: TokenCount
    """First token to fetch, counted from the start of the sequence."""
    num_tokens: TokenCount
    block_ids: list[BlockId]
    """Blocks of these tokens; the first one has `first_token`, at its place in a block."""
    is_per_layer: bool = False
    """True if the other engine may compute the tokens meanwhile: layers arrive one by one."""


class CancelKvFetch(WireMessage, frozen=True):
    """Command: end a fetch early; KvFetched answers as always."""

    fetch: FetchNumber


class KvFetchStarted(WireMessage, frozen=True):
    """Report that the first bytes of a fetch have arrived."""

    fetch: FetchNumber


class KvFetched(WireMessage, frozen=True):
    """Report that a fetch has ended on all machines; none of its blocks is written any more."""

    fetch: FetchNumber
    is_ok: bool
    """True if all bytes have arrived while the other engine held the ticket. Otherwise the blocks
    have undefined contents."""
    num_bytes: int = 0
    """Bytes that have arrived."""
    seconds: float = 0.0
    """Duration."""
    cause: str = ""
    """Reason for a failure."""


class KvRevoked(WireMessage, frozen=True):
    """Report that a ticket is served no longer: its blocks may be used for other sequences."""

    ticket: Ticket


KvCommand = ServeKv | RevokeKv | FetchKv | CancelKvFetch
"""Commands of the driver."""
KvReport = KvFetchStarted | KvFetched | KvRevoked
"""Answers of the mover."""
