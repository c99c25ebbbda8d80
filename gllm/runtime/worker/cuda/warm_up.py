"""Example steps that make a stage compile its kernels before it serves.

Triton compiles a kernel at the first launch with new constants. Constants depend on the model and
on three properties of a step: the number of tokens (tile sizes), whether contexts are split, and
whether rows are sampled with filters and edits. Each number of tokens at which a kernel changes its
tiles, the shortest and the longest context, and both kinds of sampling are therefore run once.
"""

from collections.abc import Iterable, Iterator

import numpy as np

from gllm.kernels.attention_plan import PagedBatch
from gllm.messages.sampling import SequenceSamplingParams

PLAIN_PARAMS = SequenceSamplingParams(temperature=1.0)
"""Sampling parameters without filters and edits."""


def example_rows(
    token_counts: Iterable[int], max_model_len: int, block_size: int, num_blocks: int
) -> Iterator[PagedBatch]:
    """Yield micro-batches of one row, whose blocks are all the one that padding is written to.

    Args:
        token_counts: numbers of tokens at which kernels change their tiles.
        max_model_len: most tokens of a context.
        block_size: tokens per KV block.
        num_blocks: usable KV blocks, as in PagedBatch.
    """
    counts = sorted({1, 2, *token_counts})
    for num_tokens in (count for count in counts if count <= max_model_len):
        # The shortest decode and chunk depend most on whether a context is split.
        contexts = {num_tokens, max_model_len} if num_tokens <= 2 else {num_tokens}
        for context in sorted(contexts):
            table = np.full((1, -(-context // block_size)), num_blocks + 1, dtype=np.int64)
            start = np.array([0, num_tokens], dtype=np.int64)
            length = np.array([context], dtype=np.int64)
            yield PagedBatch(table, start, length, int(num_tokens == 1), block_size, num_blocks)
