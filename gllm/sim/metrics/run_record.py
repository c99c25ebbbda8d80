"""Record of one run, real or simulated, and its construction from a step log.

A record has the timelines of requests, the micro-batches with their times, and the busy time and
bubbles of each stage; the costs of stages, links and driver per step are derived from it.
"""

from bisect import bisect
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from math import inf
from operator import itemgetter
from typing import NamedTuple

from gllm.observability.bubbles import BubbleTotals, Interval, IntervalSweep
from gllm.observability.latency import RequestTimeline
from gllm.observability.step_log import (
    AbortEvent,
    AddEvent,
    CommitEvent,
    DepthEvent,
    RestartEvent,
    ScheduleEvent,
    StageTimesEvent,
    StartEvent,
    StepLogEvent,
)
from gllm.scheduler.plan import SampledToken, ScheduledRow, StepTime, count_tokens
from gllm.scheduler.stage_work import compute_stage_work
from gllm.sim.metrics.micro_batch_table import MicroBatch, iterate_stage_times

RequestContents = tuple[tuple[int, ...], int, tuple[int, ...], int, str]
"""Fields of a request that every submission repeats."""


class ResumedRequestFinder:
    """Matches requests that were submitted again after a restart to their first submission.

    Each submission has a new sequence id, so requests are recognized by their contents and arrival
    time.

    Args:
        unfinished: First submissions of the requests that were unfinished at the restart.
    """

    def __init__(self, unfinished: Iterable[AddEvent]) -> None:
        self._unfinished: dict[RequestContents, list[AddEvent]] = defaultdict(list)
        for add in unfinished:
            self._unfinished[_contents(add)].append(add)

    def pop_original(self, add: AddEvent) -> AddEvent | None:
        """Remove and return the first submission of a request; None for a new request.

        Among requests of equal contents it is the one that arrived closest to the same time.
        """
        if not add.age_seconds:
            return None
        candidates = [
            original for original in self._unfinished[_contents(add)] if add.n <= original.n
        ]
        if not candidates:
            return None
        arrival = arrival_time(add)
        original = min(candidates, key=lambda candidate: abs(arrival_time(candidate) - arrival))
        self._unfinished[_contents(add)].remove(original)
        return original


def arrival_time(add: AddEvent) -> float:
    """Return the arrival time of a logged request: before its log event if it had been waiting."""
    return add.time - add.age_seconds


def _contents(add: AddEvent) -> RequestContents:
    return tuple(add.prompt), add.max_tokens, tuple(add.stop_ids), add.priority, add.cache_salt


@dataclass(slots=True)
class ServedRequest:
    """Record of one sequence of a run: token times, preemptions and resubmissions."""

    num_prompt_tokens: int
    max_tokens: int
    line: RequestTimeline
    """Arrival time and token times, in seconds of the run's clock."""
    received_time: float = 0.0
    """Time at which the driver had received the request and all messages that arrived with it."""
    num_preemptions: int = 0
    """Number of times that its KV blocks were taken for other sequences."""
    num_resumptions: int = 0
    """Number of restarts after which it was submitted again."""
    first_scheduled_time: float | None = None
    """Time at which its first micro-batch was planned; None if it never ran."""
    preempted_seconds: float = 0.0
    """Time without progress because of preemptions: each from the last commit before it to the next
    planned micro-batch."""

    def record_schedule(self, num_preemptions: int, now: float, last_commit_time: float) -> None:
        """Record that a micro-batch with the sequence was planned.

        Args:
            num_preemptions: Number of preemptions until now.
            now: Time of the plan.
            last_commit_time: Time of the sequence's last commit; `now` if it has none.
        """
        if self.first_scheduled_time is None:
            self.first_scheduled_time = now
        if num_preemptions > self.num_preemptions:
            self.preempted_seconds += now - last_commit_time
            self.num_preemptions = num_preemptions


