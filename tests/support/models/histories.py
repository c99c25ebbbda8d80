"""Histories of made-up sequences in a scattered table, with poison where no token is."""

import torch
from torch import Tensor

from gllm.kernels.history import TokenHistories

POISON = 10**12
"""No token, and no index either."""


def laid_out(
    rows: list[int], prompts: list[list[int]], outputs: list[list[int]], block_size: int, seed: int
) -> tuple[Tensor, TokenHistories]:
    """The table [slots] int64 and the histories of prompts and outputs, for these rows of logits.

    Block ids behind a history's end lead out of the table.
    """
    texts = [prompt + output for prompt, output in zip(prompts, outputs, strict=True)]
    needed = [-(-len(text) // block_size) for text in texts]
    shuffled = torch.randperm(sum(needed) + 2, generator=torch.Generator().manual_seed(seed))
    free = shuffled.tolist()
    table = torch.full((len(free) * block_size,), POISON)
    blocks = torch.full((len(texts), max(needed) + 1), 2**30, dtype=torch.int32)
    for text, row, count in zip(texts, blocks, needed, strict=True):
        for index in range(count):
            part = text[index * block_size : (index + 1) * block_size]
            block = free.pop()
            row[index] = block
            table[block * block_size :][: len(part)] = torch.tensor(part)
    histories = TokenHistories(
        torch.tensor(rows),
        torch.tensor([len(text) for text in texts]),
        torch.tensor([len(prompt) for prompt in prompts]),
        blocks,
        block_size,
    )
    return table, histories
