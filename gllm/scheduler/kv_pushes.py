"""Pushes: KV of prompts that another engine fetches while they are computed.

Whoever serves the blocks reads them until it confirms that it no longer does. A push therefore
counts as a row in flight, as a fetch does: victims and aborts wait for its end. If the sequence
ends as requested, a hold takes over.

Source: "Splitwise" (ISCA'24, arXiv 2311.18677), section IV-C.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from gllm.scheduler.plan import ScheduledRow
from gllm.scheduler.sequence import Sequence
from gllm.scheduler.transfer_mode import TransferMode, TransferModePolicy


class KvPush(NamedTuple):
    """KV of a prompt that can be fetched, as far as it is scheduled."""

    ticket: int
    """Key by which the receiver asks for the KV."""
    num_tokens: int
    """Leading tokens of the sequence that are computed or scheduled."""
    block_ids: list[int]
    """Block table of these tokens."""
    step: int
    """Step that computes the last of them."""
    is_partial: bool
    """True if further tokens of the prompt follow."""
    is_first: bool
    """True if nothing of the prompt could be fetched before."""


@dataclass(slots=True)
class _OpenPush:
    sequence: Sequence
    is_revoked: bool = False


class KvPushes:
    """Pushes by ticket, from the first chunk of a prompt to its end."""

    def __init__(self, policy: TransferModePolicy, block_size: int) -> None:
        self._policy = policy
        self._block_size = block_size
        self.is_enabled = policy.threshold_tokens is not None
        """True if prompts of some length are pushed."""
        self._open: dict[int, _OpenPush] = {}
        self._new: list[KvPush] = []

    @property
    def is_ending(self) -> bool:
        """True if blocks return once a push has been revoked."""
        return any(push.sequence.is_freeing_blocks for push in self._open.values())

    def on_scheduled(
        self, step: int, rows: Iterable[ScheduledRow], sequences: Mapping[int, Sequence]
    ) -> None:
        """Begin and continue the pushes of the prompts in a plan."""
        for row in rows:
            sequence = sequences[row.seq]
            ticket = sequence.request.kv_ticket
            if not ticket or row.start >= sequence.prompt_len:
                continue
            is_first = ticket not in self._open
            if is_first:
                if not self._should_open(sequence, row):
                    continue
                self._open[ticket] = _OpenPush(sequence)
                sequence.num_rows_in_flight += 1
            num_tokens = row.start + row.num_tokens
            block_ids = sequence.block_ids[: -(-num_tokens // self._block_size)]
            is_partial = num_tokens < sequence.prompt_len
            self._new.append(KvPush(ticket, num_tokens, block_ids, step, is_partial, is_first))

    def pop_new(self) -> list[KvPush]:
        """Return what can be fetched in addition since the last call."""
        pushes, self._new = self._new, []
        return pushes

    def pop_revocations(self) -> list[int]:
        """Return the tickets of sequences that have ended early or are victims, once each."""
        tickets = []
        for ticket, push in self._open.items():
            if push.sequence.is_freeing_blocks and not push.is_revoked:
                push.is_revoked = True
                tickets.append(ticket)
        return tickets

    def confirm(self, ticket: int) -> Sequence | None:
        """End a push that nobody reads any more; return its sequence, None if there is none.

        The receiver may have all of a prompt before the sequence ends.
        """
        push = self._open.pop(ticket, None)
        if push is None:
            return None
        push.sequence.num_rows_in_flight -= 1
        return push.sequence

    def _should_open(self, sequence: Sequence, row: ScheduledRow) -> bool:
        """Return True if a row is the first one of a prompt that is long enough."""
        if sequence.has_run or row.start != sequence.num_reused_tokens:
            return False
        num_tokens = sequence.prompt_len - row.start
        return self._policy.choose(num_tokens) is TransferMode.PER_LAYER
