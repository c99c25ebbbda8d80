"""Pipeline in simulated time: the production scheduler between simulated stages and links.

Submitted requests, schedules, stages that compute one micro-batch at a time in order, links and
commits happen here. Decisions are the scheduler's, and times are the cost model's.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import NamedTuple, Protocol

from gllm.messages.reports import STAGE_REPORT_SECONDS
from gllm.observability.logged_scheduler import LoggedScheduler
from gllm.observability.step_log import (
    StepLogEvent,
)
from gllm.pacing.slack import StageClock, decode_round_seconds
from gllm.pacing.traffic import TrafficClass
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.eviction import EvictionOrder
from gllm.scheduler.kv_transfers import KvFetch
from gllm.scheduler.lanes import LaneOrder
from gllm.scheduler.output_lengths import OutputLengths
from gllm.scheduler.plan import SampledToken, StepPlan, StepResult, StepTime
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import StageWork, compute_stage_work
from gllm.sim.costs.base import CostModel, TransferCost
from gllm.sim.event_loop import (
    ABORT,
    ARRIVAL,
    COMMIT,
    DRIVER_TURN,
    PIPELINE,
    REPORT,
    EventLoop,
)
from gllm.sim.link import MessageLink, make_link
from gllm.sim.observer import PipelineObserver, SchedulerCall
from gllm.sim.workloads.requests import OUTPUT_TOKEN_ID

MAX_REUSED_TOKENS = 4096
"""Number of SampledToken objects that are kept for the next steps of their sequences."""


class DecodeClocks:
    """Predicts when each stage next sends decode activations, for link policies.

    Some link policies send other traffic only in the time that is left until then. Times are those
    of the cost model, as a profile of the real stages and links would have them.

    Args:
        cost: Cost model of the pipeline.
        links: Link from each stage but the last one to the next one.
        owner: Sender of the messages, for `MessageLink.drop`.
    """

    def __init__(self, cost: CostModel, links: Sequence[MessageLink], owner: object) -> None:
        self._cost = cost
        self._num_links = len(links)
        self._clocks = {stage: StageClock() for stage, link in enumerate(links) if link.uses_slack}
        for stage, clock in self._clocks.items():
            links[stage].add_slack_source(owner, clock.slack_seconds)

    def has(self, stage: int) -> bool:
        """Return True if the policy of the link behind a stage uses these predictions."""
        return stage in self._clocks

    def on_started(self, stage: int, now: float, seconds: float) -> None:
        """Record a decode micro-batch that starts now on a stage and takes `seconds`."""
        self._clocks[stage].on_decode_started(now, seconds)

    def on_finished(self, stage: int, now: float, work: StageWork) -> None:
        """Record the end of a decode micro-batch on a stage."""
        self._clocks[stage].on_decode_finished(now, self._round_seconds(work, now))

    def _round_seconds(self, work: StageWork, now: float) -> float:
        """Return the time in which the next step of the same decodes comes to the same stage."""
        cost = self._cost
        stages = [cost.stage_seconds(index, work, now) for index in range(self._num_links + 1)]
        transfers = [cost.activation_transfer(index, work) for index in range(self._num_links)]
        transfers += [cost.return_transfer(work), cost.plan_transfer(0, work)]
        driver_seconds = cost.return_seconds(work) + cost.plan_seconds(work)
        return driver_seconds + decode_round_seconds(
            stages, [transfer.total_seconds for transfer in transfers]
        )


class PipelineLinks(NamedTuple):
    """Simulated network links of a pipeline, for activations, plans and results.

    Several entries may be the same link, for example one network card.
    """

    activations: Sequence[MessageLink]
    """Link from each stage but the last one to the next one."""
    plans: Sequence[MessageLink]
    """Link from the driver to each stage, for scheduled batches."""
    results: MessageLink
    """Link from the last stage to the driver, for sampled tokens."""


def make_pipeline_links(loop: EventLoop, num_stages: int, policy: str = "serial") -> PipelineLinks:
    """Return new simulated links between all stages, and between the driver and the stages.

    Args:
        loop: Event loop with the simulated clock.
        num_stages: Number of pipeline stages.
        policy: Name of the policy that chooses the next chunk to send.

    Raises:
        ValueError: The link policy is unknown.
    """
    return PipelineLinks(
        [make_link(loop, policy) for _ in range(num_stages - 1)],
        [make_link(loop, policy) for _ in range(num_stages)],
        make_link(loop, policy),
    )


def _check_links(links: PipelineLinks, num_stages: int, loop: EventLoop) -> None:
    """Raise ValueError unless each edge and each stage's plans have a link, in the same loop."""
    if len(links.activations) != num_stages - 1 or len(links.plans) != num_stages:
        raise ValueError(
            f"links has {len(links.activations)} activation links and {len(links.plans)} plan "
            f"links, but {num_stages} stages need {num_stages - 1} and {num_stages}"
        )
    if any(link.loop is not loop for link in (*links.activations, *links.plans, links.results)):
        raise ValueError("links are in another event loop than the pipeline: make them in its loop")


