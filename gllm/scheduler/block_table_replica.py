"""A follower's copy of the sequences: prompts and block tables, kept by applying plans in order.

Owns what a stage has to remember between steps about each sequence. Knows nothing of why rows were
chosen, and of tensors.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from gllm.scheduler.plan import ScheduledRow, StepPlan


@dataclass(slots=True)
class SequenceView:
    """One sequence as a stage knows it."""

    prompt_len: int
    prompt: list[int]
    """The prompt's token ids; empty on stages that do not need them."""
    epoch: int = -1
    blocks: list[int] = field(default_factory=list)
    """Block table: block i holds positions i * block_size .. (i + 1) * block_size - 1."""


class BlockTableReplica:
    """Sequences by id, as of the last plan applied."""

    def __init__(self) -> None:
        self.sequences: dict[int, SequenceView] = {}

    def register(self, seq: int, prompt_len: int, prompt: list[int]) -> None:
        """A sequence that coming plans may name."""
        self.sequences[seq] = SequenceView(prompt_len, prompt)

    def apply(self, plan: StepPlan) -> list[SequenceView]:
        """Apply a plan's blocks; return the followed sequence of each row, in row order.

        Raises KeyError for a sequence that was never registered, after all other rows are applied:
        a later plan builds on their block tables. The caller releases `plan.released` afterwards.
        """
        known = [row for row in plan.rows if row.seq in self.sequences]
        followed = [self._extend(row) for row in known]
        if len(known) < len(plan.rows):
            raise KeyError(next(row.seq for row in plan.rows if row.seq not in self.sequences))
        return followed

    def release(self, seqs: Iterable[int]) -> None:
        """Forget sequences."""
        for seq in seqs:
            self.sequences.pop(seq, None)

    def _extend(self, row: ScheduledRow) -> SequenceView:
        sequence = self.sequences[row.seq]
        if sequence.epoch != row.epoch:
            sequence.epoch = row.epoch
            sequence.blocks = list(row.blocks)
        else:
            sequence.blocks += row.blocks
        return sequence
