"""The tokens of sequences, kept beside their keys and values: found by the same block tables.

Owns where a sequence's tokens so far are. Does not know who writes them and what looks back for.

A table has one token for each slot of the KV cache (attention_plan.py says what a slot is). So what
a row of logits comes behind is a block table and a number of tokens, and going back to an earlier
token takes a smaller number and nothing else.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class TokenHistories:
    """Where the tokens are that some rows of logits come behind. Tensors are [histories]."""

    rows: Tensor
    """int64: rows of the logits, each once."""
    lengths: Tensor
    """int64: tokens of the sequence, prompt and output."""
    prompts: Tensor
    """int64: those of the prompt among them."""
    block_table: Tensor
    """[histories, blocks] int32: block ids, padding arbitrary."""
    block_size: int

    @property
    def max_tokens(self) -> int:
        """As many tokens as the longest may have."""
        return self.block_table.shape[1] * self.block_size


def gather_tokens(
    table: Tensor, histories: TokenHistories, owners: Tensor, positions: Tensor
) -> Tensor:
    """Tokens [n, width] int64 at positions [n, width] int64 of histories owners [n] int64.

    table: [slots] int64. What is behind a history's end is arbitrary, as is what is before its
    beginning.
    """
    width = histories.max_tokens
    inside = positions.clamp(0, width - 1)
    size = histories.block_size
    blocks = histories.block_table.index_select(0, owners).gather(1, inside // size)
    # Block ids of padding may be anything.
    slots = (blocks * size + inside % size).clamp(0, len(table) - 1)
    return torch.take(table, slots)
