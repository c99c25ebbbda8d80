"""What the simulator asks of a cost model.

Owns the contract. A cost model is one file of this folder; it sees the work of a micro-batch, never
the policy that chose it.
"""

from typing import Protocol

from gllm.scheduler.stage_work import StageWork


class CostModel(Protocol):
    """Seconds that a pipeline takes. Raises ValueError for work outside of what it was made for."""

    def stage_seconds(self, stage: int, work: StageWork) -> float:
        """A stage computes a micro-batch; it does nothing else meanwhile."""

    def link_seconds(self, stage: int, work: StageWork) -> float:
        """The activations travel from `stage` to the next one; links carry one at a time."""

    def plan_seconds(self, work: StageWork) -> float:
        """From the schedule until the first stage has its inputs, computing beside it."""

    def sample_seconds(self, work: StageWork) -> float:
        """From the stage's end until a step that needs its tokens can begin; one stage only."""

    def return_seconds(self, work: StageWork) -> float:
        """From the last stage's end until the driver commits: sampling and the way back."""
