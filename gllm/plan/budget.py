"""Budget of a planner: seconds and evaluations. The clock is an argument."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager


class SearchBudget:
    """Limit of the time and of the number of evaluations of a search.

    A search asks before each evaluation, so that it ends in time: an evaluation is expected to take
    as long as the longest one before it.

    Args:
        seconds: Time from now on; None: no limit.
        max_evaluations: None: no limit.
        clock: Seconds of any clock that does not go back.

    Raises:
        ValueError: A limit is below 0.
    """

    def __init__(
        self,
        seconds: float | None = None,
        max_evaluations: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        for name, limit in (("seconds", seconds), ("max_evaluations", max_evaluations)):
            if limit is not None and limit < 0:
                raise ValueError(f"{name} is {limit}: give a limit of at least 0")
        self._clock = clock
        self._begin = clock()
        self._seconds = seconds
        self._max_evaluations = max_evaluations
        self._longest = 0.0
        self._last = self._begin
        self.num_evaluations = 0

    @property
    def elapsed_seconds(self) -> float:
        """Seconds since the budget was created."""
        return self._clock() - self._begin

    def refusal(self) -> str:
        """Return the limit that a further evaluation would exceed; empty within the budget."""
        limit = self._max_evaluations
        if limit is not None and self.num_evaluations >= limit:
            return f"beyond the best {limit} by closed forms"
        if self._seconds is not None and self.elapsed_seconds + self._longest > self._seconds:
            return f"the budget of {self._seconds:g} s is spent"
        return ""

    def end_evaluation(self) -> None:
        """Count an evaluation that has just ended.

        It began when the previous evaluation ended, or when the budget was created.
        """
        now = self._clock()
        self._longest = max(self._longest, now - self._last)
        self._last = now
        self.num_evaluations += 1

    @contextmanager
    def evaluation(self, count: int = 1) -> Iterator[None]:
        """Count evaluations and measure their time, as a context manager.

        Args:
            count: Number of evaluations in the block.
        """
        begin = self._clock()
        yield
        self._longest = max(self._longest, self._clock() - begin)
        self.num_evaluations += count
