"""Delays between attempts to reach a peer, or to start a process again."""

from random import Random

FIRST_SECONDS = 0.2
MAX_SECONDS = 5.0
REFUSED_SECONDS = 10.0
"""Delay after a peer has refused the session: it would do so again."""


def backoff_seconds(num_failures: int, first_seconds: float, max_seconds: float = 60.0) -> float:
    """Return a retry delay that doubles with each failure, up to a limit.

    Args:
        num_failures: earlier failures in a row.
        first_seconds: delay without earlier failures.
        max_seconds: longest delay.
    """
    return min(first_seconds * 2.0 ** min(num_failures, 64), max_seconds)


class FailureLog:
    """Decides which failures in a row are warnings: another cause at once, the same now and then.

    Args:
        seconds: least time between two warnings of one cause.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._times: dict[str, float] = {}
        """Time of the last warning of each cause."""

    def is_due(self, cause: str, now: float) -> bool:
        """Return True if a failure has to be logged as a warning now, and record that."""
        self._times = {
            text: time for text, time in self._times.items() if now - time < self._seconds
        }
        if cause in self._times:
            return False
        self._times[cause] = now
        return True

    def reset(self) -> None:
        """Forget the failures: there was a success."""
        self._times.clear()


class Backoff:
    """Delays before reconnection attempts: exponential up to a limit, with random jitter."""

    def __init__(
        self,
        rng: Random | None = None,
        refused_seconds: float = REFUSED_SECONDS,
        first_seconds: float = FIRST_SECONDS,
        max_seconds: float = MAX_SECONDS,
    ) -> None:
        """Create delays that begin with the shortest one.

        Args:
            rng: source of the jitter; None for none.
            refused_seconds: delay after a refusal.
            first_seconds: the shortest delay.
            max_seconds: the longest delay.
        """
        self._rng = rng
        self._refused_seconds = refused_seconds
        self._first_seconds = first_seconds
        self._max_seconds = max_seconds
        self._num_failures = 0

    def next_delay(self) -> float:
        """Return the delay before the next attempt, in seconds."""
        seconds = backoff_seconds(self._num_failures, self._first_seconds, self._max_seconds)
        self._num_failures += 1
        return self._with_jitter(seconds)

    def refused_delay(self) -> float:
        """Return the delay before the next attempt after a refusal, in seconds."""
        return self._with_jitter(self._refused_seconds)

    def reset(self) -> None:
        """Start again with the shortest delay."""
        self._num_failures = 0

    def _with_jitter(self, seconds: float) -> float:
        return seconds if self._rng is None else seconds * self._rng.uniform(0.5, 1.0)
