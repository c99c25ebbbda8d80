"""Messages about transfers of KV blocks, between the scheduler and the process that moves KV."""

from typing import Annotated

import msgspec
from msgspec import Meta

from gllm.messages.base import Int64, TotalsMessage, WireMessage
from gllm.messages.handoff import Ticket, make_ticket
from gllm.messages.kv_disk import KvDiskCommand, KvDiskReport
from gllm.messages.kv_layout import BlockId

FetchNumber = Int64
"""Sequence of a fetch; used again once the fetch has ended."""
TokenCount = Annotated[int, Meta(ge=0, lt=2**31)]
COPY_LANE = 2
"""Lane in which workers on devices count the copied layers of KV blocks, beside those of steps."""


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
    lane: Annotated[int, Meta(ge=0, le=COPY_LANE)] = 0
    """Lane of the step; COPY_LANE if `step` is the number of a copy (CopyKvBlocks)."""


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
    reader: Ticket = msgspec.field(default_factory=make_ticket)
    """Random number of the fetch, the same on all machines of this engine."""


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
    """Report to the head process that a KV transfer process does not read or answer commands."""

    machine: Annotated[int, Meta(ge=0, lt=2**16)] = 0
    """Machine of the process, by its index in the engine."""


class KvMoverConnected(WireMessage, frozen=True):
    """Report of another machine's first worker: its KV transfer process takes commands."""

    connection: Int64
    """Number of the connection; the process of the one before has ended."""


class KvTransferTotals(TotalsMessage, frozen=True):
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


KvCommand = ServeKv | RevokeKv | FetchKv | CancelKvFetch | KvDiskCommand
"""Commands of the driver."""
KvReport = KvFetchStarted | KvFetched | KvRevoked | KvMoverGone | KvDiskReport
"""Answers of the mover."""


class KvMachineCommand(WireMessage, frozen=True):
    """Command of the driver to the KV transfer process of another machine, via its first worker."""

    connection: Int64
    """Number in KvMoverConnected; a command to a process that has ended is dropped."""
    command: KvCommand


class KvMachineReport(WireMessage, frozen=True):
    """Report of another machine's KV transfer process to the driver, via its first worker."""

    machine: Annotated[int, Meta(ge=1, lt=2**16)]
    """Machine of the process, by its index in the engine; 0 is the driver's."""
    report: KvReport | KvMoverConnected


class CopyKvBlocks(WireMessage, frozen=True):
    """Command to the workers on devices: copy KV blocks to staging blocks, or back.

    The KV transfer processes read and write staging blocks, in the memory of the host.
    KvBlocksCopied answers.
    """

    number: Annotated[int, Meta(ge=1, lt=2**47)]
    """Copies are numbered from 1, in the order in which they are made."""
    block_ids: list[BlockId]
    """Blocks of the device's KV cache."""
    staging_ids: list[BlockId]
    """Staging block of each of them."""
    is_fetched: bool = False
    """True to copy what was fetched to the device."""


class KvBlocksCopied(WireMessage, frozen=True):
    """Report of a worker on a device that it uses the blocks of a copy no more."""

    number: Annotated[int, Meta(ge=1, lt=2**47)]
