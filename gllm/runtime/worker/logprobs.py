"""Log-probabilities: scoring of prompts in chunks, and conversion from tensors to messages.

The arithmetic is in gllm/kernels/logprobs.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gllm.kernels.logprobs import LogprobTensors, compute_logprobs, gather_logprobs
from gllm.messages.sampling import TokenLogprobs
from gllm.runtime.worker.sampling_state import SamplingState
from gllm.scheduler.plan import ScheduledRow

MAX_SCORED_ROWS = 256
"""Prompt tokens scored at once: their logits are as wide as the vocabulary."""
NOT_FINITE = "the model computed logits that are not finite"
"""Error of a row with logits that are NaN or infinite."""


@dataclass(slots=True)
class PromptChunk:
    """Prompt tokens of one sequence that a batch scores, each from its predecessor's row."""

    state: SamplingState
    first_row: int
    """Token row of the batch that scores the first of them."""
    position: int
    """Position of the first of them in the prompt."""
    tokens: list[int]
    scores: list[LogprobTensors] = field(default_factory=list)
    """One entry per MAX_SCORED_ROWS tokens."""

    @property
    def num_top_logprobs(self) -> int:
        """Number of top tokens returned with each prompt token."""
        return self.state.params.prompt_logprobs or 0

    @property
    def rows(self) -> range:
        """Token rows of the batch that score the tokens."""
        return range(self.first_row, self.first_row + len(self.tokens))

    def compute_scores(self, hidden: Tensor, compute_logits: Callable[[Tensor], Tensor]) -> None:
        """Score the tokens.

        Args:
            hidden: [tokens, hidden] of the batch.
            compute_logits: maps rows of `hidden` to logits [rows, vocabulary]; without any row on
                ranks that do not sample, which only help to compute them.
        """
        targets = torch.tensor(self.tokens, dtype=torch.int64)
        rows = hidden[self.first_row : self.first_row + len(targets)]
        parts = zip(rows.split(MAX_SCORED_ROWS), targets.split(MAX_SCORED_ROWS), strict=True)
        for part, tokens in parts:
            logits = compute_logits(part)
            if len(logits) < len(part):
                continue
            logprobs = compute_logprobs(logits)
            self.scores.append(gather_logprobs(logprobs, tokens, self.num_top_logprobs))

    def store_scores(self) -> None:
        """Store the scores in the sequence's state; a position computed again is replaced."""
        entries = [entry for scores in self.scores for entry in to_token_logprobs(scores)]
        if not all(math.isfinite(entry.logprob) for entry in entries):
            self.state.error = NOT_FINITE
        self.state.prompt_logprobs.update(enumerate(entries, start=self.position))


def create_prompt_chunks(
    state: SamplingState, row: ScheduledRow, first_row: int
) -> list[PromptChunk]:
    """Plan which prompt tokens a plan's row scores; return them as a list of at most one chunk.

    first_row: the row's first token row in the batch.
    """
    tokens = state.prompt[row.start + 1 : row.start + row.num_tokens + 1]
    if not tokens or not state.needs_prompt_logprobs:
        return []
    state.num_planned_scores = max(state.num_planned_scores, row.start + len(tokens))
    return [PromptChunk(state, first_row, row.start + 1, tokens)]


def to_token_logprobs(scores: LogprobTensors) -> list[TokenLogprobs]:
    """Convert scores to messages, one per row."""
    columns = (scores.tokens, scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [TokenLogprobs(*row) for row in rows]
