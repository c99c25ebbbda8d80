"""Predict output lengths from the outputs of finished sequences of the same class.

Requests with a similar `max_tokens` (the same power of two) tend to come from the same client, so
that is the class here. `gllm.routing.output_by_prompt` has classes by the prompt's length.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import accumulate

OutputLengths = Mapping[int, Iterable[int]]
"""Lengths of the last outputs in tokens, the oldest first, by class."""

HISTORY_LENGTH = 64
"""Number of finished sequences in the history of a class."""


class OutputHistory:
    """Sliding window of the output lengths of finished sequences, with the mean above a length.

    Args:
        size: number of sequences in the window.
    """

    def __init__(self, size: int = HISTORY_LENGTH) -> None:
        self.recent: deque[int] = deque(maxlen=size)
        self._sorted: list[int] = []
        self._sums: list[int] = []
        """Sums of the 0, 1, 2, ... longest lengths; empty if they have to be recomputed."""
        self._means: dict[int, float] = {}
        """Means above a length that were computed since the last record."""

    def record(self, length: int) -> None:
        """Add the output length of a finished sequence; drop the oldest if the window is full."""
        if len(self.recent) == self.recent.maxlen:
            del self._sorted[bisect_right(self._sorted, self.recent[0]) - 1]
        self.recent.append(length)
        insort(self._sorted, length)
        self._sums = []
        self._means.clear()

    def mean_above(self, length: int) -> float:
        """Return the mean of all lengths greater than `length`; 0 if there are none."""
        mean = self._means.get(length)
        if mean is None:
            mean = self._means[length] = self._compute_mean(length)
        return mean

    def _compute_mean(self, length: int) -> float:
        count = len(self._sorted) - bisect_right(self._sorted, length)
        if not self._sums:
            self._sums = [0, *accumulate(reversed(self._sorted))]
        return self._sums[count] / count if count else 0.0


class OutputClasses:
    """Sliding windows of output lengths, one per class of requests with a similar `max_tokens`.

    A request's class is the number of bits of its `max_tokens`; subclasses may define other
    classes.

    Args:
        recent: initial content of the windows: `recent_lengths` of an earlier object.
    """

    history_length = HISTORY_LENGTH

    def __init__(self, recent: OutputLengths | None = None) -> None:
        self.histories: dict[int, OutputHistory] = {}
        for key, lengths in (recent or {}).items():
            history = self.histories[key] = OutputHistory(self.history_length)
            for length in lengths:
                history.record(length)

    @staticmethod
    def class_of(num_tokens: int) -> int:
        """Return the class of a request by its size in tokens."""
        return num_tokens.bit_length()

    @property
    def recent_lengths(self) -> dict[int, list[int]]:
        """Lengths of the last outputs by class, to initialize another predictor."""
        return {key: list(history.recent) for key, history in self.histories.items()}

    def record(self, num_tokens: int, length: int) -> None:
        """Add a request that finished after `length` output tokens, neither aborted nor failed.

        Args:
            num_tokens: size of the request, which determines its class.
            length: number of its output tokens.
        """
        key = self.class_of(num_tokens)
        if key not in self.histories:
            self.histories[key] = OutputHistory(self.history_length)
        self.histories[key].record(length)


class OutputLengthPredictor(OutputClasses):
    """Predicts a request's output length from finished requests with a similar `max_tokens`.

    Args:
        prior: prediction in tokens while no similar request has finished.
        recent: initial history: `recent_lengths` of an earlier predictor.
    """

    def __init__(self, prior: int, recent: OutputLengths | None = None) -> None:
        super().__init__(recent)
        self._prior = prior

    def predict(self, max_tokens: int, generated: int) -> int:
        """Return the expected final length of an output, in tokens; at most `max_tokens`.

        It is the mean of the recorded lengths greater than `generated`. An output longer than all
        of them is expected to double.

        Args:
            max_tokens: limit of the request, which determines its class.
            generated: output tokens so far.
        """
        history = self.histories.get(self.class_of(max_tokens))
        if history is not None:
            expected = round(history.mean_above(generated))
        else:
            expected = self._prior if generated < self._prior else 0
        return min(max_tokens, expected or max(2 * generated, 1))
