"""States of recurrent layers that a step reads and writes: which rows of the batch, which slots.

A *state slot* holds the state of one sequence in all recurrent layers of a stage, after some number
of its tokens. Each layer has one tensor [slots, ...] float32 per part of its state.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

NO_SLOT = -1
"""Source of a segment that begins at the first token of its sequence: its state is zero."""


@dataclass(frozen=True, slots=True)
class StatePlan:
    """Segments of a step's batch of tokens, each with the slots of its states.

    A kernel reads the state of a segment's source slot, updates it by the segment's tokens in order
    and writes it to the destination slot. The two may be the same. A slot that is a source and no
    destination keeps its state, as a checkpoint for the prefix cache.

    The segments of one sequence follow each other; a later one may read the slot that an earlier
    one writes. Kernels run sequences in parallel and the segments of each one after the other.
    """

    segments: Tensor
    """[segments, 4] int32: first row in the batch of tokens, number of rows, source slot or
    `NO_SLOT` for zeros, destination slot."""
    groups: Tensor
    """[sequences + 1] int32: index of each sequence's first segment; the last entry is the number
    of segments."""


def read_state(states: Tensor, slot: int) -> Tensor:
    """Return the state in a slot of states [slots, ...], or zeros for `NO_SLOT`."""
    return torch.zeros_like(states[0]) if slot == NO_SLOT else states[slot]
