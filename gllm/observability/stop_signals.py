"""Signals that end a process that serves: the first one drains, a second one ends it at once."""

import signal
from enum import Enum

REPEAT_SECONDS = 1.0
"""Time in which a further SIGTERM is the same request to end, by another path."""


class StopAction(Enum):
    """Reaction of a process to a signal."""

    DRAIN = "drain"
    """Finish the running requests, then end."""
    IGNORE = "ignore"
    KILL = "kill"
    """End at once."""


class StopSignals:
    """Decides how a process reacts to SIGTERM and SIGINT.

    A cluster manager that signals all processes of a job reaches each process directly, and again
    through the parent that passes the signal on: two SIGTERM within a moment are one request.
    """

    def __init__(self, repeat_seconds: float = REPEAT_SECONDS) -> None:
        """Create the state of a process that has got no signal.

        Args:
            repeat_seconds: time after the first signal in which SIGTERM is a repetition.
        """
        self._repeat_seconds = repeat_seconds
        self._first_at: float | None = None

    def on_signal(self, number: int, now: float) -> StopAction:
        """Handle a signal at a time in seconds; return the reaction."""
        if self._first_at is None:
            self._first_at = now
            return StopAction.DRAIN
        is_repeated = number == signal.SIGTERM and now < self._first_at + self._repeat_seconds
        return StopAction.IGNORE if is_repeated else StopAction.KILL
