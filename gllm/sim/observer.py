"""Observers of a simulated pipeline, which record its events or react to them."""

from typing import NamedTuple

from gllm.scheduler.plan import StepOutput, StepPlan
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import StageWork


class SchedulerCall(NamedTuple):
    """Result of one scheduler call in a simulation: the planned batch and the load after it."""

    plan: StepPlan | None
    """The planned batch; None if nothing can run."""
    work: StageWork | None
    """Size of the batch, from which its time is predicted; None without a batch."""
    parallelism: int
    """Number of stages that the available work could keep busy after the call."""
    kv_usage: float
    """Share of KV blocks that sequences hold after the call, 0..1."""


class PipelineObserver:
    """Base class of observers of a simulated pipeline, with one callback per kind of event.

    Callbacks come in order of time and do nothing by default. Times are simulated seconds.
    """

    def on_added(self, request: SchedulerRequest, now: float) -> None:
        """Record a request that the scheduler has accepted."""

    def on_aborted(self, seqs: list[int], now: float) -> None:
        """Record sequences that end without further output."""

    def on_scheduled(self, call: SchedulerCall, now: float) -> None:
        """Record a call of the scheduler."""

    def on_stage_finished(self, stage: int, step: int, start: float, end: float) -> None:
        """Record the end of a step's computation on a stage."""

    def on_committed(self, plan: StepPlan, output: StepOutput, now: float) -> None:
        """Record the commit of a step and its outputs."""
