"""Times at which a state that lasts too long is logged."""

WARN_SECONDS = 30.0
"""Time after which a state is worth a warning."""
REPEAT_SECONDS = 300.0
"""Time between two warnings about the same state."""


class OverdueWatch:
    """Decides when a state is logged that should have ended. Time is an argument."""

    def __init__(self) -> None:
        self._due_at: float | None = None
        """Time of the next warning; None while all is well."""

    def should_warn(self, is_well: bool, now: float) -> bool:
        """Return True if a warning is due.

        Args:
            is_well: False while the state lasts.
            now: time in seconds.
        """
        if is_well:
            self._due_at = None
            return False
        if self._due_at is None:
            self._due_at = now + WARN_SECONDS
        if now < self._due_at:
            return False
        self._due_at = now + REPEAT_SECONDS
        return True
