"""Constraints on logits: banned tokens, allowed tokens, biases and bad words.

On the CPU they are applied to one row by lists of token ids. On a device they are applied to many
rows by bitmasks, by flat indices and by the end of the token history of a row.
"""

import math

import torch
from torch import Tensor

from gllm.kernels.bad_words import BadWords
from gllm.kernels.history import TokenHistories, gather_tokens

BITS_PER_WORD = 32
"""Tokens per word of a bitmask; the first one is in the lowest bit."""


def num_bitmask_words(vocabulary: int) -> int:
    """Return the number of 32-bit words of a bitmask with one bit per token of the vocabulary."""
    return -(-vocabulary // BITS_PER_WORD)


def build_token_bitmask(ids: Tensor, vocabulary: int) -> Tensor:
    """Build a bitmask [words] int32 that allows only the tokens in ids [n] int64.

    Ids outside of the vocabulary are ignored.
    """
    allowed = torch.zeros(num_bitmask_words(vocabulary) * BITS_PER_WORD, dtype=torch.bool)
    allowed[ids[ids < vocabulary]] = True
    bits = allowed.view(-1, BITS_PER_WORD).long() << torch.arange(BITS_PER_WORD)
    # Words are unsigned: the highest bit becomes the sign.
    return bits.sum(dim=-1).to(torch.int32)


def apply_token_bitmask(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Set the logits of tokens whose bit is 0 to -inf, in place.

    Does not synchronize with the GPU.

    Args:
        logits: [rows, vocabulary] float32.
        rows: [masks] int64: row that each mask applies to.
        masks: [masks, words] int32.
    """
    if logits.is_cuda:
        from gllm.kernels.triton import masking

        return masking.apply_token_bitmask(logits, rows, masks)
    bits = (masks[:, :, None] >> torch.arange(BITS_PER_WORD, device=logits.device)) & 1
    forbidden = bits.flatten(1)[:, : logits.shape[1]] == 0
    kept = logits.index_select(0, rows).masked_fill_(forbidden, -math.inf)
    logits.index_copy_(0, rows, kept)
    return None


def add_to_logits(logits: Tensor, places: Tensor, values: Tensor) -> None:
    """Add values to individual logits, such as logit biases, in place; -inf bans a token.

    Does not synchronize with the GPU.

    Args:
        logits: [rows, vocabulary] float32, contiguous.
        places: [n] int64: indices in the flattened logits, row * vocabulary + token id.
        values: [n] float32; at most one value per index is finite, so their order does not matter.
    """
    logits.view(-1).index_add_(0, places, values)


def apply_bad_words(
    logits: Tensor, table: Tensor, histories: TokenHistories, phrases: BadWords
) -> None:
    """Ban the last token of each bad-words phrase whose other tokens end the output, in place.

    Does not synchronize with the GPU.

    Args:
        logits: [rows, vocabulary] float32, contiguous.
        table: [slots] int64: token per KV-cache slot.
        histories: prompt and output tokens of the sequences.
        phrases: banned token sequences.
    """
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
