"""Prediction of output lengths, in bins as a classifier gives them.

Source: "Inference without Interference" (TetriInfer, arXiv 2401.11181), section 3.3.2: a classifier
labels the output length of a request with a bin of `granularity` tokens. The predictor is emulated
by its accuracy here; the true length comes from a trace or from the client's max_tokens.
"""

from random import Random
from typing import NamedTuple

PAPER_ACCURACY = {100: 0.589, 200: 0.749, 400: 0.85}
"""Accuracy of the paper's classifier (fine-tuned OPT-125M) by granularity in tokens."""
DEFAULT_GRANULARITY = 200
"""Width of a bin in tokens that the paper chose."""


class PredictedLength(NamedTuple):
    """Predicted number of output tokens of a request: [lower, upper)."""

    lower: int
    """Least number of tokens; decisions about memory and interference use it, at least 1."""
    upper: int

    @property
    def num_tokens(self) -> int:
        """Number of tokens to plan with: the lower end, at least 1."""
        return max(1, self.lower)


def length_bin(num_tokens: int, granularity: int) -> PredictedLength:
    """Return the bin of a length: [kG, (k + 1) G) with k = floor(num_tokens / G)."""
    lower = num_tokens // granularity * granularity
    return PredictedLength(lower, lower + granularity)


class OracleLengthPredictor:
    """Predictor that knows the exact length."""

    def predict(self, num_output_tokens: int) -> PredictedLength:
        """Return the exact length.

        Args:
            num_output_tokens: true length of the output.
        """
        return PredictedLength(num_output_tokens, num_output_tokens + 1)


class NoisyLengthPredictor:
    """Predictor that names the right bin with a given probability, and another one otherwise."""

    def __init__(
        self,
        rng: Random,
        granularity: int = DEFAULT_GRANULARITY,
        accuracy: float | None = None,
        max_tokens: int = 2048,
    ) -> None:
        """Create a predictor.

        Args:
            rng: source of the errors.
            granularity: width of a bin in tokens.
            accuracy: probability of the right bin; default: the paper's for this granularity.
            max_tokens: longest output; wrong bins are drawn uniformly from those below it.

        Raises:
            ValueError: there are no two bins, or the accuracy is unknown or no probability.
        """
        if granularity < 1:
            raise ValueError(f"granularity is {granularity}, but has to be at least 1")
        if max_tokens <= granularity:
            raise ValueError(
                f"max_tokens is {max_tokens}, but has to exceed granularity ({granularity}), so "
                "that there are bins to confuse"
            )
        if accuracy is None:
            if granularity not in PAPER_ACCURACY:
                raise ValueError(
                    f"accuracy has to be given for granularity {granularity}: it is known for "
                    f"{', '.join(map(str, PAPER_ACCURACY))} only"
                )
            accuracy = PAPER_ACCURACY[granularity]
        if not 0 <= accuracy <= 1:
            raise ValueError(f"accuracy is {accuracy}, but has to be in [0, 1]")
        self._rng = rng
        self._granularity = granularity
        self._accuracy = accuracy
        self._num_bins = -(-max_tokens // granularity)

    def predict(self, num_output_tokens: int) -> PredictedLength:
        """Return the right bin, or a random other one.

        Args:
            num_output_tokens: true length of the output.
        """
        right = length_bin(num_output_tokens, self._granularity)
        if self._rng.random() < self._accuracy:
            return right
        index = right.lower // self._granularity
        num_bins = max(self._num_bins, index + 1)
        wrong = self._rng.randrange(num_bins - 1)
        return length_bin((wrong + (wrong >= index)) * self._granularity, self._granularity)
