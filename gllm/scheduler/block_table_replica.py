"""A stage's copy of the block tables, kept current by applying the plans in order."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from gllm.scheduler.plan import StepPlan


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
        views, unknown_seqs = [], []
        for row in plan.rows:
            sequence = self.sequences.get(row.seq)
            if sequence is None:
                unknown_seqs.append(row.seq)
                continue
            if sequence.num_preemptions != row.num_preemptions:
                sequence.num_preemptions = row.num_preemptions
                sequence.block_ids = list(row.new_block_ids)
            else:
                sequence.block_ids += row.new_block_ids
            views.append(sequence)
        if unknown_seqs:
            raise KeyError(unknown_seqs[0])
        return views

    def release(self, seqs: Iterable[int]) -> None:
        """Remove sequences."""
        for seq in seqs:
            self.sequences.pop(seq, None)
