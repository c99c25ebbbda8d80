"""Predict output lengths from the outputs of finished sequences.

Requests with a similar `max_tokens` (the same power of two) tend to come from the same client.
Each such class therefore has its own history.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import accumulate

OutputLengths = Mapping[int, Iterable[int]]
"""Lengths of the last outputs in tokens, the oldest first, by class: the number of bits of
`max_tokens`."""

HISTORY_LENGTH = 64
"""Number of finished sequences in the history of a class."""


class OutputHistory:
    """Output lengths of the last `size` finished sequences of one class, in tokens."""

    def __init__(self, size: int = HISTORY_LENGTH) -> None:
        self.recent: deque[int] = deque(maxlen=size)
        self._sorted: list[int] = []
        self._sums: list[int] = []
        """Sums of the 0, 1, 2, ... longest lengths; empty if they have to be recomputed."""

    def record(self, length: int) -> None:
        """Add the output length of a finished sequence; drop the oldest if the window is full."""
        if len(self.recent) == self.recent.maxlen:
            del self._sorted[bisect_right(self._sorted, self.recent[0]) - 1]
        self.recent.append(length)
        insort(self._sorted, length)
        self._sums = []

    def mean_above(self, length: int) -> float:
        """Return the mean of all lengths greater than `length`; 0 if there are none."""
        count = len(self._sorted) - bisect_right(self._sorted, length)
        if not self._sums:
            self._sums = [0, *accumulate(reversed(self._sorted))]
        return self._sums[count] / count if count else 0.0


class OutputLengthPredictor:
    """Predictor of output lengths, from those of finished sequences.

    Args:
        prior: expected output tokens of a request whose class has no history.
        recent: lengths to begin with, `recent_lengths` of an earlier predictor.
    """

    def __init__(self, prior: int, recent: OutputLengths | None = None) -> None:
        self._prior = prior
        self._histories: dict[int, OutputHistory] = {}
        for key, lengths in (recent or {}).items():
            history = self._histories[key] = OutputHistory()
            for length in lengths:
                history.record(length)

    @property
    def recent_lengths(self) -> dict[int, list[int]]:
        """Lengths of the last outputs by class: all that the predictions depend on."""
        return {key: list(history.recent) for key, history in self._histories.items()}

    def record(self, max_tokens: int, length: int) -> None:
        """Add a sequence that finished after `length` output tokens, neither aborted nor failed."""
        self._histories.setdefault(max_tokens.bit_length(), OutputHistory()).record(length)

    def has_history(self, max_tokens: int) -> bool:
        """Return True if outputs of the class of a limit have been recorded."""
        return max_tokens.bit_length() in self._histories

    def predict(self, max_tokens: int, generated: int) -> int:
        """Return the expected final length of an output, in tokens; at most `max_tokens`.

        It is the mean of the recorded lengths greater than `generated`. An output longer than all
        of them is expected to double.

        Args:
            max_tokens: limit of the request, which determines its class.
            generated: output tokens so far.
        """
        history = self._histories.get(max_tokens.bit_length())
        if history is not None:
            expected = round(history.mean_above(generated))
        else:
            expected = self._prior if generated < self._prior else 0
        return min(max_tokens, expected or max(2 * generated, 1))
