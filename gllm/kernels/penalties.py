"""Penalties on tokens that were there before.

Owns the arithmetic of repetition, frequency and presence penalty. Does not know sequences: which
tokens a row has seen, and how often, comes as a list of entries, so that the work depends on those
and not on the vocabulary.

Repetition penalty: Keskar et al., "CTRL: A Conditional Transformer Language Model for Controllable
Generation" (2019), section 4.1; here a negative logit is multiplied, so that it falls as well.
Frequency and presence penalty: as in OpenAI's API.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from gllm.kernels.transfer import beside


@dataclass(frozen=True, slots=True)
class SeenTokens:
    """Tokens that rows of logits have seen; all tensors are [entries], a (row, id) comes once."""

    rows: Tensor
    """int64"""
    ids: Tensor
    """int64"""
    counts: Tensor
    """float64: occurrences in the output; 0 for a token of the prompt alone."""


def penalize(
    logits: Tensor, seen: SeenTokens, repetition: Tensor, frequency: Tensor, presence: Tensor
) -> None:
    """Lower the logits [rows, vocabulary] float32 of seen tokens, in place.

    repetition, frequency, presence: [rows] float64; 1, 0 and 0 are off. A forbidden token (-inf)
    stays forbidden, a finite logit stays finite. All but the logits may be on the CPU where those
    are on a GPU; nobody waits for it.
    """
    rows, ids, counts = (beside(column, logits) for column in (seen.rows, seen.ids, seen.counts))
    factor, each, once = (
        beside(column, logits)[rows] for column in (repetition, frequency, presence)
    )
    before = logits[rows, ids]
    values = before.double()
    values = torch.where(values > 0, values / factor, values * factor)
    values -= each * counts + once * (counts > 0)
    largest = torch.finfo(logits.dtype).max
    values.clamp_(-largest, largest)
    logits[rows, ids] = torch.where(before == -torch.inf, before, values.float())
