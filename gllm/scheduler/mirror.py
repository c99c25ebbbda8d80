"""A follower's copy of the sequences: prompts and block tables, kept by applying plans in order.

Owns what a stage has to remember between steps about each sequence. Knows nothing of why rows were
chosen, and of tensors.
"""

from dataclasses import dataclass, field

from gllm.scheduler.plan import Row, StepPlan


@dataclass(slots=True)
class Followed:
    """One sequence as a stage knows it."""

    prompt_len: int
    prompt: list[int]
    """The prompt's token ids; empty on stages that do not need them."""
    epoch: int = -1
    blocks: list[int] = field(default_factory=list)
    """Block table: block i holds positions i * block_size .. (i + 1) * block_size - 1."""


class Mirror:
    """Sequences by id, as of the last plan applied."""

    def __init__(self) -> None:
        self.sequences: dict[int, Followed] = {}

    def register(self, seq: int, prompt_len: int, prompt: list[int]) -> None:
        """A sequence that coming plans may name."""
        self.sequences[seq] = Followed(prompt_len, prompt)

    def apply(self, plan: StepPlan) -> list[Followed]:
        """Take the plan's blocks over; the followed sequence of each row, in row order.

        Raises KeyError for a sequence that was never registered.
        """
        followed = [self._extend(row) for row in plan.rows]
        for seq in plan.released:
            self.sequences.pop(seq, None)
        return followed

    def _extend(self, row: Row) -> Followed:
        sequence = self.sequences[row.seq]
        if sequence.epoch != row.epoch:
            sequence.epoch = row.epoch
            sequence.blocks = list(row.blocks)
        else:
            sequence.blocks += row.blocks
        return sequence
