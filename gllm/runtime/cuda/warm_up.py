"""Example steps by which a stage compiles its kernels before it serves.

Triton compiles a kernel at the first launch with new constants. Constants depend on the model, and
of a step on three things: the number of tokens (tiles), whether contexts are split, and whether
rows are sampled with filters and edits. Each number of tokens at which a kernel changes its tiles,
the shortest and the longest context, and both kinds of sampling are therefore run once.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from gllm.kernels.attention_plan import PagedBatch
from gllm.messages.sampling import SequenceSamplingParams

PLAIN = SequenceSamplingParams(temperature=1.0)
"""Sampling without filters and edits."""


def example_rows(
    list_token_boundaries: Iterable[int], longest: int, block_size: int, num_blocks: int
) -> Iterator[PagedBatch]:
    """Yield micro-batches of one row, all of whose blocks are the one that padding is written to.

    Args:
        list_token_boundaries: numbers of tokens at which kernels change.
        longest: most tokens of a context.
        block_size: tokens per KV block.
        num_blocks: usable KV blocks, as in PagedBatch.
    """
    counts = sorted({1, 2, *list_token_boundaries})
    for num_tokens in (count for count in counts if count <= longest):
        # Whether a context is split matters to the shortest decode and chunk most.
        contexts = {num_tokens, longest} if num_tokens <= 2 else {num_tokens}
        for context in sorted(contexts):
            table = np.full((1, -(-context // block_size)), num_blocks + 1, dtype=np.int64)
            start = np.array([0, num_tokens], dtype=np.int64)
            length = np.array([context], dtype=np.int64)
            yield PagedBatch(table, start, length, int(num_tokens == 1), block_size, num_blocks)
