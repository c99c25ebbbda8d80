"""Comparison of predictors of output lengths on requests whose lengths are known."""

from collections.abc import Sequence
from typing import NamedTuple

from gllm.routing.disaggregation.pair_loads import HEAVY_TOKENS
from gllm.routing.lengths.accuracy import LengthAccuracy, bucket_of
from gllm.scheduler.output_lengths import LengthPredictor, LengthQuery


class LoggedOutput(NamedTuple):
    """A request, and the length of one output that ended by itself."""

    query: LengthQuery
    num_output_tokens: int


class PredictorScore(NamedTuple):
    """Accuracy of a predictor; shares are in 0..1."""

    right_share: float
    """Outputs whose bucket was predicted."""
    near_share: float
    """Outputs whose bucket was predicted, or a neighbouring one."""
    class_share: float
    """Outputs that were predicted right to be light or heavy."""
    total_ratio: float
    """Sum of the expected lengths over the sum of the lengths; 1 for an unbiased predictor."""
    accuracy: LengthAccuracy
    """Accuracy per bucket."""


def score_predictor(
    lengths: LengthPredictor, outputs: Sequence[LoggedOutput], num_before: int = 0
) -> PredictorScore:
    """Return the accuracy of a predictor that learns each output before the next request arrives.

    Args:
        lengths: a new predictor.
        outputs: requests with their outputs, in order of arrival.
        num_before: outputs at the beginning that are learned and not scored; fewer than there are.
    """
    accuracy, num_near, num_class, expected, actual = LengthAccuracy(), 0, 0, 0.0, 0
    for index, (query, num_tokens) in enumerate(outputs):
        estimate = lengths.estimate(query)
        if index >= num_before:
            predicted = estimate.likely()
            accuracy.record(predicted, num_tokens)
            num_near += abs(bucket_of(predicted) - bucket_of(num_tokens)) <= 1
            num_class += (predicted > HEAVY_TOKENS) == (num_tokens > HEAVY_TOKENS)
            expected += estimate.expected()
            actual += num_tokens
        estimate.record(num_tokens)
    count = len(outputs) - num_before
    return PredictorScore(
        accuracy.right_share, num_near / count, num_class / count, expected / actual, accuracy
    )
