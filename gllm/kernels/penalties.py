"""Repetition, frequency and presence penalties on the logits of seen tokens.

The seen tokens of a row are given as a list of entries (CPU) or as its token history (device).

Repetition penalty: Keskar et al., "CTRL: A Conditional Transformer Language Model for Controllable
Generation" (2019), section 4.1; here a negative logit is multiplied, so that it falls as well.
Frequency and presence penalty: as in OpenAI's API.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gllm.kernels.history import TokenHistories, gather_tokens


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """Tokens that occur in prompt or output, per row of logits, for repetition penalties.

    Tensors are [entries]; each (row, token id) pair occurs once.
    """

    rows: Tensor
    """int64: row of the logits."""
    ids: Tensor
    """int64: token id."""
    counts: Tensor
    """float64: occurrences in the output; 0 for a token that is only in the prompt."""


def apply_penalties(
    logits: Tensor, seen: SeenTokens, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> None:
    """Apply repetition, frequency and presence penalties to logits in place, from token counts.

    A banned token (-inf) stays banned, a finite logit stays finite. The cost is proportional to the
    number of seen tokens.

    Args:
        logits: [rows, vocabulary] float32.
        seen: tokens of prompt and output, with their counts.
        repetition: [rows] float64; 1 means off.
        frequency: [rows] float64; 0 means off.
        presence: [rows] float64; 0 means off.
    """
    rows = seen.rows
    before = logits[rows, seen.ids]
    settings = (column[rows] for column in (repetition, frequency, presence))
    logits[rows, seen.ids] = _penalized(before, seen.counts, *settings)


def apply_history_penalties(
    logits: Tensor, table: Tensor, histories: TokenHistories, settings: Tensor
) -> None:
    """Apply repetition, frequency and presence penalties in place, from token histories.

    Does not synchronize with the GPU.

    Args:
        logits: [rows, vocabulary] float32.
        table: [slots] int64: token per KV-cache slot.
        histories: prompt and output tokens of the sequences to penalize.
        settings: [3, histories] float64: repetition, frequency and presence penalty per sequence.
    """
    if logits.is_cuda:
        from gllm.kernels.triton import penalties

        return penalties.apply_history_penalties(logits, table, histories, settings)
    count, size = len(histories.rows), logits.shape[1]
    positions = torch.arange(histories.max_tokens, device=logits.device).expand(count, -1)
    owners = torch.arange(count, device=logits.device)
    ids = gather_tokens(table, histories, owners, positions)
    inside = (positions < histories.lengths[:, None]) & (ids >= 0) & (ids < size)
    # One extra column for positions without a token.
    ids = torch.where(inside, ids, size)
    shape = (count, size + 1)
    seen = torch.zeros(shape, dtype=torch.bool, device=logits.device).scatter_(1, ids, True)
    in_output = (positions >= histories.prompts[:, None]).double()
    counts = torch.zeros(shape, dtype=torch.float64, device=logits.device)
    counts.scatter_add_(1, ids, in_output)
    before = logits.index_select(0, histories.rows)
    after = _penalized(before, counts[:, :size], *settings[:, :, None])
    logits.index_copy_(0, histories.rows, torch.where(seen[:, :size], after, before))
    return None


def _penalized(
    before: Tensor, counts: Tensor, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> Tensor:
    """Return penalized logits; counts, of the shape of before, and settings are float64."""
    values = before.double()
    values = torch.where(values > 0, values / repetition, values * repetition)
    values -= frequency * counts + presence * (counts > 0)
    largest = torch.finfo(before.dtype).max
    values.clamp_(-largest, largest)
    return torch.where(before == -torch.inf, before, values.float())
