"""Delays between attempts to dial a peer."""

from random import Random

FIRST_SECONDS = 0.2
MAX_SECONDS = 5.0
REFUSED_SECONDS = 10.0
"""Delay after a peer has refused the session: it would do so again."""


class Backoff:
    """Delays that double up to a limit, with jitter so that peers do not dial in step."""

    def __init__(self, rng: Random, refused_seconds: float = REFUSED_SECONDS) -> None:
        """Create delays that begin with the shortest one.

        Args:
            rng: source of the jitter.
            refused_seconds: delay after a refusal.
        """
        self._rng = rng
        self._refused_seconds = refused_seconds
        self._seconds = FIRST_SECONDS

    def next_delay(self) -> float:
        """Return the delay before the next attempt, in seconds."""
        seconds = self._seconds
        self._seconds = min(2 * seconds, MAX_SECONDS)
        return seconds * self._rng.uniform(0.5, 1.0)

    def refused_delay(self) -> float:
        """Return the delay before the next attempt after a refusal, in seconds."""
        return self._refused_seconds * self._rng.uniform(0.5, 1.0)

    def reset(self) -> None:
        """Start again with the shortest delay."""
        self._seconds = FIRST_SECONDS