@dataclass
class StageReport:
    """Step times that a stage reported to the driver, with the time of receipt."""

    stage: int
    steps: list[StepTime]
    received_time: float = 0.0
    """Time at which the driver had received the report and all messages that arrived with it."""


@dataclass
class DepthChange:
    """Logged change of the number of micro-batches in flight and of the prefill token limit."""

    depth: int
    """New number of micro-batches in flight."""
    max_prefill_tokens: int | None
    """New limit of prefill tokens per micro-batch; None: only the scheduler's usual limits."""
    is_mixed: bool = False
    """With two lanes: micro-batches have decodes and prefill."""
    received_time: float = 0.0
    """Time at which the driver had received everything before it."""


@dataclass
class StageUsage:
    """Busy time and bubble time (idle despite available work) of one stage in a run, in seconds."""

    busy: float = 0.0
    bubble: float = 0.0
    """Idle time during which available work could have kept the stage busy."""
    span: float = 0.0
    """Length of the run."""

    @property
    def busy_share(self) -> float:
        """Share of the run in which the stage computes, 0..1."""
        return self.busy / self.span if self.span else 0.0

    @property
    def bubble_share(self) -> float:
        """Share of the run that is bubble, 0..1; the remainder is time without work."""
        return self.bubble / self.span if self.span else 0.0


@dataclass
class RunRecord:
    """Record of a real or simulated run: requests, micro-batches, restarts and available work."""

    start: StartEvent
    requests: dict[int, ServedRequest] = field(default_factory=dict)
    micro_batches: Sequence[MicroBatch] = field(default_factory=list)
    stage_reports: list[StageReport] = field(default_factory=list)
    depth_changes: list[DepthChange] = field(default_factory=list)
    parallelism: list[tuple[float, int]] = field(default_factory=list)
    """(time, number of stages that the available work could keep busy from then on), for each
    change of the number."""
    restarts: list[RestartEvent] = field(default_factory=list)
    """Restarts after failures; from the last event before each until it, no work counts as
    available."""

    def max_stages(self) -> int:
        """Return the number of pipeline stages; the maximum if restarts changed it."""
        numbers = (len(restart.layers) for restart in self.restarts)
        return max([len(self.start.layers), *numbers])

    def begin_time(self) -> float:
        """Return the time of the first arrival in seconds, from all requests."""
        return min((served.line.arrival for served in self.requests.values()), default=0.0)

    def end_time(self) -> float:
        """Return the time of the last token in seconds; `begin_time` without tokens."""
        lines = [served.line for served in self.requests.values()]
        last = max((line.times[-1] for line in lines if line.times), default=None)
        return self.begin_time() if last is None else last

    def stage_usages(self) -> list[StageUsage]:
        """Return the busy and bubble time of each stage over the run, in seconds."""
        begin, end = self.begin_time(), self.end_time()
        totals = BubbleTotals(self.max_stages(), begin)
        for time, stage, value in self._changes():
            totals.advance(time if time < end else end)
            totals.apply(stage, value)
        return [
            StageUsage(busy, bubble, end - begin)
            for busy, bubble in zip(totals.busy_seconds, totals.bubble_seconds, strict=True)
        ]

    def iterate_intervals(self, begin: float = -inf, end: float = inf) -> Iterator[Interval]:
        """Yield time intervals in which the busy stages and the available work do not change.

        Intervals are limited to the run, in order of time and without gaps, up to the last event.

        Args:
            begin: Begin in seconds of the run's clock.
            end: End in seconds of the run's clock.
        """
        begin, end = max(begin, self.begin_time()), min(end, self.end_time())
        sweep = IntervalSweep(self.max_stages(), begin)
        for time, stage, value in self._changes():
            interval = sweep.advance(min(time, end))
            if interval is not None:
                yield interval
            sweep.apply(stage, value)

    def _changes(self) -> list[tuple[float, int | None, int]]:
        """Return times and changes, as BubbleTotals applies them, in order of time.

        At one time a change of the available parallelism is first.
        """
        changes: list[tuple[float, int | None, int]] = [
            (time, None, stages) for time, stages in self.parallelism
        ]
        for stage, start, end in iterate_stage_times(self.micro_batches):
            changes.append((start, stage, 1))
            changes.append((end, stage, -1))
        changes.sort(key=itemgetter(0))
        return changes


