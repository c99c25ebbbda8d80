"""What a row of logits must not, may only and should rather bring.

Owns bans, allowed tokens and biases: on one row of a CPU by lists of ids, on rows of a device by
bits, by places and by what the row's history ends with. Does not know where the ids come from.
"""

import math

import torch
from torch import Tensor

from gllm.kernels.bad_words import BadWords
from gllm.kernels.history import TokenHistories, gather_tokens

BITS_PER_WORD = 32
"""Tokens of a mask's word, the first one in its lowest bit."""


def allow_only_tokens(logits: Tensor, ids: Tensor) -> None:
    """Forbid all but some tokens, in place. logits [vocabulary] float32, ids [n] int64."""
    kept = logits[ids]
    logits.fill_(-math.inf)
    logits[ids] = kept


def ban_tokens(logits: Tensor, ids: Tensor) -> None:
    """Forbid tokens, in place. logits [vocabulary] float32, ids [n] int64."""
    logits[ids] = -math.inf


def add_token_bias(logits: Tensor, ids: Tensor, bias: Tensor) -> None:
    """Add to some logits, in place. logits [vocabulary] float32, ids [n] int64, each once, bias [n]
    float32."""
    logits[ids] += bias


def num_bitmask_words(vocabulary: int) -> int:
    """Words of a mask."""
    return -(-vocabulary // BITS_PER_WORD)


def build_token_bitmask(ids: Tensor, vocabulary: int) -> Tensor:
    """A mask [words] int32 that allows ids [n] int64 of a vocabulary alone; others are left out."""
    allowed = torch.zeros(num_bitmask_words(vocabulary) * BITS_PER_WORD, dtype=torch.bool)
    allowed[ids[ids < vocabulary]] = True
    bits = allowed.view(-1, BITS_PER_WORD).long() << torch.arange(BITS_PER_WORD)
    # As unsigned words: the highest bit is a sign.
    return bits.sum(dim=-1).to(torch.int32)


def apply_token_bitmask(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Forbid all tokens whose bit is 0, in place. logits [rows, vocabulary] float32; masks [masks,
    words] int32, each for one of rows [masks] int64. Nobody waits for the device."""
    if logits.is_cuda:
        from gllm.kernels.triton import masking

        return masking.apply_token_bitmask(logits, rows, masks)
    bits = (masks[:, :, None] >> torch.arange(BITS_PER_WORD, device=logits.device)) & 1
    forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    kept = logits.index_select(0, rows).masked_fill_(forbidden, -math.inf)
    logits.index_copy_(0, rows, kept)
    return None


def add_to_logits(logits: Tensor, places: Tensor, values: Tensor) -> None:
    """Add to some logits, in place; -inf forbids. logits [rows, vocabulary] float32, contiguous;
    places [n] int64: row * vocabulary + id, values [n] float32. Nobody waits for the device.

    Of a place's values at most one is finite, so that their order does not matter.
    """
    logits.view(-1).index_add_(0, places, values)


def apply_bad_words(
    logits: Tensor, table: Tensor, histories: TokenHistories, phrases: BadWords
) -> None:
    """Forbid the last tokens of phrases whose others end an output, in place. logits [rows,
    vocabulary] float32, contiguous, table [slots] int64. Nobody waits for the device."""
    if logits.is_cuda:
        from gllm.kernels.triton import masking

        return masking.apply_bad_words(logits, table, histories, phrases)
    width = phrases.before.shape[1]
    ends = histories.lengths.index_select(0, phrases.owners)
    places = torch.arange(width, device=logits.device) - width
    tokens = gather_tokens(table, histories, phrases.owners, ends[:, None] + places)
    ahead = places < -phrases.lengths[:, None]
    output = ends - histories.prompts.index_select(0, phrases.owners)
    matched = ((tokens == phrases.before) | ahead).all(dim=-1) & (output >= phrases.lengths)
    rows = histories.rows.index_select(0, phrases.owners)
    values = torch.zeros_like(matched, dtype=logits.dtype).masked_fill_(matched, -math.inf)
    add_to_logits(logits, rows * logits.shape[1] + phrases.last, values)
    return None
