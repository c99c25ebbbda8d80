"""Cost model of a replay: every step takes the time that it took in the recorded run."""

from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import BaseCostModel, TransferCost
from gllm.sim.metrics.run_record import RunRecord
from gllm.sim.metrics.step_costs import StepCosts, measure_step_costs


class RecordedCostModel(BaseCostModel):
    """Costs of a run whose steps come again in the same order, counted from 0.

    A step beyond the recording takes as long as its last one.
    """

    def __init__(self, run: RunRecord) -> None:
        """Read the step times of a run.

        Raises:
            ValueError: The run has no complete steps.
        """
        self._costs = list(measure_step_costs(run))
        if not self._costs:
            raise ValueError("the run has no step whose times are all there")

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """As recorded."""
        return self._at(work).stage_seconds[stage]

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the recorded time; nothing where the next stage was busy: it did not matter."""
        return TransferCost(self._at(work).link_seconds[stage] or 0.0)

    def plan_seconds(self, work: StageWork) -> float:
        """As recorded; nothing where the first stage was busy."""
        return self._at(work).plan_seconds or 0.0

    def return_seconds(self, work: StageWork) -> float:
        """As recorded."""
        return self._at(work).return_seconds

    def _at(self, work: StageWork) -> StepCosts:
        return self._costs[min(work.step, len(self._costs) - 1)]
