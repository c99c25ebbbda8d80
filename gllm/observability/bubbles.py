"""Pipeline bubbles: time in which a stage is idle although work is available.

Used for finished runs, read from a step log, and for running pipelines. Times are arguments, in
seconds.

At any time the available work could keep some number of stages busy, however it is divided into
micro-batches (`Scheduler.available_parallelism`). The difference between that number and the number
of busy stages is bubble; the idle stages share it equally.
"""

import heapq
from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

from gllm.scheduler.plan import StepTime


class ActivityChange(NamedTuple):
    """Change of a stage's activity, or of the parallelism of the available work."""

    time: float
    stage: int | None
    """The stage; None for a change of the parallelism."""
    value: int
    """Number of steps that the stage starts (or ends, if negative); the new parallelism."""


class Interval(NamedTuple):
    """Interval of time in which neither activity nor parallelism changes."""

    begin: float
    end: float
    busy: tuple[int, ...]
    """Stages that compute."""
    idle: tuple[int, ...]
    """The other stages."""
    parallelism: int
    """Number of stages that the available work could keep busy."""

    @property
    def bubble_share(self) -> float:
        """Share of an idle stage's time that is bubble, 0..1."""
        missing = max(0, self.parallelism - len(self.busy))
        return missing / len(self.idle) if self.idle else 0.0


class IntervalSweep:
    """Divides time into intervals, from `begin` on; changes are applied in order of time."""

    def __init__(self, stages: int, begin: float) -> None:
        self._now = begin
        self._running = [0] * stages
        self._parallelism = 0

    def advance(self, time: float) -> Interval | None:
        """Return the interval from the end of the last one to `time`, or None if it is empty."""
        if time <= self._now:
            return None
        busy = tuple(stage for stage, steps in enumerate(self._running) if steps)
        idle = tuple(stage for stage, steps in enumerate(self._running) if not steps)
        interval = Interval(self._now, time, busy, idle, self._parallelism)
        self._now = time
        return interval

    def apply(self, change: ActivityChange) -> None:
        """Apply a change at the end of the last interval."""
        if change.stage is None:
            self._parallelism = change.value
        else:
            self._running[change.stage] += change.value


class BubbleMeter:
    """Sums the bubbles of a running pipeline.

    Stages report their steps late, so a time is counted once all stages have reported up to it.
    """

    def __init__(self, stages: int, begin: float) -> None:
        self.seconds = [0.0] * stages
        """Bubble of each stage."""
        self.work_seconds = 0.0
        """Time in which there was work for at least one stage."""
        self._sweep = IntervalSweep(stages, begin)
        self._reported_until = [begin] * stages
        self._order = count()
        self._changes: list[tuple[float, int, ActivityChange]] = []
        """Changes that have not been applied: a heap by time and order of arrival."""
        self._parallelism = 0

    def record_parallelism(self, time: float, stages: int) -> None:
        """Record that from `time` on the available work could keep `stages` stages busy."""
        if stages != self._parallelism:
            self._parallelism = stages
            self._push(ActivityChange(time, None, stages))

    def record_steps(self, stage: int, steps: Iterable[StepTime], until: float) -> None:
        """Record the steps of a stage: all steps it has started before `until`."""
        for _, start, end in steps:
            self._push(ActivityChange(start, stage, 1))
            self._push(ActivityChange(end, stage, -1))
        self._reported_until[stage] = until
        self._advance(min(self._reported_until))

    def _push(self, change: ActivityChange) -> None:
        heapq.heappush(self._changes, (change.time, next(self._order), change))

    def _advance(self, until: float) -> None:
        while self._changes and self._changes[0][0] <= until:
            time, _, change = heapq.heappop(self._changes)
            self._add_interval(time)
            self._sweep.apply(change)
        self._add_interval(until)

    def _add_interval(self, until: float) -> None:
        interval = self._sweep.advance(until)
        if interval is None or not interval.parallelism:
            return
        seconds = interval.end - interval.begin
        self.work_seconds += seconds
        for stage in interval.idle:
            self.seconds[stage] += seconds * interval.bubble_share
