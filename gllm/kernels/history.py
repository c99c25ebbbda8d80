"""Token histories of sequences on the device, addressed by the block tables of the KV cache.

The token table has one token per slot of the KV cache (slot: see attention_plan.py). The history of
a row of logits is therefore a block table and a number of tokens; rolling back to an earlier token
only needs a smaller number.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenHistories:
    """Histories of some rows of logits in the token table. Tensors are [histories]."""

    rows: Tensor
    """int64: row of the logits per history, each row at most once."""
    lengths: Tensor
    """int64: number of tokens of the sequence, prompt and output."""
    prompts: Tensor
    """int64: number of prompt tokens."""
    block_table: Tensor
    """[histories, blocks] int32: block ids, padding arbitrary."""
    block_size: int

    @property
    def max_tokens(self) -> int:
        """Upper bound of the number of tokens of a history."""
        return self.block_table.shape[1] * self.block_size


def gather_tokens(
    table: Tensor, histories: TokenHistories, owners: Tensor, positions: Tensor
) -> Tensor:
    """Gather tokens [n, width] int64 at positions [n, width] int64 of histories.

    Args:
        table: [slots] int64: token per KV-cache slot.
        histories: Histories to read.
        owners: [n] int64: index of the history per row of positions.
        positions: Positions outside of a history give arbitrary tokens.
    """
    width = histories.max_tokens
    inside = positions.clamp(0, width - 1)
    size = histories.block_size
    blocks = histories.block_table.index_select(0, owners).gather(1, inside // size)
    # Block ids in the padding are arbitrary.
    slots = (blocks * size + inside % size).clamp(0, len(table) - 1)
    return torch.take(table, slots)
