"""Durations of the phases of a recovery, for logs and metrics."""

from enum import StrEnum


class RecoveryPhase(StrEnum):
    """Phase of a recovery, by what the engine waits for."""

    CLOSE = "close"
    """Until no worker has an instance of the epoch before, and each place has a process."""
    START = "start"
    """Until the new processes have imported their modules."""
    LOAD = "load"
    """Until all workers have their weights and connections."""
    ALLOCATE = "allocate"
    """Until all workers have their KV caches, with the blocks that are kept."""
    WARM_UP = "warm_up"
    """Until one token has passed through all stages."""


class PhaseTimes:
    """Durations of the phases of the running recovery, or of the last one, in seconds.

    They add up to the time from the death to the engine being ready.
    """

    def __init__(self) -> None:
        self.seconds: dict[RecoveryPhase, float] = {}
        """By phase, in the order of their first begin; a phase that is repeated counts once more.
        The running phase is not contained."""
        self._running: tuple[RecoveryPhase, float] | None = None
        """Running phase and its begin; None if no recovery runs."""

    def begin(self, now: float) -> None:
        """Begin a recovery, with its first phase."""
        self.seconds = {}
        self._running = RecoveryPhase.CLOSE, now

    def enter(self, phase: RecoveryPhase, now: float) -> None:
        """Begin another phase, unless no recovery runs: the first start has no times."""
        if self._running is not None:
            self._stop(now)
            self._running = phase, now

    def end(self, now: float) -> None:
        """End the recovery, if one runs."""
        if self._running is not None:
            self._stop(now)
            self._running = None

    def __str__(self) -> str:
        """Return the durations in words, such as `close 0.05 s, load 0.31 s`."""
        return ", ".join(
            f"{phase.replace('_', ' ')} {seconds:.2f} s" for phase, seconds in self.seconds.items()
        )

    def _stop(self, now: float) -> None:
        assert self._running is not None
        phase, since = self._running
        self.seconds[phase] = self.seconds.get(phase, 0.0) + now - since
