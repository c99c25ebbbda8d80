"""Estimate of an output length by a weighted sample of lengths."""

from bisect import bisect_right
from collections.abc import Callable, Iterable
from itertools import accumulate

from gllm.routing.lengths.accuracy import bucket_of
from gllm.scheduler.output_lengths import LengthEstimate


class WeightedEstimate(LengthEstimate):
    """Estimate by a weighted sample of output lengths, such as those of similar requests.

    Args:
        sample: pairs of a length in tokens, at least 1, and its weight, above 0; at least one.
        max_tokens: most tokens of the output; longer lengths count as this one.
        on_ended: called with the number of tokens of each output that has ended.
    """

    __slots__ = ("_lengths", "_max_tokens", "_on_ended", "_products", "_weights")

    def __init__(
        self,
        sample: Iterable[tuple[float, float]],
        max_tokens: int,
        on_ended: Callable[[int], None],
    ) -> None:
        pairs = sorted((min(length, max_tokens), weight) for length, weight in sample)
        self._max_tokens = max_tokens
        self._on_ended = on_ended
        self._lengths = [length for length, _ in pairs]
        # Sums from each length to the longest one.
        self._weights = [*accumulate(weight for _, weight in reversed(pairs))][::-1]
        self._products = [*accumulate(length * weight for length, weight in reversed(pairs))][::-1]

    @property
    def is_known(self) -> bool:
        """True: the sample has lengths of other requests."""
        return True

    def expected(self, num_generated: int = 0) -> float:
        """Return the weighted mean of the lengths above `num_generated`.

        An output longer than all of them is expected to double, up to `max_tokens`.
        """
        first = bisect_right(self._lengths, num_generated)
        if first == len(self._lengths):
            return self._beyond(num_generated)
        # Rounded sums must not be below the shortest of these lengths.
        return max(self._products[first] / self._weights[first], self._lengths[first])

    def likely(self, num_generated: int = 0) -> float:
        """Return the weighted mean of the lengths in the bucket with the greatest weight.

        Lengths up to `num_generated` do not count.
        """
        first = bisect_right(self._lengths, num_generated)
        if first == len(self._lengths):
            return self._beyond(num_generated)
        best_weight = best_mean = 0.0
        while first < len(self._lengths):
            bucket, end = bucket_of(self._lengths[first]), first + 1
            while end < len(self._lengths) and bucket_of(self._lengths[end]) == bucket:
                end += 1
            is_last = end == len(self._lengths)
            weight = self._weights[first] - (0.0 if is_last else self._weights[end])
            product = self._products[first] - (0.0 if is_last else self._products[end])
            if weight > best_weight:
                # Rounded sums must not leave the bucket.
                mean = min(max(product / weight, self._lengths[first]), self._lengths[end - 1])
                best_weight, best_mean = weight, mean
            first = end
        return best_mean

    def record(self, num_output_tokens: int) -> None:
        """Pass the length of an output to the predictor."""
        self._on_ended(num_output_tokens)

    def _beyond(self, num_generated: int) -> float:
        """Return the length of an output that is longer than the sample."""
        return min(self._max_tokens, 2.0 * num_generated)
