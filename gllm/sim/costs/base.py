"""Interface of the simulator's cost models.

A cost model is one file of this folder. It sees the work of a micro-batch, never the policy.
"""

from typing import Protocol

from gllm.scheduler.stage_work import StageWork


class CostModel(Protocol):
    """Predictor of a pipeline's times in seconds; raises ValueError for work out of its range."""

    def stage_seconds(self, stage: int, work: StageWork) -> float:
        """Return the time in which a stage computes a micro-batch."""

    def link_seconds(self, stage: int, work: StageWork) -> float:
        """Return the time of the activations' transfer from `stage` to the next one."""

    def plan_seconds(self, work: StageWork) -> float:
        """Return the time from the schedule until the first stage has its inputs."""

    def sample_seconds(self, work: StageWork) -> float:
        """Return the time from a single stage's end until its tokens can be used."""

    def return_seconds(self, work: StageWork) -> float:
        """Return the time from the last stage's end until the commit: sampling and transfer."""
