"""Costs on a machine whose speed changes, because other programs share it."""

from bisect import bisect
from collections.abc import Sequence
from typing import NamedTuple

from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import CostModel, DelegatingCostModel


class SpeedWindow(NamedTuple):
    """Part of a run with one speed."""

    begin: float
    """In seconds; the window ends where the next one begins."""
    factor: float
    """Time of a step per time that the cost model says, above 0."""


class MachineSpeedCostModel(DelegatingCostModel):
    """Another cost model on a machine whose speed changes over time.

    Times of steps, and of the driver and the sampler after them, are multiplied by the factor of
    the window in which the step begins. Times of links are not changed.

    Args:
        cost: Costs at a factor of 1.
        windows: In order of time; the factor of the first one also holds before it begins.

    Raises:
        ValueError: There is no window, or a factor is not above 0.
    """

    def __init__(self, cost: CostModel, windows: Sequence[SpeedWindow]) -> None:
        super().__init__(cost)
        if not windows:
            raise ValueError("windows is empty: give at least one")
        for window in windows:
            if not window.factor > 0:
                raise ValueError(f"a window's factor is {window.factor}: it has to be above 0")
        self._windows = windows
        self._factor = windows[0].factor

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the time of the other model, multiplied by the factor at that time."""
        after = bisect(self._windows, now, key=lambda window: window.begin)
        self._factor = self._windows[max(0, after - 1)].factor
        return self._factor * super().stage_seconds(stage, work, now)

    def plan_seconds(self, work: StageWork) -> float:
        """Return the time of the other model, multiplied by the factor of the last step."""
        return self._factor * super().plan_seconds(work)

    def sample_seconds(self, work: StageWork) -> float:
        """Return the time of the other model, multiplied by the factor of the last step."""
        return self._factor * super().sample_seconds(work)

    def return_seconds(self, work: StageWork) -> float:
        """Return the time of the other model, multiplied by the factor of the last step."""
        return self._factor * super().return_seconds(work)