def build_run_record(events: Iterable[StepLogEvent], warm_ups: bool = False) -> RunRecord:
    """Build the record of a run from its step log, a log of scheduler calls and step times.

    A request that was submitted again after a restart is one request with one timeline.

    Args:
        events: Events of the step log.
        warm_ups: True to include warm-up requests and their micro-batches.

    Raises:
        ValueError: The log does not begin with a start event.
    """
    iterator = iter(events)
    start = next(iterator, None)
    if not isinstance(start, StartEvent):
        raise ValueError("a step log has to begin with its start")
    reader = _Reader(start, skips_warm_ups=not warm_ups)
    for event in iterator:
        reader.read(event)
    return reader.run


class _Reader:
    """Builds a run event by event."""

    def __init__(self, start: StartEvent, skips_warm_ups: bool) -> None:
        self._micro_batches: list[MicroBatch] = []
        self.run = RunRecord(start, micro_batches=self._micro_batches)
        self._max_stages = len(start.layers)
        self._skips_warm_ups = skips_warm_ups
        self._warm_ups = start.warm_ups if skips_warm_ups else 0
        """Warm-up requests that are still to come."""
        self._steps: dict[int, MicroBatch] = {}
        self._unplanned: list[ServedRequest | MicroBatch | StageReport | DepthChange] = []
        """Events since the last schedule."""
        self._news = start.time
        """When the last of it came."""
        self._last_time = start.time
        """Time of the last event, or of the last end of a step."""
        self._rows: dict[int, list[ScheduledRow]] = {}
        """Rows of the steps in flight, by step."""
        self._prefilled: dict[int, int] = {}
        """By sequence, the newest num_preemptions whose prefill was planned to its end."""
        self._served: dict[int, ServedRequest] = {}
        """Requests of the present epoch, by sequence; `run.requests` has them by the sequence
        of their first submission."""
        self._stop_ids: dict[int, list[int]] = {}
        """Stop ids of the unfinished sequences; results of others are ignored."""
        self._adds: dict[int, tuple[AddEvent, range]] = {}
        """First submission of each request and the sequences of its latest one, by the first of
        these."""
        self._resumed = ResumedRequestFinder([])
        self._unfinished: dict[int, list[ServedRequest]] = {}
        """Sequences that were unfinished at the last restart, in order, by the first sequence of
        the request's first submission."""
        self._earlier_preemptions: dict[int, int] = {}
        """Preemptions of a resumed sequence in earlier epochs."""
        self._commit_times: dict[int, float] = {}
        """Time of the last commit of each sequence of the present epoch."""

    def read(self, event: StepLogEvent) -> None:
        """Add one event to the run."""
        if isinstance(event, AddEvent | AbortEvent | CommitEvent | StageTimesEvent):
            self._news = event.time
        match event:
            case AddEvent():
                self._add(event)
            case ScheduleEvent():
                self._schedule(event)
            case StageTimesEvent(stage=stage, steps=steps):
                self.run.stage_reports.append(StageReport(stage, steps))
                self._unplanned.append(self.run.stage_reports[-1])
                for times in steps:
                    self._steps[times.step].stage_times[stage] = times
            case DepthEvent(depth=depth, max_prefill_tokens=max_tokens, is_mixed=is_mixed):
                self.run.depth_changes.append(DepthChange(depth, max_tokens, is_mixed))
                self._unplanned.append(self.run.depth_changes[-1])
            case CommitEvent():
                self._commit(event)
            case AbortEvent(seqs=seqs):
                for seq in seqs:
                    self._stop_ids.pop(seq, None)
            case RestartEvent():
                self._restart(event)
            case StartEvent():
                pass
        if isinstance(event, StageTimesEvent):  # Of earlier moments.
            self._last_time = max([self._last_time, *(step.end for step in event.steps)])
        else:
            self._last_time = event.time

    def _restart(self, restart: RestartEvent) -> None:
        """Forget what was in flight, and keep the unfinished requests to recognize them."""
        self.run.restarts.append(restart)
        self._max_stages = max(self._max_stages, len(restart.layers))
        self._set_parallelism(self._last_time, 0)
        self._unfinished = {
            add.seq: [self._served[seq] for seq in seqs if self._is_unfinished(seq)]
            for add, seqs in self._adds.values()
        }
        self._resumed = ResumedRequestFinder(
            add for add, _ in self._adds.values() if self._unfinished[add.seq]
        )
        self._warm_ups = restart.warm_ups if self._skips_warm_ups else 0
        self._news = restart.time
        for state in (
            self._steps, self._rows, self._prefilled, self._served, self._stop_ids, self._adds,
            self._earlier_preemptions, self._commit_times,
        ):  # fmt: skip
            state.clear()
        self._unplanned.clear()

    def _is_unfinished(self, seq: int) -> bool:
        served = self._served.get(seq)
        return (
            seq in self._stop_ids
            and served is not None
            and served.line.num_tokens < served.max_tokens
        )

    def _add(self, add: AddEvent) -> None:
        if self._warm_ups:
            self._warm_ups -= 1
            return
        original = self._resumed.pop_original(add)
        self._adds[add.seq] = original or add, range(add.seq, add.seq + add.n)
        living = [] if original is None else self._unfinished[original.seq]
        for index in range(add.n):
            seq = add.seq + index
            output = add.outputs[index] if add.outputs else []
            if index < len(living):
                served = living[index]
                served.num_resumptions += 1
                self._earlier_preemptions[seq] = served.num_preemptions
            else:
                served = self.run.requests[seq] = ServedRequest(
                    len(add.prompt), add.max_tokens, RequestTimeline(arrival_time(add))
                )
                self._unplanned.append(served)
            _set_num_tokens(served.line, len(output), add.time)
            self._served[seq] = served
            self._stop_ids[seq] = add.stop_ids

    def _set_parallelism(self, time: float, parallelism: int) -> None:
        changes = self.run.parallelism
        if parallelism != (changes[-1][1] if changes else 0):
            changes.append((time, parallelism))

    def _schedule(self, event: ScheduleEvent) -> None:
        plan = event.plan
        self._set_parallelism(event.time, event.parallelism)
        for unplanned in self._unplanned:
            unplanned.received_time = self._news
        self._unplanned = []
        if plan is None:
            return
        decodes = count_tokens(
            row for row in plan.rows if self._prefilled.get(row.seq) == row.num_preemptions
        )
        work = compute_stage_work(plan.step, plan.rows)
        stages: list[StepTime | None] = [None] * self._max_stages
        step = MicroBatch(event.time, work, work.num_tokens - decodes, decodes, stages)
        step.trigger_time = self._news
        self._steps[plan.step] = step
        if any(row.seq in self._served for row in plan.rows):
            self._micro_batches.append(step)
        self._rows[plan.step] = plan.rows
        for row in plan.rows:
            if row.should_sample:
                self._prefilled[row.seq] = row.num_preemptions
            served = self._served.get(row.seq)
            if served is not None:
                num_preemptions = self._earlier_preemptions.get(row.seq, 0) + row.num_preemptions
                last_commit_time = self._commit_times.get(row.seq, event.time)
                served.record_schedule(num_preemptions, event.time, last_commit_time)

    def _commit(self, event: CommitEvent) -> None:
        result = event.result
        step = self._steps[result.step]
        step.committed_time = event.time
        self._unplanned.append(step)
        rows = self._rows.pop(result.step)
        for row in rows:
            self._commit_times[row.seq] = event.time
        if result.error:
            for row in rows:
                self._stop_ids.pop(row.seq, None)
        for sampled in result.sampled_tokens:
            self._sample(sampled, event.time)

    def _sample(self, sampled: SampledToken, now: float) -> None:
        stop_ids = self._stop_ids.get(sampled.seq)
        if stop_ids is None:
            return
        served = self._served[sampled.seq]
        if sampled.error:
            del self._stop_ids[sampled.seq]
            return
        for token_id in (sampled.token_id, *sampled.further_token_ids):
            served.line.record_output(now)
            if token_id in stop_ids:
                del self._stop_ids[sampled.seq]
                return


