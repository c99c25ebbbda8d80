"""Time that a micro-batch takes of a full pipeline, from the times of its stages and its return.

A pipeline with B micro-batches in flight completes one per longest stage time if nothing else takes
time. Between the stages there are the driver, messages, links and other processes on the same
cores. By Little's law B micro-batches in flight that each need R seconds complete one per R / B
seconds, so the interval of a step is

    max(longest stage time, (R - W) / B)

R is the time from its schedule until the driver has its result, W the part of it in which the step
is ready for a stage that computes another one. Without overhead R - W is the sum of its stage
times, of which the longest counts. On the first stage the time between two steps counts too, if the
later one was ready.
"""

from collections import deque
from collections.abc import Callable

from gllm.scheduler.plan import StepPlan, StepTime
from gllm.scheduler.stage_work import StageWork, compute_stage_work
from gllm.scheduler.step_cost import MAX_PENDING_STEPS


class _PendingStep:
    """Times of a scheduled step of which some are not known yet."""

    def __init__(self, plan: StepPlan, now: float, depth: int, stages: int) -> None:
        self.work: StageWork = compute_stage_work(plan.step, plan.rows)
        self.scheduled_time = now
        self.returned_time: float | None = None
        self.depth = depth
        self.is_late = False
        """True if it could not be scheduled before the result of the step before it."""
        self.num_missing = stages
        """Number of stages that have not reported the step."""
        self.times: list[StepTime | None] = [None] * stages
        self.previous_ends = [0.0] * stages
        """When each stage ended the step that it computed before."""

    def interval(self) -> float:
        """Return the time that the step takes of a full pipeline, in seconds."""
        assert self.returned_time is not None
        longest, ready = 0.0, self.scheduled_time
        round_trip = self.returned_time - self.scheduled_time
        for stage, (time, previous_end) in enumerate(
            zip(self.times, self.previous_ends, strict=True)
        ):
            assert time is not None
            # On other stages it may be the time of the link, which is busy with one step at a time
            # beside the stages.
            is_delayed = not stage and ready < previous_end < time.start
            longest = max(longest, time.end - (previous_end if is_delayed else time.start))
            round_trip -= max(0.0, previous_end - ready)
            ready = time.end
        return max(longest, round_trip / self.depth)


class StepIntervalCollector:
    """Calls `observe` with the interval of each step that has returned from all stages.

    Args:
        observe: called with the work of each step and its interval; None to ignore all times.
        stages: number of pipeline stages.
        observe_idle: called, on one stage, with the time between two steps of which the later one
            could only be scheduled with the result of the earlier one; None to ignore it.
    """

    def __init__(
        self,
        observe: Callable[[StageWork, float], None] | None,
        stages: int,
        observe_idle: Callable[[float], None] | None = None,
    ) -> None:
        self._observe = observe
        self._observe_idle = observe_idle if stages == 1 else None
        self._num_in_flight = 0
        self._last_return = -1.0
        """Time at which the last step returned."""
        self._stages = stages
        self._pending: dict[int, _PendingStep] = {}
        self._committed: deque[int] = deque()
        """Steps that have been committed since the last `on_time`."""
        self._last_ends = [0.0] * stages

    @property
    def num_pending(self) -> int:
        """Number of steps of which some times are not known."""
        return len(self._pending)

    def on_scheduled(self, plan: StepPlan, now: float, depth: int) -> None:
        """Store a step until it has returned and all stages have reported its time.

        Args:
            plan: the step.
            now: current time in seconds.
            depth: limit of the micro-batches in flight.
        """
        if self._observe is None:
            return
        pending = _PendingStep(plan, now, depth, self._stages)
        pending.is_late = not self._num_in_flight and depth > 1 and now == self._last_return
        self._num_in_flight += 1
        self._pending[plan.step] = pending
        if len(self._pending) > MAX_PENDING_STEPS:
            del self._pending[next(iter(self._pending))]

    def on_committed(self, step: int) -> None:
        """Record that the driver has the result of a step; its time is that of `on_time`."""
        if self._observe is not None:
            self._num_in_flight -= 1
            self._committed.append(step)

    def on_time(self, now: float) -> None:
        """Record the current time, at which the steps committed since the last call returned."""
        if self._committed:
            self._last_return = now
        while self._committed:
            if (pending := self._pending.get(step := self._committed.popleft())) is not None:
                pending.returned_time = now
                self._complete(step, pending)

    def on_stage_times(self, stage: int, times: list[StepTime]) -> None:
        """Record a stage's report of steps, in the order in which it computed them."""
        if self._observe is None:
            return
        for time in times:
            previous_end, self._last_ends[stage] = self._last_ends[stage], time.end
            pending = self._pending.get(time.step)
            if pending is not None and pending.times[stage] is None:
                pending.times[stage] = time
                pending.previous_ends[stage] = previous_end
                pending.num_missing -= 1
                if pending.is_late and self._observe_idle is not None:
                    self._observe_idle(max(0.0, time.start - previous_end))
                self._complete(time.step, pending)

    def _complete(self, step: int, pending: _PendingStep) -> None:
        """Report a step if all of its times are known."""
        if not pending.num_missing and pending.returned_time is not None:
            del self._pending[step]
            assert self._observe is not None
            self._observe(pending.work, pending.interval())
