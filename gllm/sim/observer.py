"""Observers of a simulated pipeline, which record its events or react to them."""

from gllm.scheduler.plan import StepOutput, StepPlan
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import StageWork


class PipelineObserver:
    """Receiver of a pipeline's events, in order of time; the base class ignores all of them.

    Times are seconds of the simulation.
    """

    def on_added(self, request: SchedulerRequest, now: float) -> None:
        """Note a request that the scheduler has accepted."""

    def on_aborted(self, seqs: list[int], now: float) -> None:
        """Note sequences that end without further output."""

    def on_scheduled(
        self,
        plan: StepPlan | None,
        work: StageWork | None,
        parallelism: int,
        kv_usage: float,
        now: float,
    ) -> None:
        """Note a call of the scheduler.

        Args:
            plan: Its plan; None if nothing can run.
            work: The plan's work.
            parallelism: Number of stages that the available work could keep busy after the call.
            kv_usage: Share of KV blocks that sequences hold after the call, 0..1.
            now: Time of the call.
        """

    def on_stage_finished(self, stage: int, step: int, start: float, end: float) -> None:
        """Note the end of a step's computation on a stage."""

    def on_committed(self, plan: StepPlan, output: StepOutput, now: float) -> None:
        """Note the commit of a step and its outputs."""
