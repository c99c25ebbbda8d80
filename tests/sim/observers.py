"""Observers of simulated pipelines for tests."""

from gllm.scheduler.plan import StepOutput, StepPlan
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import StageWork


class SilentObserver:
    """Observer that ignores everything."""

    def on_added(self, request: SchedulerRequest, now: float) -> None:
        """Do nothing."""

    def on_aborted(self, seqs: list[int], now: float) -> None:
        """Do nothing."""

    def on_scheduled(
        self, plan: StepPlan | None, work: StageWork | None, parallelism: int, now: float
    ) -> None:
        """Do nothing."""

    def on_stage_finished(self, stage: int, step: int, start: float, end: float) -> None:
        """Do nothing."""

    def on_committed(self, plan: StepPlan, output: StepOutput, now: float) -> None:
        """Do nothing."""


class CommitTimes(SilentObserver):
    """Times of all commits in seconds."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_committed(self, plan: StepPlan, output: StepOutput, now: float) -> None:
        """Keep the time."""
        self.times.append(now)
