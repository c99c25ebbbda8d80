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
    """Prompt and output tokens of some sequences, as block tables into a table of tokens.

    The table has one token per KV-cache slot. Tensors have one entry per sequence, [histories].
    """

    rows: Tensor
    """int64: row of the logits that belongs to each sequence; each row at most once."""
    lengths: Tensor
    """int64: number of tokens of the sequence, prompt and output."""
    prompts: Tensor
    """int64: number of prompt tokens."""
    block_table: Tensor
    """[histories, blocks] int32: block ids, padding arbitrary."""
    block_size: int
    """Tokens per KV block."""

    @property
    def max_tokens(self) -> int:
        """Upper bound of the number of prompt and output tokens of a sequence."""
        return self.block_table.shape[1] * self.block_size


def gather_tokens(
    table: Tensor, histories: TokenHistories, owners: Tensor, positions: Tensor
) -> Tensor:
    """Return the tokens at the given positions of sequences, [n, width] int64.

    Args:
        table: [slots] int64: token per KV-cache slot.
        histories: block tables of the sequences.
        owners: [n] int64: index in `histories` of the sequence that each row of positions refers
            to.
        positions: [n, width] int64; positions outside of a sequence give arbitrary tokens.
    """
    width = histories.max_tokens
    inside = positions.clamp(0, width - 1)
    size = histories.block_size
    blocks = histories.block_table.index_select(0, owners).gather(1, inside // size)
    # Block ids in the padding are arbitrary.
    slots = (blocks * size + inside % size).clamp(0, len(table) - 1)
    return torch.take(table, slots)
