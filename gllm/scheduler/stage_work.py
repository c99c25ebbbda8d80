"""Work of a micro-batch on a stage, in the numbers that cost models predict its time from."""

from collections.abc import Iterable
from typing import NamedTuple

from gllm.scheduler.plan import ON_DEVICE, ScheduledRow


class StageWork(NamedTuple):
    """Numbers of tokens, context tokens and query-key pairs in one micro-batch, for cost models."""

    step: int
    """Step number of the plan."""
    num_tokens: int
    """Token rows, prefill and decode together."""
    prefill_chunks: tuple[tuple[int, int], ...]
    """(tokens of the sequence before the chunk, tokens in the chunk). The first `num_windows` are
    windows of speculation, which attend as chunks do."""
    num_decodes: int
    """Rows of one token."""
    num_decode_context_tokens: int
    """Tokens that the decodes attend to, their own tokens included, summed over all decodes."""
    num_sampled_rows: int
    """Token rows from which a token is sampled."""
    has_placeholders: bool = False
    """True if an input token is still being sampled by the previous step."""
    num_windows: int = 0
    """Windows of several tokens: decodes with draft tokens."""

    @property
    def num_decode_tokens(self) -> int:
        """Tokens of decodes, those of windows included."""
        windows = self.prefill_chunks[: self.num_windows]
        return self.num_decodes + sum(tokens for _, tokens in windows)

    @property
    def num_query_key_pairs(self) -> float:
        """Query-key pairs of the prefill chunks under the causal mask."""
        return sum(count_query_key_pairs(start, tokens) for start, tokens in self.prefill_chunks)

    @property
    def num_prefill_pairs(self) -> float:
        """The same without windows."""
        chunks = self.prefill_chunks[self.num_windows :]
        return sum(count_query_key_pairs(start, tokens) for start, tokens in chunks)


def count_query_key_pairs(start: int, num_tokens: int) -> float:
    """Return the number of (query, key) pairs in causal attention of a prefill chunk.

    Args:
        start: tokens of the sequence before the chunk.
        num_tokens: tokens of the chunk.
    """
    return num_tokens * (start + (num_tokens + 1) / 2)


def compute_stage_work(step: int, rows: Iterable[ScheduledRow]) -> StageWork:
    """Return the token, context and attention counts of a micro-batch, for cost models.

    A prefill chunk of one token counts as a decode.
    """
    num_chunk_tokens = num_decodes = num_context = num_sampled = num_windows = 0
    chunks = []
    has_placeholders = False
    for _, _, start, num_tokens, _, token_ids, should_sample, num_drafts in rows:
        num_sampled += should_sample
        if num_drafts:
            num_sampled += min(num_tokens - 1, num_drafts)
            num_windows += num_tokens > 1
        if num_tokens == 1:
            num_decodes += 1
            num_context += start + 1
            if token_ids and token_ids[-1] == ON_DEVICE:
                has_placeholders = True
        else:
            num_chunk_tokens += num_tokens
            chunks.append((start, num_tokens))
    return StageWork(
        step,
        num_chunk_tokens + num_decodes,
        tuple(chunks),
        num_decodes,
        num_context,
        num_sampled,
        has_placeholders,
        num_windows,
    )
