"""Stage that is slower for some time, as a device that throttles or shares its power."""

from math import inf

from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import CostModel, DelegatingCostModel


class SlowedCostModel(DelegatingCostModel):
    """Costs of another model while one stage is slower by a factor.

    A step that the slow period begins or ends in is slower for that part of it.

    Args:
        cost: Costs at full speed.
        stage: Number of the stage.
        factor: Time of a step in the slow period per time at full speed, above 0.
        begin_seconds: Begin of the slow period.
        end_seconds: End of the slow period.

    Raises:
        ValueError: The factor or the period is empty.
    """

    def __init__(
        self,
        cost: CostModel,
        stage: int,
        factor: float,
        begin_seconds: float = 0.0,
        end_seconds: float = inf,
    ) -> None:
        super().__init__(cost)
        if not 0 < factor < inf:
            raise ValueError(f"factor is {factor}: choose a finite number above 0")
        if begin_seconds >= end_seconds:
            raise ValueError(
                f"the slow period begins at {begin_seconds} s, but ends at {end_seconds} s: "
                "begin_seconds has to be less than end_seconds"
            )
        self._stage = stage
        self._factor = factor
        self._begin = begin_seconds
        self._end = end_seconds

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the time of the other model, longer where it lies in the slow period."""
        seconds = super().stage_seconds(stage, work, now)
        fast_seconds = max(0.0, self._begin - now)
        if stage != self._stage or now >= self._end or seconds <= fast_seconds:
            return seconds
        slow_seconds = min(
            (seconds - fast_seconds) * self._factor, self._end - max(now, self._begin)
        )
        return seconds + slow_seconds - slow_seconds / self._factor
