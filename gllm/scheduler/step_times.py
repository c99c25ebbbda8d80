"""Collect the step times of all stages for a policy that learns from them, and for reports."""

from collections.abc import Callable

from gllm.scheduler.plan import StepPlan, StepTime
from gllm.scheduler.stage_work import StageWork, compute_stage_work
from gllm.scheduler.step_cost import OnlineStepCostFit, StepCostCoefficients

MAX_PENDING_STEPS = 4096
"""Steps kept while their stages do not report; the oldest is dropped first."""
REPORTED_STEP_INTERVAL = 7
"""Every seventh step counts for the reported cost of steps. The number has no common divisor with
usual numbers of stages, so that all kinds of alternating micro-batches are among them."""


class StepTimeCollector:
    """Joins the stages' reports on a step.

    Args:
        observe: called with the work of each step and the time of its slowest stage; None if
            nothing learns from them.
        stages: number of pipeline stages.
    """

    def __init__(self, observe: Callable[[StageWork, float], None] | None, stages: int) -> None:
        self._observe = observe
        self._stages = stages
        self._pending: dict[int, tuple[StageWork, list[float]]] = {}

    def on_scheduled(self, plan: StepPlan) -> None:
        """Remember the work of a step that the stages will report."""
        if self._observe is None:
            return
        self._pending[plan.step] = compute_stage_work(plan.step, plan.rows), []
        if len(self._pending) > MAX_PENDING_STEPS:
            del self._pending[next(iter(self._pending))]

    def on_stage_time(self, time: StepTime) -> None:
        """Record a stage's report; the last one of a step completes the step."""
        if self._observe is None or time.step not in self._pending:
            return
        work, seconds = self._pending[time.step]
        seconds.append(time.end - time.start)
        if len(seconds) == self._stages:
            del self._pending[time.step]
            self._observe(work, max(seconds))


class StepCostMeter:
    """Fit of the step cost to a part of all steps, for routers that predict latencies.

    Unlike a policy's own fit it decides nothing, so it may leave steps out to save time.
    """

    def __init__(self, stages: int) -> None:
        self._fit = OnlineStepCostFit()
        self._collector = StepTimeCollector(self._fit.observe_step, stages)
        self._reported: StepCostCoefficients | None = None

    def on_scheduled(self, plan: StepPlan) -> None:
        """Remember the work of a step, if it counts."""
        if plan.step % REPORTED_STEP_INTERVAL == 0:
            self._collector.on_scheduled(plan)

    def on_stage_times(self, times: list[StepTime]) -> StepCostCoefficients | None:
        """Record a stage's report; return the coefficients if they were fitted anew."""
        for time in times:
            if time.step % REPORTED_STEP_INTERVAL == 0:
                self._collector.on_stage_time(time)
        if self._fit.coefficients is self._reported:
            return None
        self._reported = self._fit.coefficients
        return self._reported
