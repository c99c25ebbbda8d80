"""Times of steps on their way to a policy that learns from them.

Owns the steps whose times are not complete yet. Knows nothing of what is learnt.
"""

from gllm.scheduler.plan import StepPlan, StepTime
from gllm.scheduler.policy import SchedulingPolicy
from gllm.scheduler.stage_work import StageWork, compute_stage_work

MAX_PENDING_STEPS = 4096
"""Steps remembered while stages are silent; the oldest are forgotten first."""


class StepTimeCollector:
    """Joins what the stages report of a step; without a policy that learns it does nothing."""

    def __init__(self, policy: SchedulingPolicy, stages: int) -> None:
        self._policy = policy
        self._stages = stages
        self._pending: dict[int, tuple[StageWork, list[float]]] = {}

    def expect(self, plan: StepPlan) -> None:
        """A step that stages will report."""
        if not self._policy.learns:
            return
        self._pending[plan.step] = compute_stage_work(plan.step, plan.rows), []
        if len(self._pending) > MAX_PENDING_STEPS:
            del self._pending[next(iter(self._pending))]

    def hear(self, time: StepTime) -> None:
        """A stage's report; the last one of a step brings it to the policy."""
        if time.step not in self._pending:
            return
        work, seconds = self._pending[time.step]
        seconds.append(time.end - time.start)
        if len(seconds) == self._stages:
            del self._pending[time.step]
            self._policy.observe(work, max(seconds))
