"""Departure of a machine from an engine after a signal: at once, or with the engine's head."""

SETTLE_SECONDS = 2.0
"""Time in which the head begins to drain if the signal was sent to all machines of an engine."""


class Departure:
    """Decides when a machine that shall end may leave its engine.

    Slurm, a shutdown of a rack or the end of a container group sends SIGTERM to all machines at
    once. The head then drains, and its requests need the layers of the others: they stay until the
    head ends their membership. The head bounds its drain, and a head that is silent or gone ends
    the membership too. Time is an argument.
    """

    def __init__(self, settle_seconds: float = SETTLE_SECONDS) -> None:
        """Create a departure that nobody has requested.

        Args:
            settle_seconds: time after the request in which the head may begin to drain.
        """
        self._settle_seconds = settle_seconds
        self._requested_at: float | None = None

    def request(self, now: float) -> None:
        """Request the departure; a repeated request changes nothing."""
        if self._requested_at is None:
            self._requested_at = now

    def may_leave(self, now: float, has_stages: bool, engine_state: str) -> bool:
        """Return True if the machine shall leave now.

        Args:
            now: time in seconds.
            has_stages: True if the machine is a member and requests need its workers.
            engine_state: state that the head has published last.
        """
        if self._requested_at is None:
            return False
        if not has_stages:
            return True
        is_settled = now >= self._requested_at + self._settle_seconds
        return is_settled and engine_state != "draining"

    @property
    def settles_at(self) -> float:
        """Time at which `may_leave` may change without another event; only after `request`."""
        assert self._requested_at is not None
        return self._requested_at + self._settle_seconds
