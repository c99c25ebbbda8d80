"""Accuracy of a predictor of output lengths, per bucket of lengths, measured as outputs end."""

from bisect import bisect_left
from typing import Any

import msgspec

from gllm.scheduler.output_lengths import (
    LengthEstimate,
    LengthPredictor,
    LengthQuery,
    RecordedEstimate,
)

BUCKET_BOUNDS = (16, 32, 64, 128, 256, 512, 1024, 2048)
"""Longest output in tokens of each bucket but the last, which has no bound. TetriInfer's limit of
heavy decodes, 128, is one of them."""
BUCKET_NAMES = (
    *(
        f"{low}-{high}"
        for low, high in zip((1, *(b + 1 for b in BUCKET_BOUNDS)), BUCKET_BOUNDS, strict=False)
    ),
    f"{BUCKET_BOUNDS[-1] + 1}+",
)
"""Names of the buckets: their shortest and longest output."""


def bucket_of(num_tokens: float) -> int:
    """Return the index of the bucket of an output length in tokens."""
    return bisect_left(BUCKET_BOUNDS, num_tokens)


class BucketAccuracy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Accuracy of the predictions for outputs that were in one bucket of lengths."""

    bucket: str
    """Shortest and longest output of the bucket in tokens."""
    num_right: int
    """Outputs that were predicted to be in the bucket."""
    num_short: int
    """Outputs that were predicted to be in a bucket of shorter outputs."""
    num_long: int
    """Outputs that were predicted to be in a bucket of longer outputs."""
    mean_predicted_tokens: float
    """Mean of the predicted lengths; 0 without outputs."""
    mean_tokens: float
    """Mean of the lengths; 0 without outputs."""

    @property
    def num_outputs(self) -> int:
        """Number of outputs in the bucket."""
        return self.num_right + self.num_short + self.num_long


class LengthAccuracy:
    """Counts by bucket how many output lengths were predicted right, too short and too long."""

    def __init__(self) -> None:
        self._counts = [[0, 0, 0] for _ in BUCKET_NAMES]
        """Right, long and short predictions by bucket of the length."""
        self._predicted = [0.0] * len(BUCKET_NAMES)
        self._actual = [0] * len(BUCKET_NAMES)

    def record(self, predicted_tokens: float, num_tokens: int) -> None:
        """Count the prediction of one output.

        Args:
            predicted_tokens: length in tokens that was predicted when the request arrived.
            num_tokens: actual length in tokens.
        """
        bucket, predicted = bucket_of(num_tokens), bucket_of(predicted_tokens)
        self._counts[bucket][(predicted > bucket) - (predicted < bucket)] += 1
        self._predicted[bucket] += predicted_tokens
        self._actual[bucket] += num_tokens

    @property
    def num_outputs(self) -> int:
        """Number of outputs."""
        return sum(map(sum, self._counts))

    @property
    def right_share(self) -> float:
        """Share of the outputs whose bucket was predicted correctly, 0..1; 0 without outputs."""
        num_outputs = self.num_outputs
        return sum(counts[0] for counts in self._counts) / num_outputs if num_outputs else 0.0

    def rows(self) -> list[BucketAccuracy]:
        """Return the accuracy for each bucket, in the order of lengths."""
        rows = []
        for index, name in enumerate(BUCKET_NAMES):
            right, long, short = self._counts[index]
            count = right + short + long
            rows.append(
                BucketAccuracy(
                    name,
                    right,
                    short,
                    long,
                    self._predicted[index] / count if count else 0.0,
                    self._actual[index] / count if count else 0.0,
                )
            )
        return rows


class MeasuredLengthPredictor(LengthPredictor):
    """Predictor that counts how often it was right, per bucket of lengths.

    Requests about which nothing was known when they arrived do not count.

    Args:
        name: name of the predictor, for reports.
        inner: the predictor.
    """

    def __init__(self, name: str, inner: LengthPredictor) -> None:
        self.name = name
        self.accuracy = LengthAccuracy()
        self._inner = inner

    def describe(self) -> dict[str, Any]:
        """Return the predictor's name and accuracy as JSON values."""
        return {
            "predictor": self.name,
            "right_share": self.accuracy.right_share,
            "buckets": msgspec.to_builtins(self.accuracy.rows()),
        }

    def estimate(self, query: LengthQuery) -> LengthEstimate:
        """Return the predictor's estimate of a request."""
        inner = self._inner.estimate(query)
        if not inner.is_known:
            return inner
        predicted = inner.likely()

        def on_ended(num_tokens: int) -> None:
            self.accuracy.record(predicted, num_tokens)
            inner.record(num_tokens)

        return RecordedEstimate(inner, on_ended)
