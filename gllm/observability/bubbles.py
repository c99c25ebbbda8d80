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


class Interval(NamedTuple):
    """Time interval in which the same pipeline stages are busy and the available work is constant.

    Times are seconds.
    """

    begin: float
    end: float
    busy: tuple[int, ...]
    """Indices of the stages that compute."""
    idle: tuple[int, ...]
    """Indices of the other stages."""
    parallelism: int
    """Number of stages that the available work could keep busy."""

    @property
    def bubble_share(self) -> float:
        """Fraction (0..1) of the interval that counts as bubble for each idle stage."""
        missing = max(0, self.parallelism - len(self.busy))
        return missing / len(self.idle) if self.idle else 0.0


class IntervalSweep:
    """Splits time into intervals in which no pipeline stage starts or stops computing.

    The first interval starts at `begin`. Changes are applied in order of time.
    """

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

    def apply(self, stage: int | None, value: int) -> None:
        """Apply a change at the end of the last interval; arguments as in `BubbleTotals.apply`."""
        if stage is None:
            self._parallelism = value
        else:
            self._running[stage] += value


class BubbleTotals:
    """Busy seconds and bubble seconds (idle although work is available) of each pipeline stage.

    All idle stages have the same share of the bubbles, so one sum over time is enough for all: a
    change costs the same for any number of stages. Changes are applied in order of time.

    Args:
        stages: Number of pipeline stages.
        begin: Time in seconds from which on the totals count.
    """

    def __init__(self, stages: int, begin: float) -> None:
        self.work_seconds = 0.0
        """Time in which there was work for at least one stage."""
        self._num_stages = stages
        self._now = begin
        self.parallelism = 0
        """Number of stages that the available work can keep busy from now on."""
        self._running = [0] * stages
        """Number of steps that each stage computes."""
        self._num_busy = 0
        self._idle_bubble = 0.0
        """Bubble of a stage that is idle all the time."""
        self._busy_seconds = [0.0] * stages
        """Busy time of each stage until it became idle last."""
        self._bubble_seconds = [0.0] * stages
        """Bubble of each stage until it became busy last."""
        self._marks = [0.0] * stages
        """Per busy stage, the time at which it became busy; per idle stage, `_idle_bubble` when it
        became idle."""

    @property
    def bubble_seconds(self) -> list[float]:
        """Seconds that each stage was idle although work was available, until now."""
        return [
            seconds if running else seconds + self._idle_bubble - mark
            for seconds, running, mark in zip(
                self._bubble_seconds, self._running, self._marks, strict=True
            )
        ]

    @property
    def busy_seconds(self) -> list[float]:
        """Seconds that each stage was computing, until now."""
        return [
            seconds + self._now - mark if running else seconds
            for seconds, running, mark in zip(
                self._busy_seconds, self._running, self._marks, strict=True
            )
        ]

    def advance(self, time: float) -> None:
        """Add the time until `time` to the totals; a time in the past has no effect."""
        seconds = time - self._now
        if seconds <= 0:
            return
        self._now = time
        if self.parallelism:
            self.work_seconds += seconds
            num_idle = self._num_stages - self._num_busy
            missing = self.parallelism - self._num_busy
            if missing > 0 and num_idle:
                self._idle_bubble += seconds * (missing / num_idle)

    def apply(self, stage: int | None, value: int) -> None:
        """Apply a change at the current time: a step starts or ends, or available work changes.

        Args:
            stage: The stage; None for the available work.
            value: Number of steps that the stage starts (or ends, if negative), or the number of
                stages that the available work can keep busy.
        """
        if stage is None:
            self.parallelism = value
            return
        was_busy = self._running[stage]
        self._running[stage] += value
        if not was_busy:
            self._bubble_seconds[stage] += self._idle_bubble - self._marks[stage]
            self._marks[stage] = self._now
            self._num_busy += 1
        elif not self._running[stage]:
            self._busy_seconds[stage] += self._now - self._marks[stage]
            self._marks[stage] = self._idle_bubble
            self._num_busy -= 1


class BubbleMeter:
    """Measures the pipeline bubbles of a running engine from the step times that stages report.

    Stages report their steps late, so a time is counted once all stages have reported up to it.
    """

    def __init__(self, stages: int, begin: float) -> None:
        self.totals = BubbleTotals(stages, begin)
        """Totals up to the time that all stages have reported."""
        self._reported_until = [begin] * stages
        self._order = count()
        self._changes: list[tuple[float, int, int | None, int]] = []
        """Changes that have not been applied: a heap by time and order of arrival. Then the stage,
        or None for the parallelism, and the value."""
        self._parallelism = 0

    def record_parallelism(self, time: float, stages: int) -> None:
        """Record the number of stages that the available work can keep busy from `time` on."""
        if stages != self._parallelism:
            self._parallelism = stages
            self._push(time, None, stages)

    def record_steps(self, stage: int, steps: Iterable[StepTime], until: float) -> None:
        """Record the start and end times of all steps that a stage has started before `until`."""
        for _, start, end in steps:
            self._push(start, stage, 1)
            self._push(end, stage, -1)
        self._reported_until[stage] = until
        until = min(self._reported_until)
        while self._changes and self._changes[0][0] <= until:
            time, _, changed, value = heapq.heappop(self._changes)
            self.totals.advance(time)
            self.totals.apply(changed, value)
        self.totals.advance(until)

    def _push(self, time: float, stage: int | None, value: int) -> None:
        heapq.heappush(self._changes, (time, next(self._order), stage, value))
