"""Every stage takes the same time for every micro-batch: for theory and tests.

Owns nothing but the constants.
"""

from gllm.scheduler.stage_work import StageWork


class ConstantCostModel:
    """`stage` and `link` in seconds."""

    def __init__(self, stage: float, link: float = 0.0) -> None:
        self._stage = stage
        self._link = link

    def stage_seconds(self, stage: int, work: StageWork) -> float:
        """Return the constant stage time."""
        return self._stage

    def link_seconds(self, stage: int, work: StageWork) -> float:
        """Return the constant link time."""
        return self._link

    def plan_seconds(self, work: StageWork) -> float:
        """Nothing."""
        return 0.0

    def sample_seconds(self, work: StageWork) -> float:
        """Nothing."""
        return 0.0

    def return_seconds(self, work: StageWork) -> float:
        """Nothing."""
        return 0.0
