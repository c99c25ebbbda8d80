"""Bubbles: time in which a stage of a pipeline is idle though work is at hand.

Owns their definition, for a run read off its step log and for one that goes on. Knows no clock and
nothing of who computes: times are given, in seconds.

At any moment the work at hand could keep some number of stages busy, however it is cut
(`Scheduler.available_parallelism`). What is missing to that number is bubble, shared by the idle
stages.
"""

import heapq
from collections.abc import Iterable
from itertools import count
from typing import NamedTuple

from gllm.scheduler.plan import StepTime


class ActivityChange(NamedTuple):
    """From `time` on a stage computes `value` steps more, or less; or the work at hand could keep
    `value` stages busy."""

    time: float
    stage: int | None
    """None for the latter."""
    value: int


class Interval(NamedTuple):
    """A stretch of time in which nothing changed."""

    begin: float
    end: float
    busy: tuple[int, ...]
    """Stages that computed."""
    idle: tuple[int, ...]
    """The others."""
    parallelism: int
    """Stages that the work at hand could keep busy, whatever the plans were."""

    @property
    def bubble_share(self) -> float:
        """Of an idle stage's time, 0..1."""
        missing = max(0, self.parallelism - len(self.busy))
        return missing / len(self.idle) if self.idle else 0.0


class IntervalSweep:
    """Cuts time into spells, from `begin` on, while changes come in their order."""

    def __init__(self, stages: int, begin: float) -> None:
        self._now = begin
        self._running = [0] * stages
        self._wanted = 0

    def advance(self, time: float) -> Interval | None:
        """The interval from the last one's end to `time`; None where that is over already."""
        if time <= self._now:
            return None
        busy = tuple(stage for stage, steps in enumerate(self._running) if steps)
        idle = tuple(stage for stage, steps in enumerate(self._running) if not steps)
        interval = Interval(self._now, time, busy, idle, self._wanted)
        self._now = time
        return interval

    def apply(self, change: ActivityChange) -> None:
        """Things stand otherwise behind the last interval."""
        if change.stage is None:
            self._wanted = change.value
        else:
            self._running[change.stage] += change.value


class BubbleMeter:
    """Adds bubbles up while a pipeline runs.

    Stages tell of their steps late, so a moment counts when all have told what they did until then.
    """

    def __init__(self, stages: int, begin: float) -> None:
        self.seconds = [0.0] * stages
        """What each stage lost."""
        self.work_seconds = 0.0
        """Time in which there was work for at least one stage."""
        self._sweep = IntervalSweep(stages, begin)
        self._told = [begin] * stages
        self._order = count()
        self._changes: list[tuple[float, int, ActivityChange]] = []
        """To come; a heap by time and who came first."""
        self._wanted = 0

    def record_parallelism(self, time: float, stages: int) -> None:
        """From `time` on the work at hand could keep so many stages busy."""
        if stages != self._wanted:
            self._wanted = stages
            self._push(ActivityChange(time, None, stages))

    def record_steps(self, stage: int, steps: Iterable[StepTime], until: float) -> None:
        """A stage tells of `steps`, and with them of all that it began before `until`."""
        for _, start, end in steps:
            self._push(ActivityChange(start, stage, 1))
            self._push(ActivityChange(end, stage, -1))
        self._told[stage] = until
        self._advance(min(self._told))

    def _push(self, change: ActivityChange) -> None:
        heapq.heappush(self._changes, (change.time, next(self._order), change))

    def _advance(self, until: float) -> None:
        while self._changes and self._changes[0][0] <= until:
            time, _, change = heapq.heappop(self._changes)
            self._count(time)
            self._sweep.apply(change)
        self._count(until)

    def _count(self, time: float) -> None:
        interval = self._sweep.advance(time)
        if interval is None or not interval.parallelism:
            return
        seconds = interval.end - interval.begin
        self.work_seconds += seconds
        for stage in interval.idle:
            self.seconds[stage] += seconds * interval.bubble_share
