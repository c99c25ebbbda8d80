"""Tickets that a mover serves. Pure, without locks."""

from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

from gllm.messages.handoff import MAX_TICKET

_MAX_ENDED = 4096
"""Tickets whose end is remembered."""


class TicketError(Exception):
    """The ticket of a KV read is unknown, has ended, or does not cover the requested blocks."""


class ServedChunk(NamedTuple):
    """Tokens of a prompt that one step computes."""

    end: int
    """Number of tokens up to the end of the chunk."""
    step: int
    """Number of the step, from 1; 0 if it is known to be computed."""
    lane: int = 0
    """Lane of the step."""


@dataclass
class HeldBlocks:
    """KV blocks of a prefilled request that stay reserved until another engine has read them."""

    num_tokens: int
    """Number of tokens whose keys and values are in the blocks."""
    block_ids: list[int]
    reader: int = 0
    """Number of the fetch that uses the ticket; 0 before the first use."""
    num_complete: int = 0
    """Machines of that fetch's engine that have read all of their parts."""
    step: int = 0
    """Step that computes the last tokens; 0 if all tokens are computed."""
    is_partial: bool = False
    """True if further tokens follow."""
    lane: int = 0
    """Lane of the step."""
    _chunks: list[ServedChunk] = field(default_factory=list)
    """In the order of their tokens."""

    def __post_init__(self) -> None:
        """Begin with one chunk."""
        self._chunks.append(ServedChunk(self.num_tokens, self.step, self.lane))

    def extend(self, other: "HeldBlocks") -> None:
        """Add the further tokens of `other`, which another step computes."""
        self.num_tokens, self.block_ids = other.num_tokens, other.block_ids
        self.step, self.lane, self.is_partial = other.step, other.lane, other.is_partial
        if not other.step:
            self._chunks.clear()
        self._chunks.append(ServedChunk(other.num_tokens, other.step, other.lane))

    def find_chunk(self, first_token: int) -> ServedChunk:
        """Return the prefill chunk with a token, by default the last one."""
        return next((chunk for chunk in self._chunks if chunk.end > first_token), self._chunks[-1])


class TicketBook:
    """Maps tickets (random numbers that permit reading KV blocks) to the reserved blocks.

    Only the first fetch that uses a ticket may read its blocks, unless it ends before it has all of
    them. The workers of a receiving engine use one fetch number, each for its own layers and heads.
    """

    def __init__(self) -> None:
        """Create a book without tickets."""
        self._held: dict[int, HeldBlocks] = {}
        self._ended: deque[int] = deque(maxlen=_MAX_ENDED)
        self.num_refused = 0
        """Requests with a wrong ticket."""

    def __len__(self) -> int:
        """Return the number of tickets that are served."""
        return len(self._held)

    def __contains__(self, ticket: int) -> bool:
        """Return True if a ticket is served."""
        return ticket in self._held

    def may_be_used_later(self, ticket: int, reader: int) -> bool:
        """Return True if a fetch may use a ticket later: it is not known yet or is in use."""
        held = self._held.get(ticket)
        if held is None:
            return ticket not in self._ended
        return held.reader not in (0, reader)

    def has_ended(self, ticket: int) -> bool:
        """Return True if a ticket was served and has ended recently."""
        return ticket in self._ended

    def find(self, ticket: int, reader: int) -> HeldBlocks:
        """Return the blocks of a ticket that a fetch may use.

        Raises:
            TicketError: The ticket is unknown, revoked or used by another fetch.
        """
        held = self._held.get(ticket)
        if held is None or reader <= 0 or held.reader not in (0, reader):
            self.num_refused += 1
            raise TicketError("the ticket is not held here")
        return held

    def hold(self, ticket: int, held: HeldBlocks) -> None:
        """Permit reading blocks with a ticket, or further blocks of the same sequence.

        Raises:
            TicketError: The ticket is invalid or has ended, or is in use for other blocks.
        """
        if not 0 < ticket <= MAX_TICKET or ticket in self._ended:
            raise TicketError("the ticket is invalid or has ended")
        served = self._held.setdefault(ticket, held)
        if served is held:
            return
        if (
            held.num_tokens < served.num_tokens
            or held.block_ids[: len(served.block_ids)] != served.block_ids
        ):
            raise TicketError("the ticket is in use for other blocks")
        served.extend(held)

    def use(
        self,
        ticket: int,
        reader: int,
        first_token: int,
        num_tokens: int,
        accepts_part: bool = False,
    ) -> HeldBlocks:
        """Return the blocks of a ticket for a fetch, which then owns the ticket.

        Args:
            ticket: Random number that permits the read.
            reader: Number of the fetch.
            first_token: First requested token.
            num_tokens: Number of requested tokens.
            accepts_part: True if the last tokens may still be missing.

        Raises:
            TicketError: The ticket is unknown, revoked or used by another fetch, or its blocks do
                not have the tokens.
        """
        held = self.find(ticket, reader)
        exceeds = first_token + num_tokens > held.num_tokens
        exceeds = exceeds and not (accepts_part and held.is_partial)
        if first_token < 0 or num_tokens <= 0 or exceeds:
            self.num_refused += 1
            raise TicketError(
                f"tokens {first_token} to {first_token + num_tokens - 1} of {held.num_tokens} are "
                "requested"
            )
        if held.reader != reader:
            held.reader, held.num_complete = reader, 0
        return held

    def count_complete(self, ticket: int, reader: int) -> int:
        """Count a machine of a fetch that has read all of its parts; return how many have.

        0 if the ticket has ended or is used by another fetch.
        """
        held = self._held.get(ticket)
        if held is None or held.reader != reader:
            return 0
        held.num_complete += 1
        return held.num_complete

    def leave(self, ticket: int, reader: int) -> None:
        """Free a ticket for another fetch, because its connection ended before the last block.

        Nothing happens if the ticket has ended or is used by another fetch.
        """
        held = self._held.get(ticket)
        if held is not None and held.reader == reader:
            held.reader = 0

    def is_held(self, ticket: int, held: HeldBlocks) -> bool:
        """Return True if the blocks that a fetch reads are still reserved under the ticket."""
        return self._held.get(ticket) is held

    def revoke(self, ticket: int) -> bool:
        """End a ticket; return False if it is unknown."""
        if self._held.pop(ticket, None) is None:
            return False
        self._ended.append(ticket)
        return True

    def clear(self) -> None:
        """Revoke all tickets."""
        self._ended.extend(self._held)
        self._held.clear()