def _set_num_tokens(line: RequestTimeline, num_tokens: int, now: float) -> None:
    """Make the timeline of a resumed request agree with the output that its client has.

    A killed driver leaves steps out of the log whose output the client has, and logs steps whose
    output the client has not.
    """
    num_extra = line.num_tokens - num_tokens
    if num_extra > 0:
        del line.times[max(0, len(line.times) - num_extra) :]
        line.num_tokens = num_tokens
    else:
        line.record_output(now, -num_extra)


class StepCosts(NamedTuple):
    """Measured times of one step in seconds: planning, each stage, each link, return of results."""

    step: MicroBatch
    plan_seconds: float | None
    """Time from the event that led the driver to plan until the first stage's start; None if that
    stage was busy."""
    stage_seconds: list[float]
    """Time on each stage until the step's end: from its start or, if the stage was busy when the
    input arrived, from the end of the previous step, which includes the overhead between steps."""
    link_seconds: list[float | None]
    """Time from each stage's end until the next one's start; None if that one was busy."""
    return_seconds: float
    """Time from the last stage's end until the driver has received the result."""
    num_arrivals: list[int]
    """Number of requests that arrived while each stage was computing the step."""


def measure_step_costs(run: RunRecord) -> Iterator[StepCosts]:
    """Yield the measured driver, stage and link times of each step of a run, in order.

    Steps with a missing time are left out.

    Args:
        run: Record of the run.
    """
    steps = [
        step
        for step in run.micro_batches
        if all(step.stage_times) and step.committed_time is not None
    ]
    all_spans = [_find_spans(step) for step in steps]
    previous_ends = zip(*map(_find_previous_ends, zip(*all_spans, strict=True)), strict=True)
    arrivals = sorted(served.line.arrival for served in run.requests.values())
    for step, spans, earlier in zip(steps, all_spans, previous_ends, strict=True):
        waits: list[float | None] = []
        stages, num_arrivals = [], []
        reached = step.trigger_time
        for (start, end), previous_end in zip(spans, earlier, strict=True):
            busy = previous_end > reached
            waits.append(None if busy else max(0.0, start - reached))
            begin = previous_end if busy else start
            stages.append(end - begin)
            num_arrivals.append(bisect(arrivals, end) - bisect(arrivals, begin))
            reached = end
        last = step.stage_times[-1]
        assert last is not None, "the step is complete"
        return_seconds = max(0.0, step.received_time - last.end)
        yield StepCosts(step, waits[0], stages, waits[1:], return_seconds, num_arrivals)


def _find_spans(step: MicroBatch) -> list[tuple[float, float]]:
    """Return start and end of a complete step on each stage."""
    times = [time for time in step.stage_times if time is not None]
    # A stage may note its end when the next one has begun already: it had handed over by then.
    starts = [time.start for time in times[1:]] + [inf]
    return [(time.start, min(time.end, start)) for time, start in zip(times, starts, strict=True)]


def _find_previous_ends(spans: Sequence[tuple[float, float]]) -> list[float]:
    """Return, for each step of a stage, the end of the step that the stage computed before it.

    With two lanes that may be a later step.
    """
    previous_ends = [0.0] * len(spans)
    end = 0.0
    for index in sorted(range(len(spans)), key=lambda index: spans[index][0]):
        previous_ends[index] = end
        end = spans[index][1]
    return previous_ends
