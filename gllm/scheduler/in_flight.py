"""Plans in flight: scheduled and not committed."""

from collections import deque

from gllm.scheduler.plan import ScheduledRow, StateSegment, StepPlan


class InFlightPlans:
    """Queue of the micro-batches that were sent to the stages and have not returned a result.

    With two lanes, decode steps and prefill steps are separate queues; results arrive in order
    within each.

    Args:
        num_lanes: number of queues: 1, or 2 if decode steps may overtake prefill steps.
        limit: maximum number of micro-batches in each queue.
    """

    def __init__(self, num_lanes: int, limit: int) -> None:
        self.limit = limit
        self.num_prefill_tokens = 0
        """Prefill tokens of the plans."""
        self.plans: dict[int, StepPlan] = {}
        """Plans by step, the oldest first."""
        self._lanes: list[deque[int]] = [deque() for _ in range(num_lanes)]
        """Steps of each lane, the oldest first."""
        self._num_planned = [0] * num_lanes
        """Steps of each lane so far."""
        self._prefill_tokens: dict[int, int] = {}
        """Prefill tokens by step, of the plans with prefill."""

    @property
    def has_room(self) -> list[bool]:
        """For each lane, True if another micro-batch may be sent to the stages."""
        return [len(steps) < self.limit for steps in self._lanes]

    @property
    def max_plans(self) -> int:
        """Largest number of plans in flight."""
        return self.limit * len(self._lanes)

    def add(
        self,
        rows: list[ScheduledRow],
        released_seqs: list[int],
        lane: int,
        num_prefill_tokens: int,
        state_segments: tuple[StateSegment, ...] = (),
        num_next_drafts: int = 0,
    ) -> StepPlan:
        """Create, store and return the plan of the next step."""
        step = sum(self._num_planned)
        num_others = step - self._num_planned[lane]
        plan = StepPlan(
            step, rows, released_seqs, lane, num_others, state_segments, num_next_drafts
        )
        self.plans[step] = plan
        self._lanes[lane].append(step)
        self._num_planned[lane] += 1
        if num_prefill_tokens:
            self._prefill_tokens[step] = num_prefill_tokens
            self.num_prefill_tokens += num_prefill_tokens
        return plan

    def pop(self, step: int) -> StepPlan:
        """Remove and return the plan of a step whose result has arrived.

        Raises:
            ValueError: the step is not the oldest one of its queue.
        """
        plan = self.plans.get(step)
        oldest = self._lanes[0 if plan is None else plan.lane]
        if plan is None or oldest[0] != step:
            next_step = oldest[0] if oldest else None
            raise ValueError(f"result of step {step} came, but step {next_step} is next")
        oldest.popleft()
        self.num_prefill_tokens -= self._prefill_tokens.pop(step, 0)
        return self.plans.pop(step)
