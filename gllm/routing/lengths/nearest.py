"""Prediction of output lengths from the finished requests with the most similar prompts."""

import numpy as np
from numpy.typing import NDArray

from gllm.routing.lengths.accuracy import BUCKET_NAMES, bucket_of
from gllm.routing.lengths.features import hash_prompt, mix
from gllm.routing.lengths.weighted import WeightedEstimate
from gllm.scheduler.output_lengths import (
    LengthEstimate,
    LengthPredictor,
    LengthQuery,
    PromptLengthPredictor,
    RecordedEstimate,
)

NUM_KEPT_REQUESTS = 2048
"""Finished requests that are kept: 520 bytes each."""
NUM_NEIGHBOURS = 24
"""Most similar requests that make an estimate."""
MIN_NEIGHBOURS = 4
"""Similar requests below which the estimate is that by the prompt's length."""
NUM_DIMENSIONS = 128
"""Dimensions of a request's vector, a multiple of 64."""
NUM_COUNTERS = 2**17
"""Hash buckets in which the outputs after an n-gram are counted by their length: 4.5 MiB."""
WINDOW_REQUESTS = 2048
"""Outputs after which all counts are halved."""
MIN_COUNT = 5
"""Outputs after an n-gram below which it says nothing: fewer cannot reach MIN_EVIDENCE where there
are several lengths."""
MIN_EVIDENCE = 30.0
"""G statistic from which an n-gram says something about the length. Without any relation it has a
chi-squared distribution with 8 degrees of freedom, and exceeds this once in 5,000 times."""
HEAD_WEIGHT = 0.35
"""Weight of the beginning of a prompt in the similarity; the end has the rest."""
MIN_SIMILARITY = 0.35
"""Cosine of the angle of two vectors from which requests are similar; that of unlike ones differs
from 0 by chance, with a standard deviation of NUM_DIMENSIONS ** -0.5 = 0.09."""
SIMILARITY_POWER = 4
"""A neighbour's weight is this power of its similarity."""
OCTAVES = 1.5
"""Prompts whose lengths differ by this many powers of two weigh less by the factor 1 / e."""
_SALTS = tuple(np.uint64(value) for value in (0x5BD1E995, 0x9E3779B97F4A7C15))
"""Constants of the beginning and of the end, which thus share no counters and directions."""


