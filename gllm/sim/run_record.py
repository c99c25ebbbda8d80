"""One run, real or simulated, as its step log tells it.

Owns what is read off a log: timelines of requests, micro-batches with their times, how busy each
stage was and what it lost to bubbles. Knows nothing of where the log came from.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from math import inf
from operator import attrgetter

from gllm.observability.bubbles import ActivityChange, Interval, IntervalSweep
from gllm.observability.latency import RequestTimeline
from gllm.observability.step_log import (
    AbortEvent,
    AddEvent,
    CommitEvent,
    ScheduleEvent,
    StageTimesEvent,
    StartEvent,
    StepLogEvent,
)
from gllm.scheduler.plan import SampledToken, ScheduledRow, StepTime
from gllm.scheduler.stage_work import StageWork, compute_stage_work


@dataclass
class ServedRequest:
    """A sequence of a run."""

    num_prompt_tokens: int
    max_tokens: int
    line: RequestTimeline
    received_time: float = 0.0
    """When the driver had heard all that came with the request."""
    num_preemptions: int = 0
    """StageTimesEvent it lost its blocks."""


@dataclass
class MicroBatch:
    """A micro-batch of a run."""

    planned_time: float
    work: StageWork
    num_prefill_tokens: int
    """Tokens of prompts, and of preempted sequences computed again."""
    num_decode_tokens: int
    stage_times: list[StepTime | None]
    """None where the log ends before the stage's time came."""
    committed_time: float | None = None
    trigger_time: float = 0.0
    """When the driver had heard the news after which it planned."""
    received_time: float = 0.0
    """When the driver had heard all that came with the result."""


@dataclass
class StageReport:
    """Step times that a stage reported to the driver."""

    stage: int
    steps: list[StepTime]
    received_time: float = 0.0
    """When the driver had heard all that came with it."""


@dataclass
class StageUsage:
    """A stage's seconds over a run."""

    busy: float = 0.0
    bubble: float = 0.0
    """Idle though work was there that could have kept it busy."""
    span: float = 0.0
    """Length of the run."""

    @property
    def busy_share(self) -> float:
        """0..1."""
        return self.busy / self.span if self.span else 0.0

    @property
    def bubble_share(self) -> float:
        """0..1; what is missing to one with `busy_share` is time without work."""
        return self.bubble / self.span if self.span else 0.0


@dataclass
class RunRecord:
    """A whole run."""

    start: StartEvent
    requests: dict[int, ServedRequest] = field(default_factory=dict)
    micro_batches: list[MicroBatch] = field(default_factory=list)
    stage_reports: list[StageReport] = field(default_factory=list)
    parallelism: list[tuple[float, int]] = field(default_factory=list)
    """(time, stages that the work at hand could keep busy from then on)."""

    @property
    def begin(self) -> float:
        """When the first request came."""
        return min((served.line.arrival for served in self.requests.values()), default=0.0)

    @property
    def end(self) -> float:
        """When the last token came; the beginning, where none did."""
        lines = [served.line for served in self.requests.values()]
        return max((line.times[-1] for line in lines if line.times), default=self.begin)

    def stage_usages(self) -> list[StageUsage]:
        """Return the busy and bubble time of each stage."""
        uses = [StageUsage(span=self.end - self.begin) for _ in self.start.layers]
        for spell in self.spells():
            seconds = spell.end - spell.begin
            for stage in spell.busy:
                uses[stage].busy += seconds
            for stage in spell.idle:
                uses[stage].bubble += seconds * spell.bubble_share
        return uses

    def spells(self, begin: float = -inf, end: float = inf) -> Iterator[Interval]:
        """Yield the states of the stages from `begin` to `end`, limited to the run.

        Intervals are in order of time and without gaps, up to the last event on stages and work.
        """
        begin, end = max(begin, self.begin), min(end, self.end)
        sweep = IntervalSweep(len(self.start.layers), begin)
        for change in sorted(self._changes(), key=attrgetter("time")):
            spell = sweep.advance(min(change.time, end))
            if spell is not None:
                yield spell
            sweep.apply(change)

    def _changes(self) -> Iterator[ActivityChange]:
        """Yield the changes of available parallelism, then those of the stages."""
        for time, wanted in self.parallelism:
            yield ActivityChange(time, None, wanted)
        for step in self.micro_batches:
            for stage, times in enumerate(step.stage_times):
                if times is not None:
                    yield ActivityChange(times.start, stage, 1)
                    yield ActivityChange(times.end, stage, -1)


