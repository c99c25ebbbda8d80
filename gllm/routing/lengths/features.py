"""Hashed n-grams of prompts, from which output lengths are predicted.

Two parts of a prompt decide most about its answer: the beginning, with the system prompt, and the
end, with the question and its instruction. Only these are read, so the cost per prompt is bounded.
Tokens are hashed, so no vocabulary is kept. The hashes depend on nothing but the token ids: they
are equal in every process, and files of coefficients rely on that.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from gllm.scheduler.output_lengths import NO_LIMIT, LengthQuery

HEAD_TOKENS = 64
"""Tokens at the beginning of a prompt that are read."""
TAIL_TOKENS = 128
"""Tokens at the end of a prompt that are read."""
NGRAM_SIZES = (1, 2)
"""Numbers of neighbouring tokens that are hashed together."""
HEAD_FEATURES, TAIL_FEATURES = 2048, 4096
"""Numbers of hash buckets for the n-grams of the beginning and of the end."""
SIZE_FEATURES = 33
"""One feature per number of bits of the prompt's length, and as many for `max_tokens`; the last of
the latter stands for an unknown limit."""
NUM_FEATURES = HEAD_FEATURES + TAIL_FEATURES + 2 * SIZE_FEATURES
"""Number of features of a request."""

_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


def mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return well mixed 64-bit values: the finalizer of SplitMix64."""
    values = (values ^ (values >> np.uint64(30))) * _MIX_1
    values = (values ^ (values >> np.uint64(27))) * _MIX_2
    return values ^ (values >> np.uint64(31))


def hash_ngrams(token_ids: Sequence[int]) -> NDArray[np.uint64]:
    """Return the hashes of all n-grams of some tokens, of each size in NGRAM_SIZES.

    Args:
        token_ids: at most a few hundred token ids.

    Returns:
        A sorted array of different hashes; empty without tokens.
    """
    ids = np.asarray(token_ids, dtype=np.int64).astype(np.uint64)
    grams = []
    for size in NGRAM_SIZES:
        if len(ids) < size:
            break
        values = mix(ids[: len(ids) - size + 1] + np.uint64(size << 40))
        for offset in range(1, size):
            values = mix(values + ids[offset : len(ids) - size + 1 + offset])
        grams.append(values)
    return np.unique(np.concatenate(grams)) if grams else ids


def hash_prompt(prompt: Sequence[int]) -> tuple[NDArray[np.uint64], NDArray[np.uint64]]:
    """Return the n-gram hashes of the beginning and of the end of a prompt."""
    return hash_ngrams(prompt[:HEAD_TOKENS]), hash_ngrams(prompt[-TAIL_TOKENS:])


def sparse_features(query: LengthQuery) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """Return the features of a request that are not 0.

    The n-grams of each part of the prompt have together a norm of 1, so that long prompts weigh
    as much as short ones.

    Returns:
        Different indices below NUM_FEATURES, and the value of each.
    """
    indices, values = [], []
    first = 0
    for hashes, count in zip(
        hash_prompt(query.prompt), (HEAD_FEATURES, TAIL_FEATURES), strict=True
    ):
        slots = np.unique(hashes % np.uint64(count)).astype(np.int64)
        indices.append(first + slots)
        values.append(np.full(len(slots), 1 / max(1, len(slots)) ** 0.5))
        first += count
    limit = 0 if query.max_tokens >= NO_LIMIT else query.max_tokens
    limit_bits = limit.bit_length() or SIZE_FEATURES - 1
    sizes = [first + query.num_prompt_tokens.bit_length(), first + SIZE_FEATURES + limit_bits]
    indices.append(np.array(sizes, np.int64))
    values.append(np.ones(2))
    return np.concatenate(indices), np.concatenate(values)
