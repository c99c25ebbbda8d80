"""Expected output lengths, learned from sequences that have ended.

Requests with a similar `max_tokens` (the same power of two) tend to come from the same client, so
each such class has a history of its own.
"""

from bisect import bisect_right, insort
from collections import deque
from itertools import accumulate

WINDOW = 64
"""Ended sequences that a class remembers."""


class _History:
    """Output lengths of one class, the newest WINDOW of them."""

    def __init__(self) -> None:
        self._recent: deque[int] = deque(maxlen=WINDOW)
        self._sorted: list[int] = []
        self._sums: list[int] = []
        """Sums of the longest 0, 1, 2, ... lengths; empty if outdated."""

    def record(self, length: int) -> None:
        """Add the length of an ended sequence, in place of the oldest once the window is full."""
        if len(self._recent) == WINDOW:
            del self._sorted[bisect_right(self._sorted, self._recent[0]) - 1]
        self._recent.append(length)
        insort(self._sorted, length)
        self._sums = []

    def mean_above(self, length: int) -> float:
        """Return the mean of the lengths above this one; 0 if there are none."""
        count = len(self._sorted) - bisect_right(self._sorted, length)
        if not self._sums:
            self._sums = [0, *accumulate(reversed(self._sorted))]
        return self._sums[count] / count if count else 0.0


class OutputLengths:
    """Expected tokens of outputs. prior: of a request unlike all that have ended."""

    def __init__(self, prior: int) -> None:
        self._prior = prior
        self._histories: dict[int, _History] = {}

    def record(self, max_tokens: int, length: int) -> None:
        """Learn from a sequence that ended by itself after `length` tokens."""
        self._histories.setdefault(max_tokens.bit_length(), _History()).record(length)

    def expected(self, max_tokens: int, generated: int) -> int:
        """Return the expected length of an output of which `generated` tokens exist.

        The mean of the earlier outputs that were longer. An output longer than all of them is
        expected to double.
        """
        history = self._histories.get(max_tokens.bit_length())
        if history is not None:
            expected = round(history.mean_above(generated))
        else:
            expected = self._prior if generated < self._prior else 0
        return min(max_tokens, expected or max(2 * generated, 1))
