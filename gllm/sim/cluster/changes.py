"""Planned and unplanned changes of a cluster: engines that fail, drain or start."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gllm.sim.deployment import Deployment


@dataclass(frozen=True)
class EngineFailure:
    """Death of an engine with everything on it. An engine that does not run is not affected.

    Raises:
        ValueError: A time is negative.
    """

    engine: str
    time: float
    """Seconds."""
    detection_seconds: float = 0.0
    """Time until the router knows. Until then it may send requests to the engine; these and the
    unfinished ones are routed again with their output so far once it knows."""
    restart_seconds: float | None = None
    """Time from the detection until the engine, started again with an empty cache, is ready. None:
    it does not return."""

    def __post_init__(self) -> None:
        """Check the times."""
        _check_seconds(self, "time", "detection_seconds", "restart_seconds")


@dataclass(frozen=True)
class EngineDrain:
    """Planned end of an engine: it gets no new requests and ends once it is empty.

    Raises:
        ValueError: The time is negative.
    """

    engine: str
    time: float
    """Seconds."""
    migrates: bool = False
    """Route the engine's unfinished requests again at once, with their output so far."""

    def __post_init__(self) -> None:
        """Check the times."""
        _check_seconds(self, "time")


@dataclass(frozen=True)
class EngineStart:
    """Start of an engine, new or after its end.

    Raises:
        ValueError: A time is negative.
    """

    engine: str
    time: float
    """Seconds."""
    startup_seconds: float = 0.0
    """Time from the start until the engine takes requests."""
    deployment: Deployment | None = None
    """None for an engine that has run before, as it was."""

    def __post_init__(self) -> None:
        """Check the times."""
        _check_seconds(self, "time", "startup_seconds")


ClusterChange = EngineFailure | EngineDrain | EngineStart


def _check_seconds(change: object, *fields: str) -> None:
    """Check that times are numbers of at least 0. None is permitted where a type permits it."""
    for field in fields:
        seconds = getattr(change, field)
        if seconds is not None and not 0 <= seconds < float("inf"):
            raise ValueError(
                f"{type(change).__name__}: {field} is {seconds}, but must be at least 0 seconds"
            )


def sort_changes(engines: Iterable[str], changes: Iterable[ClusterChange]) -> list[ClusterChange]:
    """Return changes in order of time; those of one time keep their order.

    Args:
        engines: Names of the engines at the beginning.
        changes: The changes.

    Raises:
        ValueError: A change names an engine that does not exist by then.
    """
    ordered: Sequence[ClusterChange] = sorted(changes, key=lambda change: change.time)
    known = set(engines)
    for change in ordered:
        if isinstance(change, EngineStart) and change.deployment is not None:
            known.add(change.engine)
        if change.engine not in known:
            names = ", ".join(sorted(known)) or "none"
            raise ValueError(
                f"{type(change).__name__} at {change.time} s: engine {change.engine!r} is none of "
                f"{names}: start it earlier with a deployment"
            )
    return list(ordered)
