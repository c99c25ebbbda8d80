"""KV that another engine may read: of ended sequences, and of prompts while they are computed.

The KV mover reads the blocks until it confirms that it no longer does. A prompt that is read
therefore counts as a row in flight, as a fetch does: victims and aborts wait for its end. If the
sequence ends as requested, a hold takes over.

Source: "Splitwise" (ISCA'24, arXiv 2311.18677), section IV-C.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from gllm.scheduler.kv_holds import ReadableKv
from gllm.scheduler.plan import ScheduledRow
from gllm.scheduler.sequence import Sequence
from gllm.scheduler.transfer_mode import TransferMode, TransferModePolicy


@dataclass(slots=True)
class _OpenPrompt:
    sequence: Sequence
    is_revoked: bool = False


class ReadablePrompts:
    """Prompts that can be fetched, by ticket, from their first chunk to their end."""

    def __init__(self, policy: TransferModePolicy, block_size: int) -> None:
        self._policy = policy
        self._block_size = block_size
        self.is_enabled = policy.threshold_tokens is not None
        """True if prompts of some length can be fetched while they are computed."""
        self._open: dict[int, _OpenPrompt] = {}
        self._new: list[ReadableKv] = []

    @property
    def tickets(self) -> list[int]:
        """Tickets of the prompts that can be fetched."""
        return list(self._open)

    @property
    def is_ending(self) -> bool:
        """True if blocks return once a ticket has been revoked."""
        return any(prompt.sequence.is_freeing_blocks for prompt in self._open.values())

    def on_scheduled(
        self, step: int, rows: Iterable[ScheduledRow], sequences: Mapping[int, Sequence]
    ) -> None:
        """Make the prompt tokens in a plan readable, if their prompt is long enough."""
        for row in rows:
            sequence = sequences[row.seq]
            ticket = sequence.request.kv_ticket
            if not ticket or row.start >= sequence.prompt_len:
                continue
            is_first = ticket not in self._open
            if is_first:
                if not self._should_open(sequence, row):
                    continue
                self._open[ticket] = _OpenPrompt(sequence)
                sequence.num_rows_in_flight += 1
            num_tokens = row.start + row.num_tokens
            block_ids = sequence.block_ids[: -(-num_tokens // self._block_size)]
            is_partial = num_tokens < sequence.prompt_len
            self._new.append(ReadableKv(ticket, num_tokens, block_ids, step, is_partial, is_first))

    def on_held(self, hold: ReadableKv) -> None:
        """Make the blocks of an ended sequence readable."""
        is_first = self.confirm(hold.ticket) is None
        self._new.append(hold._replace(is_first=is_first))

    def pop_new(self) -> list[ReadableKv]:
        """Return what can be fetched in addition since the last call."""
        readable, self._new = self._new, []
        return readable

    def pop_revocations(self) -> list[int]:
        """Return the tickets of sequences that have ended early or are victims, once each."""
        tickets = []
        for ticket, prompt in self._open.items():
            if prompt.sequence.is_freeing_blocks and not prompt.is_revoked:
                prompt.is_revoked = True
                tickets.append(ticket)
        return tickets

    def confirm(self, ticket: int) -> Sequence | None:
        """End a ticket that nobody reads any more; return its sequence, None if there is none.

        The other engine may have all of a prompt before the sequence ends.
        """
        prompt = self._open.pop(ticket, None)
        if prompt is None:
            return None
        prompt.sequence.num_rows_in_flight -= 1
        return prompt.sequence

    def _should_open(self, sequence: Sequence, row: ScheduledRow) -> bool:
        """Return True if a row is the first one of a prompt that is long enough."""
        if sequence.has_run or row.start != sequence.num_reused_tokens:
            return False
        num_tokens = sequence.prompt_len - row.start
        return self._policy.choose(num_tokens) is TransferMode.PER_LAYER
