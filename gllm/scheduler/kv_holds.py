"""KV blocks that another engine may read: of ended sequences, and of prompts while they run.

A hold keeps a reference to each of its blocks. Whoever serves the blocks reads them at any time
until it confirms that it no longer does. A lease that expires, a release by the router and a
sequence that needs blocks therefore only ask for a revocation; the blocks return with `confirm`.
Sequences that need blocks revoke the holds with the oldest leases first: those that were renewed
longest ago.

A running prompt that can be fetched counts as a row in flight, as a fetch does: victims and aborts
wait for the end of its reader. If the sequence ends as requested, a hold takes over. Source:
"Splitwise" (ISCA'24, arXiv 2311.18677), section IV-C.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gllm.scheduler.block_pool import BlockPool
from gllm.scheduler.plan import ScheduledRow, StepPlan
from gllm.scheduler.sequence import Sequence

HOLD_LEASE_SECONDS = 30.0
"""Time after which a hold that is not renewed is revoked."""


class ReadableKv(NamedTuple):
    """KV blocks that another engine may fetch, of a finished sequence or of a prompt in prefill."""

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
    lane: int = 0
    """Lane of the step: only steps of one lane are computed in order."""


@dataclass(slots=True)
class _HoldState:
    hold: ReadableKv
    lease_end: float
    is_foreign: bool
    is_revoked: bool = False


class KvHolds:
    """KV blocks of finished sequences that stay allocated until another engine has fetched them.

    Each entry (hold) has a ticket, by which the other engine asks for it, and a lease, after which
    it expires.
    """

    def __init__(self, block_pool: BlockPool) -> None:
        self._block_pool = block_pool
        self._states: dict[int, _HoldState] = {}
        self._revocations: list[int] = []
        """Tickets whose revocation has not been reported yet."""
        self.num_revoked = 0
        """Number of holds whose revocation has not been confirmed yet."""

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, ticket: int) -> bool:
        return ticket in self._states

    @property
    def holds(self) -> list[ReadableKv]:
        """All reserved block tables, oldest first."""
        return [state.hold for state in self._states.values()]

    @property
    def num_blocks(self) -> int:
        """Number of distinct KV blocks that are reserved for other engines."""
        return len({block for state in self._states.values() for block in state.hold.block_ids})

    def count_returning_blocks(self) -> int:
        """Count the blocks that become free when the readers of all revoked holds have stopped."""
        if not self.num_revoked:
            return 0
        tables = [state.hold.block_ids for state in self._states.values() if state.is_revoked]
        return self._block_pool.count_released(tables)

    def add(self, hold: ReadableKv, is_foreign: bool, now: float) -> None:
        """Keep blocks that a sequence still references for another engine.

        Args:
            hold: the blocks; its ticket is not in use.
            is_foreign: `SchedulerRequest.is_ticket_foreign`.
            now: start of the lease in seconds.
        """
        self._block_pool.add_references(hold.block_ids)
        lease_end = now + HOLD_LEASE_SECONDS
        self._states[hold.ticket] = _HoldState(hold, lease_end, is_foreign)

    def release(self, tickets: Iterable[int]) -> None:
        """End holds, whose blocks the other engine no longer needs; unknown tickets are ignored."""
        for ticket in tickets:
            if ticket in self._states:
                self._revoke(self._states[ticket])

    def renew(self, tickets: Iterable[int], now: float) -> None:
        """Restart the leases of holds; unknown tickets are ignored."""
        for ticket in tickets:
            if ticket in self._states:
                self._states[ticket].lease_end = now + HOLD_LEASE_SECONDS

    def revoke_oldest(self, num_blocks: int) -> int:
        """Revoke holds to free blocks, those with the oldest leases first.

        Args:
            num_blocks: number of blocks to free.

        Returns:
            The number of blocks that become free with these revocations.
        """
        states = self._list_revocable()
        num_before = num_returning = self.count_returning_blocks()
        while states and num_returning - num_before < num_blocks:
            self._revoke(states.pop(0))
            num_returning = self.count_returning_blocks()
        return num_returning - num_before

    def revoke_until(self, fits: Callable[[], bool], only_foreign: bool) -> bool:
        """Revoke the fewest holds after which a sequence fits, oldest leases first.

        Revokes nothing if the sequence fits without, or not even after all revocations.

        Args:
            fits: returns True if the sequence fits once the blocks of revoked holds have returned.
            only_foreign: keep the holds that a router of the fleet renews.

        Returns:
            True if the sequence fits once these blocks have returned.
        """
        if fits():
            return True
        states = self._list_revocable(only_foreign)
        if not states:
            return False

        def fits_after(count: int) -> bool:
            for index, state in enumerate(states):
                state.is_revoked = index < count
            self.num_revoked = num_before + count
            return fits()

        num_before, count = self.num_revoked, 0
        if fits_after(len(states)):
            count = bisect_left(range(len(states)), True, key=fits_after)
        fits_after(count)
        self._revocations += [state.hold.ticket for state in states[:count]]
        return count > 0

    def _list_revocable(self, only_foreign: bool = False) -> list[_HoldState]:
        """Return the holds that are not revoked, the one with the oldest lease first."""
        states = [
            state
            for state in self._states.values()
            if not state.is_revoked and (state.is_foreign or not only_foreign)
        ]
        return sorted(states, key=lambda state: state.lease_end)

    def pop_revocations(self, now: float) -> list[int]:
        """End holds with an expired lease; return the tickets ended since the last call."""
        for state in self._states.values():
            if state.lease_end <= now:
                self._revoke(state)
        tickets, self._revocations = self._revocations, []
        return tickets

    def confirm(self, ticket: int) -> None:
        """Free the blocks of a hold that no engine reads any more; unknown tickets are ignored.

        Holds that were not revoked are freed too: their reader has finished.
        """
        state = self._states.pop(ticket, None)
        if state is None:
            return
        if state.is_revoked:
            self.num_revoked -= 1
            self._revocations = [
                revocation for revocation in self._revocations if revocation != ticket
            ]
        self._block_pool.release(state.hold.block_ids)

    def _revoke(self, state: _HoldState) -> None:
        if not state.is_revoked:
            state.is_revoked = True
            self.num_revoked += 1
            self._revocations.append(state.hold.ticket)


@dataclass(slots=True)
class _OpenPrompt:
    sequence: Sequence
    is_revoked: bool = False


class ReadablePrompts:
    """Table of prompts in prefill whose computed KV other engines may already fetch, by ticket."""

    def __init__(self, threshold_tokens: int | None, block_size: int) -> None:
        """Create the table.

        Args:
            threshold_tokens: Tokens to compute from which on a prompt can be fetched before its
                end; None: never.
            block_size: In tokens.
        """
        self.threshold_tokens = threshold_tokens
        """Least number of tokens to compute of prompts that can be fetched; None: none can."""
        self._block_size = block_size
        self.is_enabled = threshold_tokens is not None
        """True if prompts of some length can be fetched while they are computed."""
        self.prompts: dict[int, _OpenPrompt] = {}
        """Prompts that can be fetched, by ticket."""
        self.new: list[ReadableKv] = []
        """KV that has become readable and was not reported yet."""

    @property
    def is_ending(self) -> bool:
        """True if a revocation is pending after which blocks are freed."""
        return any(prompt.sequence.is_freeing_blocks for prompt in self.prompts.values())

    def on_scheduled(self, plan: StepPlan, sequences: Mapping[int, Sequence]) -> None:
        """Make the KV of a step's prompt tokens fetchable, for prompts above the threshold."""
        for row in plan.rows:
            sequence = sequences[row.seq]
            ticket = sequence.request.kv_ticket
            if not ticket or row.start >= sequence.prompt_len:
                continue
            is_first = ticket not in self.prompts
            if is_first:
                if not self._should_open(sequence, row):
                    continue
                self.prompts[ticket] = _OpenPrompt(sequence)
                sequence.num_rows_in_flight += 1
            num_tokens = row.start + row.num_tokens
            block_ids = sequence.block_ids[: -(-num_tokens // self._block_size)]
            is_partial = num_tokens < sequence.prompt_len
            readable = ReadableKv(
                ticket, num_tokens, block_ids, plan.step, is_partial, is_first, plan.lane
            )
            self.new.append(readable)

    def pop_revocations(self) -> list[int]:
        """Return the tickets to revoke: their sequences have ended early or are preempted."""
        tickets = []
        for ticket, prompt in self.prompts.items():
            if prompt.sequence.is_freeing_blocks and not prompt.is_revoked:
                prompt.is_revoked = True
                tickets.append(ticket)
        return tickets

    def confirm(self, ticket: int) -> Sequence | None:
        """Remove a ticket that no engine reads any more; return its sequence, None if unknown.

        The other engine may have all of a prompt before the sequence ends.
        """
        prompt = self.prompts.pop(ticket, None)
        if prompt is None:
            return None
        prompt.sequence.num_rows_in_flight -= 1
        return prompt.sequence

    def _should_open(self, sequence: Sequence, row: ScheduledRow) -> bool:
        """Return True if a row is the first one of a prompt that is long enough."""
        threshold = self.threshold_tokens
        if threshold is None or sequence.has_run or row.start != sequence.num_reused_tokens:
            return False
        return sequence.prompt_len - row.start >= threshold