def build_run_record(events: Iterable[StepLogEvent], warm_ups: bool = False) -> RunRecord:
    """Read a run off its log. Raises ValueError where the log does not begin with a start.

    Warm-up requests and their micro-batches are left out, unless `warm_ups`.
    """
    iterator = iter(events)
    start = next(iterator, None)
    if not isinstance(start, StartEvent):
        raise ValueError("a step log has to begin with its start")
    reader = _Reader(RunRecord(start), 0 if warm_ups else start.warm_ups)
    for event in iterator:
        reader.read(event)
    reader.run.micro_batches = [
        step for step in reader.run.micro_batches if step.work.step not in reader.ignored
    ]
    return reader.run


class _Reader:
    """Builds a run event by event."""

    def __init__(self, run: RunRecord, warm_ups: int) -> None:
        self.run = run
        self.ignored: set[int] = set()
        """Steps of warm-up requests."""
        self._warm_ups = warm_ups
        self._steps: dict[int, MicroBatch] = {}
        self._heard: list[ServedRequest | MicroBatch | StageReport] = []
        """Events since the last schedule."""
        self._news = run.start.time
        """When the last of it came."""
        self._rows: dict[int, list[ScheduledRow]] = {}
        """Rows of the steps in flight, by step."""
        self._prefilled: dict[int, int] = {}
        """By sequence, the newest epoch whose prefill was planned to its end."""
        self._stop_ids: dict[int, list[int]] = {}
        """Stop ids of the unfinished sequences; results of others are ignored."""

    def read(self, event: StepLogEvent) -> None:
        """Take one event in."""
        if isinstance(event, AddEvent | AbortEvent | CommitEvent | StageTimesEvent):
            self._news = event.time
        match event:
            case AddEvent():
                self._add(event)
            case ScheduleEvent():
                self._schedule(event)
            case StageTimesEvent(stage=stage, steps=steps):
                self.run.stage_reports.append(StageReport(stage, steps))
                self._heard.append(self.run.stage_reports[-1])
                for times in steps:
                    self._steps[times.step].stage_times[stage] = times
            case CommitEvent():
                self._commit(event)
            case AbortEvent(seqs=seqs):
                for seq in seqs:
                    self._stop_ids.pop(seq, None)
            case StartEvent():
                pass

    def _add(self, add: AddEvent) -> None:
        if self._warm_ups:
            self._warm_ups -= 1
            return
        for seq in range(add.seq, add.seq + add.n):
            self.run.requests[seq] = ServedRequest(
                len(add.prompt), add.max_tokens, RequestTimeline(add.time)
            )
            self._stop_ids[seq] = add.stop_ids
            self._heard.append(self.run.requests[seq])

    def _schedule(self, event: ScheduleEvent) -> None:
        run, plan = self.run, event.plan
        run.parallelism.append((event.time, event.parallelism))
        for each in self._heard:
            each.received_time = self._news
        self._heard = []
        if plan is None:
            return
        decodes = sum(self._prefilled.get(row.seq) == row.epoch for row in plan.rows)
        work = compute_stage_work(plan.step, plan.rows)
        stages: list[StepTime | None] = [None] * len(run.start.layers)
        step = MicroBatch(event.time, work, work.num_tokens - decodes, decodes, stages)
        step.trigger_time = self._news
        self._steps[plan.step] = step
        run.micro_batches.append(step)
        if not any(row.seq in run.requests for row in plan.rows):
            self.ignored.add(plan.step)
        self._rows[plan.step] = plan.rows
        for row in plan.rows:
            if row.should_sample:
                self._prefilled[row.seq] = row.epoch
            served = run.requests.get(row.seq)
            if served is not None:
                served.num_preemptions = row.epoch

    def _commit(self, event: CommitEvent) -> None:
        result = event.result
        step = self._steps[result.step]
        step.committed_time = event.time
        self._heard.append(step)
        rows = self._rows.pop(result.step)
        if result.error:
            for row in rows:
                self._stop_ids.pop(row.seq, None)
        for sampled in result.sampled_tokens:
            self._sample(sampled, event.time)

    def _sample(self, sampled: SampledToken, now: float) -> None:
        stop_ids = self._stop_ids.get(sampled.seq)
        if stop_ids is None:
            return
        served = self.run.requests[sampled.seq]
        if not sampled.error:
            served.line.record_output(now)
        if sampled.error or sampled.token_id in stop_ids:
            del self._stop_ids[sampled.seq]
