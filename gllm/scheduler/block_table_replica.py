"""A stage's copy of the block tables, kept current by applying the plans in order."""

from collections.abc import Iterable
from dataclasses import dataclass, field

from gllm.scheduler.plan import StepPlan


@dataclass(slots=True)
class SequenceView:
    """Copy of a sequence's block table and prompt, as a pipeline stage keeps it."""

    prompt_len: int
    prompt_token_ids: list[int]
    """Token ids of the prompt; empty on stages that do not need them."""
    num_preemptions: int = -1
    block_ids: list[int] = field(default_factory=list)
    """Block table: block i holds positions i * block_size .. (i + 1) * block_size - 1."""


class BlockTableReplica:
    """Copies of all sequences' block tables on a pipeline stage, updated with each step's plan."""

    def __init__(self) -> None:
        self.sequences: dict[int, SequenceView] = {}

    def register(self, seq: int, prompt_len: int, prompt_token_ids: list[int]) -> None:
        """Add a sequence before the first plan that contains it arrives."""
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
