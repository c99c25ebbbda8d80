"""Cost model that learns the step costs which an engine of production reports to its router."""

from gllm.scheduler.stage_work import StageWork
from gllm.scheduler.step_cost import OnlineStepCostFit
from gllm.sim.costs.base import CostModel, DelegatingCostModel


class MeteredCostModel(DelegatingCostModel):
    """A cost model whose predicted steps are fitted, as an engine fits its measured ones."""

    def __init__(self, cost: CostModel, num_stages: int) -> None:
        super().__init__(cost)
        self.fit = OnlineStepCostFit()
        self._num_stages = num_stages
        self._slowest: dict[int, float] = {}
        """Time of the slowest stage so far, of each step that has not passed all stages."""

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the time of the other model."""
        seconds = super().stage_seconds(stage, work, now)
        slowest = max(seconds, self._slowest.pop(work.step, 0.0))
        if stage < self._num_stages - 1:
            self._slowest[work.step] = slowest
        else:
            self.fit.observe_step(work, slowest)
        return seconds
