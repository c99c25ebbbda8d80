"""Plans in flight (scheduled, not committed), and the stages that the work could keep busy."""

from collections import deque
from collections.abc import Iterable

from gllm.scheduler.admission import AdmissionController
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.kv_cache_manager import KVCacheManager
from gllm.scheduler.plan import ScheduledRow, StepPlan
from gllm.scheduler.queues import SequenceQueues


class InFlightPlans:
    """Plans in flight; each lane commits its plans in order.

    Args:
        num_lanes: 1 or 2.
        limit: largest number of plans per lane.
    """

    def __init__(self, num_lanes: int, limit: int) -> None:
        self.limit = limit
        self.num_prefill_tokens = 0
        """Prefill tokens of the plans."""
        self._plans: dict[int, StepPlan] = {}
        """By step, the oldest first."""
        self._lanes: list[deque[int]] = [deque() for _ in range(num_lanes)]
        """Steps of each lane, the oldest first."""
        self._num_planned = [0] * num_lanes
        """Steps of each lane so far."""
        self._prefill_tokens: dict[int, int] = {}
        """Prefill tokens by step, of the plans with prefill."""

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def plans(self) -> Iterable[StepPlan]:
        """The plans, the oldest first."""
        return self._plans.values()

    @property
    def has_room(self) -> list[bool]:
        """For each lane, True if another plan may be added."""
        return [len(steps) < self.limit for steps in self._lanes]

    def add(
        self,
        rows: list[ScheduledRow],
        released_seqs: list[int],
        lane: int,
        num_prefill_tokens: int,
    ) -> StepPlan:
        """Add the plan of the next step, which has that many prefill tokens, and return it."""
        step = sum(self._num_planned)
        plan = StepPlan(step, rows, released_seqs, lane, step - self._num_planned[lane])
        self._plans[step] = plan
        self._lanes[lane].append(step)
        self._num_planned[lane] += 1
        if num_prefill_tokens:
            self._prefill_tokens[step] = num_prefill_tokens
            self.num_prefill_tokens += num_prefill_tokens
        return plan

    def pop(self, step: int) -> StepPlan:
        """Remove and return the plan of a step.

        Raises:
            ValueError: the step is not the oldest one of its lane.
        """
        plan = self._plans.get(step)
        oldest = self._lanes[0 if plan is None else plan.lane]
        if plan is None or oldest[0] != step:
            next_step = oldest[0] if oldest else None
            raise ValueError(f"result of step {step} came, but step {next_step} is next")
        oldest.popleft()
        self.num_prefill_tokens -= self._prefill_tokens.pop(step, 0)
        return self._plans.pop(step)


class ParallelismGauge:
    """Counter of the stages that the available work could keep busy, for reports of bubbles.

    A bubble is the time in which a stage is idle although there is work for it.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        kv_cache: KVCacheManager,
        admission: AdmissionController,
        queues: SequenceQueues,
    ) -> None:
        self._num_stages = config.stages
        self._min_prefill_tokens = config.min_prefill_tokens
        self._kv_cache = kv_cache
        self._admission = admission
        self._queues = queues

    def count(self, in_flight: InFlightPlans) -> int:
        """Return the number of stages.

        One stage per sequence in decode, per prefill chunk in flight, and per #MinP waiting tokens
        if these fit in the cache.
        """
        tally, num_stages = self._queues.tally, self._num_stages
        decoding = tally.decoding_seqs
        count = len(decoding)
        if count >= num_stages:
            return num_stages
        rows = (row for plan in in_flight.plans for row in plan.rows)
        count += sum(row.seq not in decoding for row in rows)
        if count < num_stages and self._can_prefill():
            count += -(-tally.num_waiting_tokens // self._min_prefill_tokens)
        return min(count, num_stages)

    def _can_prefill(self) -> bool:
        """Return True if the first sequence of the prefill queue could get a chunk now."""
        head = self._queues.head
        if head is None or head.is_fetch_pending or not self._kv_cache.can_extend_prefill(head):
            return False
        return head.seq in self._kv_cache.running or self._admission.is_admissible(head)
