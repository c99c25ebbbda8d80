"""Log-probabilities of given tokens and of the top tokens per row of logits.

A given token is a sampled one or the next one of a prompt. The result of a row depends on that row
alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class LogprobTensors:
    """Log-probability and rank of one token per row of logits, and the top tokens of each row."""

    tokens: Tensor
    """[rows] int64: token ids."""
    logprobs: Tensor
    """[rows] float32, natural logarithms."""
    ranks: Tensor
    """[rows] int64: 1 for the likeliest token."""
    top_ids: Tensor
    """[rows, top] int64: ids of the top tokens, likeliest first."""
    top_logprobs: Tensor
    """[rows, top] float32: their log-probabilities."""


def compute_logprobs(logits: Tensor) -> Tensor:
    """Return the log-softmax of logits [rows, vocabulary], float32 of the same shape."""
    return torch.log_softmax(logits, dim=-1, dtype=torch.float32)


def gather_logprobs(logprobs: Tensor, tokens: Tensor, top: int) -> LogprobTensors:
    """Look up the log-probability and rank of one token per row, and the top tokens of each row.

    Args:
        logprobs: [rows, vocabulary] float32.
        tokens: [rows] int64: token ids to look up.
        top: number of top tokens per row, limited to the vocabulary.
    """
    chosen = logprobs.gather(1, tokens[:, None])
    ranks = (logprobs > chosen).sum(dim=-1) + 1
    likeliest = logprobs.topk(min(top, logprobs.shape[1]), dim=-1)
    return LogprobTensors(tokens, chosen[:, 0], ranks, likeliest.indices, likeliest.values)


def packed_logprobs_width(top: int) -> int:
    """Return the number of columns of a `pack_logprobs` table with `top` top tokens per row."""
    return 3 + 2 * top


def pack_logprobs(scores: LogprobTensors) -> Tensor:
    """Pack all logprob tensors into one float64 table, without rounding, for one copy to the host.

    The table is [rows, packed_logprobs_width(top)].
    """
    columns = [scores.tokens, scores.logprobs, scores.ranks]
    tables = [column[:, None] for column in columns] + [scores.top_ids, scores.top_logprobs]
    return torch.cat([table.double() for table in tables], dim=1)


def unpack_logprobs(table: Tensor) -> LogprobTensors:
    """Convert a table from `pack_logprobs` back to the logprob tensors."""
    tokens, logprobs, ranks = table[:, :3].unbind(dim=1)
    top_ids, top_logprobs = table[:, 3:].chunk(2, dim=1)
    return LogprobTensors(
        tokens.long(), logprobs.float(), ranks.long(), top_ids.long(), top_logprobs.float()
    )
