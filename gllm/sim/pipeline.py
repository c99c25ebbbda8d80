"""One pipeline in simulated time: the driver's scheduler between made-up stages.

Owns what happens when: arrivals, schedules, stages that run one micro-batch at a time in order,
links that carry one at a time, commits. Decides nothing: the scheduler is the production object.
Knows nothing of devices, only of a cost model.
"""

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial

from gllm.observability.step_log import LoggedScheduler
from gllm.observability.step_log import StepLogEvent as Logged
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.output_lengths import OutputLengths
from gllm.scheduler.plan import SampledToken, StepPlan, StepResult, StepTime
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import StageWork, compute_stage_work
from gllm.sim.costs.base import CostModel
from gllm.sim.event_loop import SimulationEvent

COMMIT, ARRIVAL, DRIVER_TURN, PIPELINE = range(4)
"""Ranks of events at one time: the driver hears all that is new before it schedules."""

TIME_DECIMALS = 9
"""Decimals of an event's time: finer differences are errors of rounding."""

OUTPUT_TOKEN_ID = 1
"""Id of every simulated output token."""

PlannedBatch = tuple[StepPlan, StageWork]


class _Lane:
    """A stage, or the link after it: one micro-batch at a time, in order."""

    def __init__(self) -> None:
        self.waiting: deque[PlannedBatch] = deque()
        self.busy = False


class SimulatedPipeline:
    """Simulated pipeline with the production scheduler.

    `config` is resolved; `write` receives each logged event. `tells`: stages report their times at
    the end of each step; if False, only `telling` does. `output_lengths`: what the scheduler begins
    with.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cost: CostModel,
        write: Callable[[Logged], None],
        tells: bool = True,
        output_lengths: OutputLengths | None = None,
    ) -> None:
        self._tells = tells
        self._now = 0.0
        self.scheduler = LoggedScheduler(config, write, lambda: self._now, output_lengths)
        self._cost = cost
        self._stages = [_Lane() for _ in range(config.stages)]
        self._links = [_Lane() for _ in range(config.stages - 1)]
        self._turning = False
        self._num_steps = 0
        """Number of steps planned so far."""
        self._planned = self._sampled = self._returned = 0.0
        """When the newest plan's inputs, the newest step's tokens and its result are there."""

    def arrivals(self, requests: Iterable[tuple[float, SchedulerRequest]]) -> list[SimulationEvent]:
        """Events that bring the requests at their times, in seconds."""
        return [
            SimulationEvent(round(time, TIME_DECIMALS), ARRIVAL, partial(self.submit, request))
            for time, request in requests
        ]

    def abortion(self, time: float, seqs: list[int]) -> SimulationEvent:
        """Schedule an event that ends sequences."""
        return SimulationEvent(round(time, TIME_DECIMALS), ARRIVAL, partial(self._abort, seqs))

    def telling(self, time: float, stage: int, steps: list[StepTime]) -> SimulationEvent:
        """Schedule an event that reports computed steps to the driver.

        A step that is not planned by then is left out: in a replay whose plans differ there may be
        fewer than in the recording.
        """
        handle = partial(self._observe, stage, steps)
        return SimulationEvent(round(time, TIME_DECIMALS), ARRIVAL, handle)

    # Handlers: each takes the time and returns what follows.

    def submit(self, request: SchedulerRequest, now: float) -> list[SimulationEvent]:
        """Add a request now; return the events that follow."""
        self._now = now
        self.scheduler.add(request, now)
        return self._news(now)

    def _abort(self, seqs: list[int], now: float) -> list[SimulationEvent]:
        self._now = now
        self.scheduler.abort(seqs)
        return self._news(now)

    def _observe(self, stage: int, steps: list[StepTime], now: float) -> list[SimulationEvent]:
        self._now = now
        planned = [each for each in steps if each.step < self._num_steps]
        self.scheduler.record_step_times(stage, planned)
        return self._news(now)

    def _news(self, now: float) -> list[SimulationEvent]:
        """Have the driver take its turn once it has heard everything of this moment."""
        if self._turning:
            return []
        self._turning = True
        return [SimulationEvent(now, DRIVER_TURN, self._turn)]

    def _turn(self, now: float) -> list[SimulationEvent]:
        """Fill the pipeline, as the driver does after every event."""
        self._turning = False
        follows = []
        while (plan := self.scheduler.schedule(now)) is not None:
            self._num_steps = plan.step + 1
            batch = plan, compute_stage_work(plan.step, plan.rows)
            ready = round(now + self._cost.plan_seconds(batch[1]), TIME_DECIMALS)
            self._planned = max(self._planned, ready)
            follows.append(
                SimulationEvent(self._planned, PIPELINE, partial(self._reach_stage, 0, batch))
            )
        return follows

    def _reach_stage(self, stage: int, batch: PlannedBatch, now: float) -> list[SimulationEvent]:
        lane = self._stages[stage]
        lane.waiting.append(batch)
        return [] if lane.busy else self._start_stage(stage, now)

    def _start_stage(self, stage: int, now: float) -> list[SimulationEvent]:
        lane = self._stages[stage]
        batch = lane.waiting.popleft()
        lane.busy = True
        # A row whose input token the step before samples waits for it (one stage only).
        start = max(now, self._sampled) if batch[1].has_placeholders else now
        end = round(start + self._cost.stage_seconds(stage, batch[1], start), TIME_DECIMALS)
        return [SimulationEvent(end, PIPELINE, partial(self._end_stage, stage, batch, start))]

    def _end_stage(
        self, stage: int, batch: PlannedBatch, start: float, now: float
    ) -> list[SimulationEvent]:
        self._now = now
        self._stages[stage].busy = False
        if self._tells:
            self.scheduler.record_step_times(stage, [StepTime(batch[0].step, start, now)])
        if stage == len(self._links):
            self._sampled = now + self._cost.sample_seconds(batch[1])
            done = round(now + self._cost.return_seconds(batch[1]), TIME_DECIMALS)
            self._returned = max(self._returned, done)
            commit = SimulationEvent(self._returned, COMMIT, partial(self._commit, batch[0]))
            return [*self._next(stage, now), commit]
        link = self._links[stage]
        link.waiting.append(batch)
        sent = [] if link.busy else [self._start_link(stage, now)]
        return [*self._next(stage, now), *sent]

    def _next(self, stage: int, now: float) -> list[SimulationEvent]:
        return self._start_stage(stage, now) if self._stages[stage].waiting else []

    def _start_link(self, stage: int, now: float) -> SimulationEvent:
        link = self._links[stage]
        batch = link.waiting.popleft()
        link.busy = True
        cost = self._cost.activation_transfer(stage, batch[1])
        end = round(now + cost.occupancy_seconds + cost.propagation_seconds, TIME_DECIMALS)
        return SimulationEvent(end, PIPELINE, partial(self._end_link, stage, batch))

    def _end_link(self, stage: int, batch: PlannedBatch, now: float) -> list[SimulationEvent]:
        link = self._links[stage]
        link.busy = False
        follows = [self._start_link(stage, now)] if link.waiting else []
        return [*follows, *self._reach_stage(stage + 1, batch, now)]

    def _commit(self, plan: StepPlan, now: float) -> list[SimulationEvent]:
        self._now = now
        sampled = [
            SampledToken(row.seq, row.epoch, OUTPUT_TOKEN_ID)
            for row in plan.rows
            if row.should_sample
        ]
        self.scheduler.commit(StepResult(plan.step, sampled))
        return self._news(now)
