"""Classifier of output lengths, read from a file that `gllm profile lengths` writes.

The file is a JSON object of numbers: for each bucket of lengths the coefficients of a multinomial
logistic regression on hashed features of the prompt, and quantiles of the lengths in the bucket.
Predicting takes numpy alone. Nothing in the file is executed; a file with anything unexpected is
refused. Source: a classifier into buckets of lengths as in "Inference without Interference"
(TetriInfer, arXiv 2401.11181), section on the length predictor, which fine-tunes OPT-125M for it.
"""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
import numpy as np
from msgspec import Meta

from gllm.options.options import INT32_MAX
from gllm.routing.lengths.features import NUM_FEATURES, sparse_features
from gllm.routing.lengths.weighted import WeightedEstimate
from gllm.scheduler.output_lengths import (
    LengthEstimate,
    LengthPredictor,
    LengthQuery,
    PromptLengthPredictor,
)

MAX_FILE_BYTES = 2**26
"""Largest file that is read."""
MAX_COEFFICIENT = 1e6
"""Largest magnitude of a coefficient."""

Length = Annotated[float, Meta(ge=1, le=INT32_MAX)]
Coefficient = Annotated[float, Meta(ge=-MAX_COEFFICIENT, le=MAX_COEFFICIENT)]


class ClassifiedBucket(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One class of a length classifier: the lengths in it, and the weights of the features."""

    quantiles: Annotated[list[Length], Meta(min_length=1, max_length=64)]
    """Equally probable lengths of outputs in the bucket, in tokens, ascending."""
    intercept: Coefficient
    coefficients: Annotated[
        list[Coefficient], Meta(min_length=NUM_FEATURES, max_length=NUM_FEATURES)
    ]
    """Weight of each feature (gllm/routing/lengths/features.py)."""


class LengthClassifier(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Contents of a file of `gllm profile lengths`."""

    format: Literal["gllm-length-classifier"]
    version: Literal[1]
    model: Annotated[str, Meta(max_length=4096)]
    """Model whose requests it was trained on; token ids of another vocabulary mean nothing to it.
    """
    num_requests: Annotated[int, Meta(ge=1)]
    """Outputs that it was trained on."""
    buckets: Annotated[list[ClassifiedBucket], Meta(min_length=1, max_length=64)]


class ClassifierError(ValueError):
    """Raised if a file is no length classifier; the message has the field and the fix."""


def decode_classifier(data: bytes) -> LengthClassifier:
    """Decode and check the contents of a file.

    Raises:
        ClassifierError: the contents are no length classifier of this version.
    """
    try:
        classifier = msgspec.json.decode(data, type=LengthClassifier)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ClassifierError(
            f"no length classifier: {error}; write one with gllm profile lengths"
        ) from None
    for index, bucket in enumerate(classifier.buckets):
        numbers = [*bucket.quantiles, bucket.intercept, *bucket.coefficients]
        if not all(map(math.isfinite, numbers)):
            raise ClassifierError(f"buckets[{index}] has a number that is not finite")
        if bucket.quantiles != sorted(bucket.quantiles):
            raise ClassifierError(f"buckets[{index}].quantiles has to be ascending")
    return classifier


def read_classifier(path: str | Path) -> LengthClassifier:
    """Read a file of `gllm profile lengths`.

    Raises:
        ClassifierError: it is no such file, or too large for one.
        OSError: it cannot be read.
    """
    with open(path, "rb") as file:
        data = file.read(MAX_FILE_BYTES + 1)
    if len(data) > MAX_FILE_BYTES:
        raise ClassifierError(f"no length classifier: it has more than {MAX_FILE_BYTES} bytes")
    return decode_classifier(data)


class ClassifierPredictor(LengthPredictor):
    """Predicts the bucket of each output by a classifier that was trained on logs.

    Requests whose tokens are unknown are predicted by the length of their prompt.

    Args:
        classifier: the contents of a file.
    """

    def __init__(self, classifier: LengthClassifier) -> None:
        buckets = classifier.buckets
        self._by_prompt = PromptLengthPredictor()
        # [features, buckets]: the features of a request are a few rows.
        self._coefficients = np.array([bucket.coefficients for bucket in buckets], np.float32).T
        self._intercepts = np.array([bucket.intercept for bucket in buckets])
        self._quantiles: Sequence[Sequence[float]] = [bucket.quantiles for bucket in buckets]

    def probabilities(self, query: LengthQuery) -> list[float]:
        """Return the probability of each bucket of the file; their sum is 1."""
        indices, values = sparse_features(query)
        scores = self._intercepts + values @ self._coefficients[indices]
        shares = np.exp(scores - scores.max())
        return (shares / shares.sum()).tolist()

    def estimate(self, query: LengthQuery) -> LengthEstimate:
        """Return the estimate of a request by the probabilities of the buckets."""
        by_prompt = self._by_prompt.estimate(query)
        if not query.prompt:
            return by_prompt
        sample = [
            (length, probability / len(lengths))
            for probability, lengths in zip(self.probabilities(query), self._quantiles, strict=True)
            for length in lengths
            if probability > 0
        ]
        return WeightedEstimate(sample, query.max_tokens, by_prompt.record)