class NearestPromptPredictor(LengthPredictor):
    """Predicts output lengths from those of the finished requests with the most similar prompts.

    A prompt is a vector: the sum of a random direction for each n-gram at its beginning, which has
    the system prompt, and at its end, which has the question. An n-gram weighs as much as the
    lengths after prompts with it differ from those after all prompts (the root of the divergence of
    both distributions), so the instruction counts and the content does not. The predictor learns
    online, uses no model, and its memory does not grow. Requests without similar ones are predicted
    by the length of their prompt.

    Args:
        num_kept: finished requests that are kept; the oldest ones are replaced.
    """

    def __init__(self, num_kept: int = NUM_KEPT_REQUESTS) -> None:
        self._by_prompt = PromptLengthPredictor()
        self._vectors = np.zeros((num_kept, NUM_DIMENSIONS), np.float32)
        """Vectors of length 1, or of length 0 for requests whose n-grams say nothing."""
        self._octaves = np.zeros(num_kept, np.float32)
        """Logarithm to base 2 of each prompt's length."""
        self._lengths = np.zeros(num_kept, np.int32)
        self._num_recorded = 0
        self._counts = np.zeros((NUM_COUNTERS, len(BUCKET_NAMES)), np.float32)
        """Recent outputs after prompts with an n-gram, by its hash and by bucket of the length."""
        self._all_counts = np.zeros(len(BUCKET_NAMES))
        """All recent outputs by bucket of the length."""

    def estimate(self, query: LengthQuery) -> LengthEstimate:
        """Return the estimate of a request by its most similar ones."""
        by_prompt = self._by_prompt.estimate(query)
        if not query.prompt:
            return by_prompt
        parts = [
            hashes ^ salt for hashes, salt in zip(hash_prompt(query.prompt), _SALTS, strict=True)
        ]
        vector = self._project(parts)
        octave = float(np.log2(max(1, query.num_prompt_tokens)))

        def record(num_output_tokens: int) -> None:
            by_prompt.record(num_output_tokens)
            self._count(parts, num_output_tokens)
            self._add(vector, octave, num_output_tokens)

        sample = self._find_neighbours(vector, octave)
        if len(sample) < MIN_NEIGHBOURS:
            return RecordedEstimate(by_prompt, record)
        return WeightedEstimate(sample, query.max_tokens, record)

    def _count(self, parts: list[NDArray[np.uint64]], length: int) -> None:
        """Count an output for the n-grams of its prompt."""
        bucket = bucket_of(length)
        for hashes in parts:
            self._counts[np.unique(hashes % np.uint64(NUM_COUNTERS)), bucket] += 1
        self._all_counts[bucket] += 1
        if self._all_counts.sum() >= WINDOW_REQUESTS:
            self._counts /= 2
            self._all_counts /= 2

    def _weigh(self, hashes: NDArray[np.uint64]) -> NDArray[np.float64]:
        """Return the weight of each n-gram; 0 for those that say nothing about the length.

        Args:
            hashes: hashes of n-grams, [n].
        """
        counts = self._counts[(hashes % np.uint64(NUM_COUNTERS)).astype(np.int64)]
        sums = counts.sum(axis=1)
        weights = np.zeros(len(hashes))
        # The logarithms take most of the time, and most n-grams are rare.
        is_common = np.flatnonzero(sums >= MIN_COUNT)
        if len(is_common):
            sums = sums[is_common]
            shares = counts[is_common] / sums[:, None]
            all_shares = self._all_counts / self._all_counts.sum()
            with np.errstate(divide="ignore", invalid="ignore"):
                terms = shares * np.log(shares / all_shares)
            # Collisions of hashes and halved counts leave counts where all outputs have none.
            divergence = np.where(np.isfinite(terms), terms, 0).sum(axis=1)
            is_evident = 2 * sums * divergence >= MIN_EVIDENCE
            weights[is_common] = np.where(is_evident, np.sqrt(np.abs(divergence)), 0)
        return weights

    def _project(self, parts: list[NDArray[np.uint64]]) -> NDArray[np.float32]:
        """Return the vector of a request, [NUM_DIMENSIONS], of length 1 or 0."""
        vector = np.zeros(NUM_DIMENSIONS)
        for hashes, share in zip(parts, (HEAD_WEIGHT, 1 - HEAD_WEIGHT), strict=True):
            weights = share**0.5 * self._weigh(hashes)
            is_known = weights > 0
            if is_known.any():
                vector += weights[is_known] @ random_signs(hashes[is_known])
        norm = float(np.linalg.norm(vector))
        return (vector / norm if norm else vector).astype(np.float32)

    def _add(self, vector: NDArray[np.float32], octave: float, length: int) -> None:
        """Keep a finished request in place of the oldest one."""
        slot = self._num_recorded % len(self._lengths)
        self._vectors[slot], self._octaves[slot] = vector, octave
        self._lengths[slot] = length
        self._num_recorded += 1

    def _find_neighbours(
        self, vector: NDArray[np.float32], octave: float
    ) -> list[tuple[float, float]]:
        """Return output length and weight of the most similar requests."""
        count = min(self._num_recorded, len(self._lengths))
        similarity = self._vectors[:count] @ vector
        similar = np.flatnonzero(similarity >= MIN_SIMILARITY)
        distance = (self._octaves[similar] - octave) / OCTAVES
        weights = similarity[similar] ** SIMILARITY_POWER * np.exp(-np.minimum(distance**2, 80))
        # Of equally similar requests the latest ones.
        nearest = np.argsort(weights, kind="stable")[-NUM_NEIGHBOURS:]
        lengths = self._lengths[similar[nearest]]
        return [*zip(lengths.tolist(), weights[nearest].tolist(), strict=True)]


def random_signs(hashes: NDArray[np.uint64]) -> NDArray[np.float32]:
    """Return the random direction of each n-gram: 1 or -1 in each of NUM_DIMENSIONS dimensions.

    Args:
        hashes: hashes of n-grams, [n].

    Returns:
        [n, NUM_DIMENSIONS]
    """
    words = [mix(hashes + np.uint64(index)) for index in range(NUM_DIMENSIONS // 64)]
    octets = np.stack(words, axis=1).astype("<u8").view(np.uint8)
    return 2.0 * np.unpackbits(octets, axis=1).astype(np.float32) - 1.0
