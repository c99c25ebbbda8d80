"""Cost model for theory and tests: every stage takes the same time for every micro-batch."""

from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import BaseCostModel, TransferCost


class ConstantCostModel(BaseCostModel):
    """Constant times.

    Args:
        stage: Seconds of each stage per micro-batch.
        link: Seconds for which activations occupy a link.
    """

    def __init__(self, stage: float, link: float = 0.0) -> None:
        self._stage = stage
        self._link = link

    def stage_seconds(self, stage: int, work: StageWork, now: float = 0.0) -> float:
        """Return the constant stage time."""
        return self._stage

    def least_stage_seconds(self, stage: int, work: StageWork | None = None) -> float:
        """Return the constant stage time."""
        return self._stage

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the constant occupancy of the link."""
        return TransferCost(self._link)
