"""Log-probabilities of chosen tokens and of the likeliest ones.

Owns the log-softmax and the ranking. Does not know why a token was chosen: the one that was drawn,
or the next one of a prompt. What is computed for a row depends on that row alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """One token in each row, and the likeliest of that row."""

    tokens: Tensor
    """[rows] int64"""
    logprobs: Tensor
    """[rows] float32, natural logarithms."""
    ranks: Tensor
    """[rows] int64: 1 for the likeliest token."""
    top_ids: Tensor
    """[rows, top] int64, likeliest first."""
    top_logprobs: Tensor
    """[rows, top] float32"""


def compute_logprobs(logits: Tensor) -> Tensor:
    """Log-softmax [rows, vocabulary] float32 of logits alike."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def gather_logprobs(logprobs: Tensor, tokens: Tensor, top: int) -> LogprobTensors:
    """The scores of tokens [rows] int64 under logprobs [rows, vocabulary] float32.

    top: how many of the likeliest tokens come along, the whole vocabulary at most.
    """
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    likeliest = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
    return LogprobTensors(tokens, chosen[:, 0], ranks, likeliest.indices, likeliest.values)


def packed_logprobs_width(top: int) -> int:
    """Numbers of a packed row that tells so many of the likeliest tokens."""
    return 3 + 2 * top


def pack_logprobs(scores: LogprobTensors) -> Tensor:
    """Scores as one table [rows, packed_width(top)] float64, to be copied at a stroke; its numbers
    are exact."""
    columns = [scores.tokens, scores.logprobs, scores.ranks]
    tables = [column[:, None] for column in columns] + [scores.top_ids, scores.top_logprobs]
    return torch.cat([table.double() for table in tables], dim=1)


def unpack_logprobs(table: Tensor) -> LogprobTensors:
    """Scores from a table as `packed` makes it."""
    tokens, logprobs, ranks = table[:, :3].unbind(dim=1)
    top_ids, top_logprobs = table[:, 3:].chunk(2, dim=1)
    return LogprobTensors(
        tokens.long(), logprobs.float(), ranks.long(), top_ids.long(), top_logprobs.float()
    )