class KvRequestListener(Protocol):
    """Protocol of receivers of a scheduler's requests to fetch KV cache from another engine.

    The receiver answers by `finish_fetch` and `confirm_revocation` of the pipeline.
    """

    def on_fetch(self, fetch: KvFetch, now: float) -> None:
        """Fetch KV cache from another engine."""

    def on_fetch_cancelled(self, seq: int, now: float) -> None:
        """Stop the fetch of a sequence; `finish_fetch` still has to follow."""

    def on_revoked(self, ticket: int, now: float) -> None:
        """Stop transfers from KV blocks that this engine kept for another engine and takes back."""


class _SampledTokens(dict[tuple[int, ...], SampledToken]):
    """Tokens by sequence and preemptions: those of all steps are equal, so that one is enough."""

    def __missing__(self, key: tuple[int, int]) -> SampledToken:
        seq, num_preemptions = key
        token = self[key] = SampledToken(seq, num_preemptions, OUTPUT_TOKEN_ID)
        return token


class SimulatedWindows:
    """Verifies draft tokens as the last stage does; all tokens of outputs are OUTPUT_TOKEN_ID."""

    def __init__(self) -> None:
        self._ends: dict[int, int] = {}
        """By sequence, the end of its last row if all guesses up to it were right."""

    def sample(self, plan: StepPlan) -> list[SampledToken]:
        """Return the results of a step's rows; none for a row that continues a wrong guess."""
        sampled = []
        for row in plan.rows:
            if not row.should_sample:
                continue
            seq, num_drafts = row.seq, row.num_draft_tokens
            drafts = row.token_ids[len(row.token_ids) - num_drafts :]
            continues = num_drafts == row.num_tokens
            is_void = continues and (self._ends.get(seq), drafts[0]) != (row.start, OUTPUT_TOKEN_ID)
            if is_void:
                self._ends.pop(seq, None)
                continue
            del drafts[:continues]
            is_wrong = [draft != OUTPUT_TOKEN_ID for draft in drafts]
            num_right = is_wrong.index(True) if True in is_wrong else len(drafts)
            if num_right == len(drafts):
                self._ends[seq] = row.start + row.num_tokens
            else:
                self._ends.pop(seq, None)
            further = (OUTPUT_TOKEN_ID,) * num_right
            token = SampledToken(seq, row.num_preemptions, OUTPUT_TOKEN_ID, "", further)
            sampled.append(token)
        return sampled

    def release(self, seqs: Iterable[int]) -> None:
        """Forget sequences that have ended."""
        for seq in seqs:
            self._ends.pop(seq, None)


ROUNDING_SECONDS = 1e-9
"""Upper bound in seconds of the rounding error of an event's time."""


