"""A stage's copy of the block tables, kept current by applying the plans in order."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from gllm.scheduler.plan import ScheduledRow, StepPlan


@dataclass(slots=True)
class SequenceView:
    """State of a sequence on a stage: its block table and length."""

    prompt_len: int
    prompt_token_ids: list[int]
    """Token ids of the prompt; empty on stages that do not need them."""
    num_preemptions: int = -1
    block_ids: list[int] = field(default_factory=list)
    """Block table: block i holds positions i * block_size .. (i + 1) * block_size - 1."""


class BlockTableReplica:
    """Sequences by id, with their block tables after the last plan applied."""

    def __init__(self) -> None:
        self.sequences: dict[int, SequenceView] = {}

    def register(self, seq: int, prompt_len: int, prompt_token_ids: list[int]) -> None:
        """Add a sequence that later plans may name."""
        self.sequences[seq] = SequenceView(prompt_len, prompt_token_ids)

    def apply(self, plan: StepPlan) -> list[SequenceView]:
        """Append a plan's new blocks to the block tables.

        The caller releases `plan.released_seqs` afterwards.

        Returns:
            The sequence of each row, in row order.

        Raises:
            KeyError: a sequence was never registered. All other rows are applied nevertheless,
                because later plans build on their block tables.
        """
        known = [row for row in plan.rows if row.seq in self.sequences]
        views = [self._extend(row) for row in known]
        if len(known) < len(plan.rows):
            raise KeyError(next(row.seq for row in plan.rows if row.seq not in self.sequences))
        return views

    def release(self, seqs: Iterable[int]) -> None:
        """Remove sequences."""
        for seq in seqs:
            self.sequences.pop(seq, None)

    def _extend(self, row: ScheduledRow) -> SequenceView:
        sequence = self.sequences[row.seq]
        if sequence.num_preemptions != row.num_preemptions:
            sequence.num_preemptions = row.num_preemptions
            sequence.block_ids = list(row.new_block_ids)
        else:
            sequence.block_ids += row.new_block_ids
        return sequence
