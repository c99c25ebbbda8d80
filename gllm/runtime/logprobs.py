"""Log-probabilities from tensors to what is told, and those of prompts on their way.

Owns which token rows of a batch score prompt tokens, and joining the chunks of a prompt by
position. The arithmetic is in gllm/kernels/logprobs.py.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from gllm.kernels.logprobs import LogprobTensors, compute_logprobs, gather_logprobs
from gllm.messages.sampling import TokenLogprobs
from gllm.runtime.sampling_state import SamplingState
from gllm.scheduler.plan import ScheduledRow

SCORED_ROWS = 256
"""Most rows of a prompt whose logits exist at once; they are vocabulary-wide."""
NOT_FINITE = "the model computed logits that are not finite"


@dataclass(slots=True)
class PromptRows:
    """The part of a prompt that one batch scores: each token by the row of the one before it."""

    state: SamplingState
    begin: int
    """Token row of the batch that scores the first of them."""
    position: int
    """Of the first of them in the prompt."""
    tokens: list[int]
    scores: list[LogprobTensors] = field(default_factory=list)
    """Of SCORED_ROWS tokens each."""

    @property
    def top(self) -> int:
        """How many of the likeliest tokens are told with each."""
        return self.state.spec.prompt_logprobs or 0

    @property
    def rows(self) -> range:
        """Token rows of the batch that score them."""
        return range(self.begin, self.begin + len(self.tokens))

    def compute(self, hidden: Tensor, head: Callable[[Tensor], Tensor]) -> None:
        """Score them. hidden [tokens, hidden] of the batch; head: from such rows to logits."""
        targets = torch.tensor(self.tokens, dtype=torch.int64)
        rows = hidden[self.begin : self.begin + len(targets)]
        for part, tokens in zip(rows.split(SCORED_ROWS), targets.split(SCORED_ROWS), strict=True):
            self.scores.append(gather_logprobs(compute_logprobs(head(part)), tokens, self.top))

    def record(self) -> None:
        """Put the scores where the sequence keeps them; a position computed again replaces."""
        entries = [entry for scores in self.scores for entry in entries_of(scores)]
        if not all(math.isfinite(entry.logprob) for entry in entries):
            self.state.fault = NOT_FINITE
        self.state.prompt_logprobs.update(enumerate(entries, start=self.position))


def prompt_rows(state: SamplingState, row: ScheduledRow, begin: int) -> list[PromptRows]:
    """What a plan's row, whose first token row is `begin`, scores of its sequence's prompt."""
    tokens = state.prompt[row.start + 1 : row.start + row.num_tokens + 1]
    if not tokens or not state.wants_prompt_logprobs:
        return []
    return [PromptRows(state, begin, row.start + 1, tokens)]


def entries_of(scores: LogprobTensors) -> list[TokenLogprobs]:
    """Scores as told, row by row."""
    columns = (scores.tokens, scores.logprobs, scores.ranks, scores.top_ids, scores.top_logprobs)
    rows = zip(*(column.tolist() for column in columns), strict=True)
    return [TokenLogprobs(*row) for row in rows]
