"""Stages of a simulated pipeline, and devices that several pipelines share."""

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING

from gllm.pacing.traffic import TrafficClass
from gllm.scheduler.lanes import LaneOrder
from gllm.scheduler.plan import StepPlan, StepTime
from gllm.scheduler.stage_work import StageWork, compute_stage_work
from gllm.sim.event_loop import PIPELINE

if TYPE_CHECKING:
    from gllm.sim.pipeline import SimulatedPipeline

ROUNDING_SECONDS = 1e-9
"""Seconds by which the rounding of an event's time never shortens a wait."""


class InFlightBatch:
    """Micro-batch between its schedule and its commit."""

    __slots__ = (
        "_seqs",
        "missing_inputs",
        "num_stages_done",
        "plan",
        "traffic_class",
        "turn",
        "work",
    )

    def __init__(self, plan: StepPlan, num_stages: int) -> None:
        self.plan = plan
        self.turn = plan.turn
        self._seqs: frozenset[int] | None = None
        self.work: StageWork = compute_stage_work(plan.step, plan.rows)
        self.traffic_class = (
            TrafficClass.PREFILL if self.work.prefill_chunks else TrafficClass.DECODE
        )
        self.num_stages_done = 0
        """Number of stages that have computed it."""
        self.missing_inputs = [1] + [2] * (num_stages - 1)
        """Number of messages that each stage waits for: the plan, and activations behind the first
        stage."""

    @property
    def seqs(self) -> frozenset[int]:
        """Return the sequences that the micro-batch has rows of."""
        if self._seqs is None:
            self._seqs = frozenset([row.seq for row in self.plan.rows])
        return self._seqs


class SimulatedDevice:
    """Device that computes the micro-batches of several engines one at a time, in their order.

    The virtual engines of vLLM share their devices so: each has a scheduler and sequences of its
    own and at most one micro-batch in flight.
    """

    def __init__(self) -> None:
        self._is_busy = False
        self._waiting: deque[tuple[Callable[[float, InFlightBatch], None], InFlightBatch]] = deque()

    def run(
        self, now: float, start: Callable[[float, InFlightBatch], None], batch: InFlightBatch
    ) -> None:
        """Start a micro-batch, now or as soon as those before it are done.

        Args:
            now: Time in seconds.
            start: Called with the time and the micro-batch; `release` has to follow.
            batch: The micro-batch.
        """
        if self._is_busy:
            self._waiting.append((start, batch))
        else:
            self._is_busy = True
            start(now, batch)

    def release(self, now: float) -> None:
        """End the present micro-batch and start the next one."""
        if self._waiting:
            start, batch = self._waiting.popleft()
            start(now, batch)
        else:
            self._is_busy = False


class SimulatedStage:
    """Stage that computes the micro-batches of each lane in their order, one at a time.

    With two lanes a micro-batch of decodes may overtake those of prefill (gllm/scheduler/lanes.py).
    """

    __slots__ = (
        "_arrival_seconds",
        "_batch",
        "_device",
        "_end_time",
        "_has_clock",
        "_is_last",
        "_next_turns",
        "_num_arrivals",
        "_order",
        "_pipeline",
        "_ready",
        "_start_time",
        "index",
    )

    def __init__(
        self, pipeline: "SimulatedPipeline", index: int, device: SimulatedDevice | None
    ) -> None:
        self.index = index
        self._device = device
        self._pipeline = pipeline
        self._has_clock = pipeline.clocks.has(index)
        self._is_last = index == len(pipeline.links.activations)
        self._batch: InFlightBatch | None = None
        """The micro-batch that the stage computes, or for which it waits for its device."""
        self._start_time = self._end_time = 0.0
        self._arrival_seconds = pipeline.cost.arrival_seconds(index)
        self._num_arrivals = 0
        """Number of requests that arrived before the micro-batch's end as it is predicted."""
        self._order = LaneOrder() if pipeline.scheduler.config.num_lanes > 1 else None
        self._next_turns = [0, 0]
        self._ready: tuple[dict[int, InFlightBatch], dict[int, InFlightBatch]] = {}, {}
        """Micro-batches with all inputs, by turn in each lane."""

    def earliest_end(self, batch: InFlightBatch, start: float) -> float:
        """Return a time before which a micro-batch does not end.

        Args:
            batch: One that the stage has not computed.
            start: Time before which it does not start, unless the stage computes it already.
        """
        if self._batch is batch:
            return max(start, self._end_time - ROUNDING_SECONDS)
        seconds = self._pipeline.cost.least_stage_seconds(self.index, batch.work)
        return start + max(0.0, seconds - ROUNDING_SECONDS)

    def receive(self, now: float, batch: InFlightBatch) -> None:
        """Receive the plan or the activations of a micro-batch."""
        if self._pipeline.is_stopped:
            return
        batch.missing_inputs[self.index] -= 1
        if batch.missing_inputs[self.index]:
            return
        self._ready[batch.plan.lane][batch.turn] = batch
        if self._batch is None:
            self._start_next(now)

    def _start_next(self, now: float) -> None:
        lane: int | None = 0
        if self._order is not None:
            has_decode, has_prefill = (
                turn in ready for turn, ready in zip(self._next_turns, self._ready, strict=True)
            )
            lane = self._order.choose(has_decode, has_prefill)
        if lane is None:
            return
        ready, turn = self._ready[lane], self._next_turns[lane]
        if turn not in ready:
            return
        batch = ready.pop(turn)
        self._next_turns[lane] = turn + 1
        self._batch = batch
        if self._device is None:
            self._start(now, batch)
        else:
            self._device.run(now, self._start, batch)

    def _start(self, now: float, batch: InFlightBatch) -> None:
        pipeline, work = self._pipeline, batch.work
        if pipeline.is_stopped and self._device is not None:
            self._device.release(now)
            return
        # A row whose input token the step before samples waits for it (one stage only).
        start = max(now, pipeline.sampled_time) if work.has_placeholders else now
        self._start_time = start
        self._num_arrivals = pipeline.num_arrivals
        seconds = pipeline.cost.stage_seconds(self.index, work, start)
        if self._has_clock and batch.traffic_class is TrafficClass.DECODE:
            pipeline.clocks.on_started(self.index, start, seconds)
        self._end_time = start + seconds
        pipeline.loop.push(self._end_time, PIPELINE, self._end, batch)

    def _end(self, now: float, batch: InFlightBatch) -> None:
        pipeline = self._pipeline
        num_new = pipeline.num_arrivals - self._num_arrivals
        if num_new and self._arrival_seconds and not pipeline.is_stopped:
            self._num_arrivals += num_new
            end = now + num_new * self._arrival_seconds
            pipeline.loop.push(end, PIPELINE, self._end, batch)
            return
        if self._device is not None:
            self._device.release(now)
        if pipeline.is_stopped:
            return
        self._batch = None
        batch.num_stages_done += 1
        start, step = self._start_time, batch.plan.step
        if self._has_clock and batch.traffic_class is TrafficClass.DECODE:
            pipeline.clocks.on_finished(self.index, now, batch.work)
        if pipeline.reports_step_times:
            pipeline.scheduler.record_step_times(self.index, [StepTime(step, start, now)])
        for observer in pipeline.observers:
            observer.on_stage_finished(self.index, step, start, now)
        if self._is_last:
            # First, because the next micro-batch may wait for the tokens of this one.
            pipeline.on_last_stage_end(batch, now)
            self._start_next(now)
        else:
            self._start_next(now)
            pipeline.send_activations(self.index, batch, now)