class InFlightBatch:
    """Micro-batch in flight in a simulated pipeline, between its scheduling and its commit.

    Args:
        plan: The scheduled micro-batch.
        num_stages: Number of pipeline stages.
    """

    def __init__(self, plan: StepPlan, num_stages: int) -> None:
        self.plan = plan
        self.turn = plan.turn
        self.work: StageWork = compute_stage_work(plan.step, plan.rows)
        self.traffic_class = (
            TrafficClass.PREFILL if self.work.prefill_chunks else TrafficClass.DECODE
        )
        self.num_stages_done = 0
        """Number of stages that have computed it."""
        self.missing_inputs = [1] + [2] * (num_stages - 1)
        """Number of messages that each stage waits for: the plan, and activations behind the first
        stage."""

    @cached_property
    def seqs(self) -> frozenset[int]:
        """Sequences with a row in the micro-batch."""
        return frozenset([row.seq for row in self.plan.rows])


class SimulatedDevice:
    """Simulated device that several engines share: it computes one micro-batch at a time, in order.

    vLLM's virtual engines share devices like this: each has a scheduler and sequences of its own
    and at most one micro-batch in flight.
    """

    def __init__(self) -> None:
        self._is_busy = False
        self._waiting: deque[tuple[Callable[[float, InFlightBatch], None], InFlightBatch]] = deque()

    def run(
        self, now: float, start: Callable[[float, InFlightBatch], None], batch: InFlightBatch
    ) -> None:
        """Start a micro-batch, now or when the earlier ones have finished.

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
        """End the current micro-batch and start the next one."""
        if self._waiting:
            start, batch = self._waiting.popleft()
            start(now, batch)
        else:
            self._is_busy = False


class SimulatedStage:
    """Simulated pipeline stage, which computes one micro-batch at a time.

    Micro-batches are computed in the order of scheduling. If the scheduler has a separate queue for
    decodes (`num_lanes` of 2, gllm/scheduler/lanes.py), a decode batch may overtake prefill
    batches.

    Args:
        pipeline: Pipeline of the stage.
        index: Index of the stage.
        device: Device shared with other engines; None: a device of its own.
    """

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
        self._unreported: list[StepTime] = []
        """Times of steps since the last report."""
        self._order = LaneOrder() if pipeline.scheduler.config.num_lanes > 1 else None
        self._next_turns = [0, 0]
        self._ready: tuple[dict[int, InFlightBatch], dict[int, InFlightBatch]] = {}, {}
        """Micro-batches with all inputs, by turn in each lane."""

    def earliest_end(self, batch: InFlightBatch, start: float) -> float:
        """Return a lower bound of the time at which a micro-batch ends on this stage.

        Args:
            batch: One that the stage has not computed.
            start: Time before which it does not start, unless the stage computes it already.
        """
        if self._batch is batch:
            return max(start, self._end_time - ROUNDING_SECONDS)
        seconds = self._pipeline.cost.min_stage_seconds(self.index, batch.work)
        return start + max(0.0, seconds - ROUNDING_SECONDS)

    def pop_step_times(self) -> list[StepTime]:
        """Return the times of steps computed since the last call; they are kept for reports."""
        times, self._unreported = self._unreported, []
        return times

    def receive(self, now: float, batch: InFlightBatch) -> None:
        """Count an arrived plan or activation; start the micro-batch once all have arrived."""
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
            self._unreported.append(StepTime(step, start, now))
        for observer in pipeline.observers:
            observer.on_stage_finished(self.index, step, start, now)
        if self._is_last:
            # First, because the next micro-batch may wait for the tokens of this one.
            pipeline.on_last_stage_end(batch, now)
            self._start_next(now)
        else:
            self._start_next(now)
            pipeline.send_activations(self.index, batch, now)


class SimulatedPipeline:
    """Simulates an engine's pipeline around the production scheduler, from its start to its end.

    Once stopped it cannot be started again.

    Args:
        config: Resolved configuration of the scheduler.
        cost: Predicts the times of stages, links and driver.
        observers: Receive the pipeline's events.
        log: Receives the events of the step log; None: no log.
        loop: Event loop with the simulated clock, which engines may share; default: a new one.
        links: Network links, which engines may share; default: new links that send in order.
        reports_step_times: True if the stages report their times to the driver as workers do, every
            STAGE_REPORT_SECONDS; if False, only `report_step_times_at` does.
        output_lengths: Output lengths of earlier requests, from which the scheduler predicts at the
            start.
        devices: Device of each stage, shared with other engines; default: new devices.
        kv_listener: Transfers KV cache between engines; None: no transfers.
        eviction: Order in which cached KV blocks are evicted; None: the configured one.

    Raises:
        ValueError: The links do not match the number of stages, or use another event loop.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        cost: CostModel,
        observers: Sequence[PipelineObserver] = (),
        log: Callable[[StepLogEvent], None] | None = None,
        *,
        loop: EventLoop | None = None,
        links: PipelineLinks | None = None,
        reports_step_times: bool = True,
        output_lengths: OutputLengths | None = None,
        devices: Sequence[SimulatedDevice] | None = None,
        kv_listener: KvRequestListener | None = None,
        eviction: EvictionOrder | None = None,
    ) -> None:
        self.loop = loop or EventLoop()
        self.cost = cost
        self.observers = tuple(observers)
        self.links = links or make_pipeline_links(self.loop, config.stages)
        _check_links(self.links, config.stages, self.loop)
        self.is_stopped = False
        self.scheduler = (
            Scheduler(config, output_lengths=output_lengths, eviction=eviction)
            if log is None
            else LoggedScheduler(config, log, lambda: self.loop.now, output_lengths, eviction)
        )
        self._kv_listener = kv_listener
        self.reports_step_times = reports_step_times and (
            log is not None or self.scheduler.learns_step_times
        )
        self.clocks = DecodeClocks(cost, self.links.activations, self)
        self._stages = [
            SimulatedStage(self, stage, devices[stage] if devices else None)
            for stage in range(config.stages)
        ]
        self._is_turn_due = self._is_report_due = False
        self.num_arrivals = 0
        """Number of requests so far."""
        self._num_steps = 0
        """Number of steps planned so far."""
        self._results: tuple[dict[int, InFlightBatch], dict[int, InFlightBatch]] = {}, {}
        """Results at the driver that wait for an earlier one, by turn in each lane."""
        self._in_flight: dict[int, InFlightBatch] = {}
        """Micro-batches that have not committed, by step."""
        self._num_committed_steps = [0, 0]
        """Number of committed steps of each lane."""
        self._tokens = _SampledTokens()
        self._windows = SimulatedWindows() if config.speculative_config is not None else None
        self.planned_time = self.sampled_time = self.returned_time = 0.0
        """When the newest plan leaves the driver, the newest tokens are sampled, and the newest
        result leaves the last stage."""

    @property
    def is_busy(self) -> bool:
        """True if a micro-batch is in flight."""
        return bool(self._in_flight)

    # Calls and events from outside.

    def submit_each(self, requests: Iterable[tuple[float, SchedulerRequest]]) -> None:
        """Submit requests at their times in seconds.

        Args:
            requests: Sorted by time. May be a generator: only the next request is in memory.
        """
        self.loop.push_each(requests, ARRIVAL, self._on_arrival)

    def submit(self, request: SchedulerRequest, now: float) -> None:
        """Add a request now.

        Raises:
            ValueError: The request can never run, or the pipeline has been stopped.
        """
        if self.is_stopped:
            raise ValueError("the pipeline has been stopped: submit the request to a new one")
        self.scheduler.add(request, now)
        self.num_arrivals += 1
        for observer in self.observers:
            observer.on_added(request, now)
        self._request_turn(now)

    def abort_at(self, time: float, seqs: list[int]) -> None:
        """Abort sequences at a time in seconds; ids that are unknown at that time are ignored."""
        self.loop.push(time, ABORT, self._on_abort, seqs)

    def abort(self, seqs: list[int], now: float) -> None:
        """Abort sequences now; unknown ids are ignored."""
        if self.is_stopped:
            return
        self.scheduler.abort(seqs)
        for observer in self.observers:
            observer.on_aborted(seqs, now)
        self._request_turn(now)

    def report_step_times_at(self, time: float, stage: int, steps: list[StepTime]) -> None:
        """Report computed steps to the driver at a time in seconds.

        A step that is not planned by then is left out: in a replay whose plans differ there may be
        fewer than in the recording.
        """
        self.loop.push(time, REPORT, self._on_report, (stage, steps))

    def finish_fetch(self, seq: int, is_ok: bool, now: float) -> bool:
        """End a fetch of KV cache; ignored once the pipeline has stopped.

        Returns:
            True if the fetch starts again later.
        """
        if self.is_stopped:
            return False
        is_repeated = self.scheduler.transfers.finish_fetch(seq, is_ok)
        self._request_turn(now)
        return is_repeated

    def confirm_revocation(self, ticket: int, now: float) -> None:
        """Free the blocks of a revoked ticket after its last reader has ended."""
        if not self.is_stopped:
            self.scheduler.transfers.confirm_revocation(ticket)
            self._request_turn(now)

    def earliest_commits(self, now: float) -> list[tuple[float, InFlightBatch]]:
        """Return the micro-batches in flight, newest first, and lower bounds of their commits.

        All events before `now` have been processed. Links count as free: this is no prediction.
        """
        if self.scheduler.config.num_lanes > 1:
            return []  # Micro-batches overtake each other.
        free_times = [now] * len(self._stages)
        commits = []
        for batch in self._in_flight.values():
            time = now
            for stage in self._stages[batch.num_stages_done :]:
                time = stage.earliest_end(batch, max(time, free_times[stage.index]))
                free_times[stage.index] = time
            commits.append((time, batch))
        return commits[::-1]

    def stop(self, now: float) -> list[SchedulerRequest]:
        """Stop the pipeline now, as a failure does: work in flight is lost.

        Messages that wait for a link are removed from it, so that a shared link is free for others.

        Returns:
            The unfinished requests, resumable: with their output so far and their age. The ids are
            those of the first unfinished sequences; assign new ones for another pipeline.
        """
        self.is_stopped = True
        self._record_step_times()
        for link in (*self.links.activations, *self.links.plans, self.links.results):
            link.drop(self)
        return self.scheduler.unfinished_requests(now)

    def _on_arrival(self, now: float, request: SchedulerRequest) -> None:
        self.submit(request, now)

    def _on_abort(self, now: float, seqs: list[int]) -> None:
        self.abort(seqs, now)

    def _on_report(self, now: float, report: tuple[int, list[StepTime]]) -> None:
        if self.is_stopped:
            return
        stage, steps = report
        planned = [step for step in steps if step.step < self._num_steps]
        self.scheduler.record_step_times(stage, planned)
        self._request_turn(now)

    def _schedule_report(self, now: float) -> None:
        """Report the step times of all stages later, unless a report is scheduled already."""
        if self.reports_step_times and not self._is_report_due:
            self._is_report_due = True
            self.loop.push(now + STAGE_REPORT_SECONDS, REPORT, self._report_step_times, None)

    def _report_step_times(self, now: float, _: None) -> None:
        """Report the steps since the last report, and again later while there are any."""
        if self.is_stopped:
            return
        self._is_report_due = False
        if self._record_step_times() or self._in_flight:
            self._schedule_report(now)

    def _record_step_times(self) -> bool:
        """Report the steps since the last report; return True if there are any."""
        has_times = False
        for stage in self._stages:
            if times := stage.pop_step_times():
                has_times = True
                self.scheduler.record_step_times(stage.index, times)
        return has_times

    # The driver.

    def _request_turn(self, now: float) -> None:
        """Let the driver schedule once it has received everything of this moment."""
        if not self._is_turn_due:
            self._is_turn_due = True
            self.loop.push(now, DRIVER_TURN, self._take_turn, None)

    def _take_turn(self, now: float, _: None) -> None:
        """Fill the pipeline, as the driver does after every event."""
        self._is_turn_due = False
        if self.is_stopped:
            return
        if self._kv_listener is not None and self.scheduler.transfers.has_pending_fetches:
            for fetch in self.scheduler.transfers.start_fetches(now):
                self._kv_listener.on_fetch(fetch, now)
        while (plan := self.scheduler.schedule(now)) is not None:
            self._num_steps = plan.step + 1
            batch = InFlightBatch(plan, len(self._stages))
            self._in_flight[plan.step] = batch
            self._schedule_report(now)
            self._notify_scheduled(batch, now)
            leave_time = now + self.cost.plan_seconds(batch.work)
            self.planned_time = max(self.planned_time, leave_time)
            if self.planned_time > now:
                self.loop.push(self.planned_time, PIPELINE, self._send_plan, batch)
            else:
                self._send_plan(now, batch)
        self._notify_scheduled(None, now)
        if self._kv_listener is not None:
            self._report_kv_changes(self._kv_listener, now)

    def _report_kv_changes(self, listener: KvRequestListener, now: float) -> None:
        """Report fetches and held blocks that the scheduler has given up."""
        # The simulated mover knows of a hold by the end of its request.
        transfers = self.scheduler.transfers
        transfers.pop_readable()
        for seq in transfers.pop_cancellations():
            listener.on_fetch_cancelled(seq, now)
        for ticket in transfers.pop_revocations(now):
            listener.on_revoked(ticket, now)

    def _notify_scheduled(self, batch: InFlightBatch | None, now: float) -> None:
        if not self.observers:
            return
        plan, work = (batch.plan, batch.work) if batch else (None, None)
        parallelism = self.scheduler.available_parallelism()
        call = SchedulerCall(plan, work, parallelism, 1 - self.scheduler.kv_cache.free_share)
        for observer in self.observers:
            observer.on_scheduled(call, now)

    def _send_plan(self, now: float, batch: InFlightBatch) -> None:
        """Send a plan to every stage."""
        if self.is_stopped:
            return
        for stage in self._stages:
            cost = self.cost.plan_transfer(stage.index, batch.work)
            if cost.is_free:
                stage.receive(now, batch)
            else:
                link = self.links.plans[stage.index]
                link.send(TrafficClass.DECODE, cost, stage.receive, batch, self)

    def send_activations(self, stage: int, batch: InFlightBatch, now: float) -> None:
        """Send the activations of a micro-batch from a stage to the next one."""
        cost = self.cost.activation_transfer(stage, batch.work)
        receive = self._stages[stage + 1].receive
        if cost.is_free:
            receive(now, batch)
        else:
            link = self.links.activations[stage]
            link.send(batch.traffic_class, cost, receive, batch, self)

    def on_last_stage_end(self, batch: InFlightBatch, now: float) -> None:
        """Sample the tokens of a micro-batch and return them to the driver."""
        work = batch.work
        self.sampled_time = now + self.cost.sample_seconds(work)
        self.returned_time = max(self.returned_time, now + self.cost.return_seconds(work))
        cost = self.cost.return_transfer(work)
        if cost.is_free:
            self.loop.push(self.returned_time, COMMIT, self._receive_result, batch)
        elif self.returned_time > now:
            self.loop.push(self.returned_time, PIPELINE, self._send_result, (batch, cost))
        else:
            self._send_result(now, (batch, cost))

    def _send_result(self, now: float, result: tuple[InFlightBatch, TransferCost]) -> None:
        if not self.is_stopped:
            batch, cost = result
            # A driver receives results before it schedules, so the commit goes first.
            self.links.results.send(
                TrafficClass.DECODE, cost, self._receive_result, batch, self, COMMIT
            )

    def _receive_result(self, now: float, batch: InFlightBatch) -> None:
        """Commit a result and those behind it that have overtaken it on a shared link."""
        if self.is_stopped:
            return
        lane, num_committed_steps = batch.plan.lane, self._num_committed_steps
        results = self._results[lane]
        results[batch.turn] = batch
        tokens = self._tokens
        if len(tokens) > MAX_REUSED_TOKENS:
            tokens.clear()
        while (turn := num_committed_steps[lane]) in results:
            num_committed_steps[lane] = turn + 1
            plan = results.pop(turn).plan
            # The first two fields of a row are its sequence and num_preemptions.
            if self._windows is not None:
                sampled = self._windows.sample(plan)
            else:
                sampled = [tokens[row[:2]] for row in plan.rows if row.should_sample]
            del self._in_flight[plan.step]
            if self._windows is not None:
                self._windows.release(plan.released_seqs)
            output = self.scheduler.commit(StepResult(plan.step, sampled))
            for observer in self.observers:
                observer.on_committed(plan, output, now)
        self._request_turn(now)
