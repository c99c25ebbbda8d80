"""Collect the step times of all stages for a policy that learns from them."""

from gllm.scheduler.plan import StepPlan, StepTime
from gllm.scheduler.policy import SchedulingPolicy
from gllm.scheduler.stage_work import StageWork, compute_stage_work

MAX_PENDING_STEPS = 4096
"""Steps kept while their stages do not report; the oldest is dropped first."""


class StepTimeCollector:
    """Joins the stages' reports on a step; does nothing for a policy that does not learn."""

    def __init__(self, policy: SchedulingPolicy, stages: int) -> None:
        self._policy = policy
        self._stages = stages
        self._pending: dict[int, tuple[StageWork, list[float]]] = {}

    def on_scheduled(self, plan: StepPlan) -> None:
        """Remember the work of a step that the stages will report."""
        if not self._policy.learns_step_times:
            return
        self._pending[plan.step] = compute_stage_work(plan.step, plan.rows), []
        if len(self._pending) > MAX_PENDING_STEPS:
            del self._pending[next(iter(self._pending))]

    def on_stage_time(self, time: StepTime) -> None:
        """Record a stage's report; the last one of a step informs the policy."""
        if time.step not in self._pending:
            return
        work, seconds = self._pending[time.step]
        seconds.append(time.end - time.start)
        if len(seconds) == self._stages:
            del self._pending[time.step]
            self._policy.observe_step(work, max(seconds))
