"""Holds: KV blocks of ended sequences that another engine may still fetch.

A hold keeps a reference to each of its blocks. Whoever serves the blocks reads them at any time
until it confirms that it no longer does. A lease that expires, a release by the router and a
sequence that needs blocks therefore only ask for a revocation; the blocks return with `confirm`.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from gllm.scheduler.block_pool import BlockPool

HOLD_LEASE_SECONDS = 30.0
"""Time after which a hold that nobody renews is revoked."""


class ReadableKv(NamedTuple):
    """KV that can be fetched: of a hold, or of a prompt as far as it is scheduled."""

    ticket: int
    """Key by which the other engine asks for the KV."""
    num_tokens: int
    """Leading tokens of the sequence that are computed or scheduled."""
    block_ids: list[int]
    """Block table: block i holds positions i * block_size .. (i + 1) * block_size - 1."""
    step: int | None = None
    """Step that computes the last of them; None: all are computed."""
    is_partial: bool = False
    """True if further tokens of the prompt follow."""
    is_first: bool = True
    """True if nothing could be fetched under the ticket before."""


@dataclass(slots=True)
class _HoldState:
    hold: ReadableKv
    rank: tuple[int, float, int]
    """Rank of the sequence."""
    lease_end: float
    is_revoked: bool = False


class KvHolds:
    """Holds by ticket."""

    def __init__(self, block_pool: BlockPool) -> None:
        self._block_pool = block_pool
        self._states: dict[int, _HoldState] = {}
        self._revocations: list[int] = []
        """Tickets whose revocation has not been reported yet."""
        self._num_revoked = 0

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._states

    @property
    def holds(self) -> list[ReadableKv]:
        """All holds, in the order in which they began."""
        return [state.hold for state in self._states.values()]

    @property
    def num_blocks(self) -> int:
        """Number of blocks in holds, shared ones counted once."""
        return len({block for state in self._states.values() for block in state.hold.block_ids})

    @property
    def num_revoked(self) -> int:
        """Number of holds whose revocation has not been confirmed yet."""
        return self._num_revoked

    def count_returning_blocks(self) -> int:
        """Count the blocks that become free when all revocations are confirmed."""
        if not self._num_revoked:
            return 0
        states = [state for state in self._states.values() if state.is_revoked]
        return sum(self._block_pool.count_exclusive(state.hold.block_ids) for state in states)

    def add(self, hold: ReadableKv, rank: tuple[int, float, int], now: float) -> None:
        """Hold blocks that a sequence still refers to.

        Args:
            hold: its ticket is not in use.
            rank: rank of the sequence.
            now: start of the lease in seconds.
        """
        self._block_pool.add_references(hold.block_ids)
        self._states[hold.ticket] = _HoldState(hold, rank, now + HOLD_LEASE_SECONDS)

    def release(self, tickets: Iterable[int]) -> None:
        """Ask for the revocation of holds that nobody needs; unknown tickets are ignored."""
        for ticket in tickets:
            if ticket in self._states:
                self._revoke(self._states[ticket])

    def renew(self, tickets: Iterable[int], now: float) -> None:
        """Begin the leases of holds anew; unknown tickets are ignored."""
        for ticket in tickets:
            if ticket in self._states:
                self._states[ticket].lease_end = now + HOLD_LEASE_SECONDS

    def revoke_worst(self, num_blocks: int) -> int:
        """Ask for the revocation of holds, worst rank first, until enough blocks will return.

        Args:
            num_blocks: number of blocks to free.

        Returns:
            The number of blocks that become free with these revocations.
        """
        states = [state for state in self._states.values() if not state.is_revoked]
        states.sort(key=lambda state: state.rank)
        num_returning = 0
        while states and num_returning < num_blocks:
            state = states.pop()
            num_returning += self._block_pool.count_exclusive(state.hold.block_ids)
            self._revoke(state)
        return num_returning

    def pop_revocations(self, now: float) -> list[int]:
        """Revoke expired holds; return the tickets revoked since the last call."""
        for state in self._states.values():
            if state.lease_end <= now:
                self._revoke(state)
        tickets, self._revocations = self._revocations, []
        return tickets

    def confirm(self, ticket: int) -> None:
        """Return the blocks of a hold that nobody reads any more; unknown tickets are ignored.

        Whoever serves the blocks may also confirm what nobody has revoked.
        """
        state = self._states.pop(ticket, None)
        if state is None:
            return
        if state.is_revoked:
            self._num_revoked -= 1
            self._revocations = [each for each in self._revocations if each != ticket]
        self._block_pool.release(state.hold.block_ids)

    def _revoke(self, state: _HoldState) -> None:
        if not state.is_revoked:
            state.is_revoked = True
            self._num_revoked += 1
            self._revocations.append(state.hold.ticket)
