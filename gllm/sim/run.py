"""One run, real or simulated, as its step log tells it.

Owns what is read off a log: timelines of requests, micro-batches with their times, how busy each
stage was and what it lost to bubbles. Knows nothing of where the log came from.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from gllm.metrics import Timeline
from gllm.scheduler.plan import StepTime
from gllm.scheduler.work import Work, work_of
from gllm.step_log import Abort, Add, Commit, Event, Schedule, Start, Times


@dataclass
class Served:
    """One sequence."""

    prompt_tokens: int
    max_tokens: int
    line: Timeline
    preempted: int = 0
    """Times it lost its blocks."""


@dataclass
class Step:
    """One micro-batch."""

    planned: float
    work: Work
    prefill_tokens: int
    """Tokens of prompts, and of preempted sequences computed again."""
    decode_tokens: int
    stages: list[StepTime | None]
    """None where the log ends before the stage's time came."""
    committed: float | None = None


@dataclass
class StageUse:
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
class Run:
    """A whole run."""

    start: Start
    requests: dict[int, Served] = field(default_factory=dict)
    steps: list[Step] = field(default_factory=list)
    parallelism: list[tuple[float, int]] = field(default_factory=list)
    """(time, stages that the work at hand could keep busy from then on)."""

    @property
    def begin(self) -> float:
        """When the first request came."""
        return min((served.line.arrival for served in self.requests.values()), default=0.0)

    @property
    def end(self) -> float:
        """When the last token came."""
        return max((s.line.times[-1] for s in self.requests.values() if s.line.times), default=0.0)

    def stage_uses(self) -> list[StageUse]:
        """What each stage did between the run's begin and end.

        At every moment the work at hand could keep `parallelism` stages busy, whatever the plans
        were; what is missing to that number is bubble, shared by the stages that are idle.
        """
        count = len(self.start.layers)
        uses = [StageUse(span=self.end - self.begin) for _ in range(count)]
        busy: set[int] = set()
        wanted, before = 0, self.begin
        for time, stage, value in self._changes():
            now = min(max(time, self.begin), self.end)
            elapsed, before = now - before, now
            for each in busy:
                uses[each].busy += elapsed
            idle = count - len(busy)
            if wanted > len(busy):
                share = elapsed * (wanted - len(busy)) / idle
                for each in set(range(count)) - busy:
                    uses[each].bubble += share
            if stage is None:
                wanted = value
            elif value:
                busy.add(stage)
            else:
                busy.discard(stage)
        return uses

    def _changes(self) -> Iterator[tuple[float, int | None, int]]:
        """In order of time: (time, stage, 1 begins or 0 ends), or (time, None, parallelism)."""
        changes: list[tuple[float, int, int | None, int]] = []
        for step in self.steps:
            for stage, times in enumerate(step.stages):
                if times is not None:
                    changes.append((times.end, 0, stage, 0))
                    changes.append((times.start, 2, stage, 1))
        changes += [(time, 1, None, value) for time, value in self.parallelism]
        changes.sort(key=lambda change: change[:2])
        return ((time, stage, value) for time, _, stage, value in changes)


def run_of(events: Iterable[Event]) -> Run:
    """Read a run off its log. Raises ValueError where the log does not begin with a start.

    Warm-up requests and their micro-batches are left out.
    """
    iterator = iter(events)
    start = next(iterator, None)
    if not isinstance(start, Start):
        raise ValueError("a step log has to begin with its start")
    reader = _Reader(Run(start))
    for event in iterator:
        reader.read(event)
    reader.run.steps = [step for step in reader.run.steps if step.work.step not in reader.ignored]
    return reader.run


class _Reader:
    """Builds a run event by event."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.ignored: set[int] = set()
        """Steps of warm-up requests."""
        self._warm_ups = run.start.warm_ups
        self._steps: dict[int, Step] = {}
        self._decoding: set[int] = set()
        self._sampling: dict[int, list[int]] = {}
        """Sequences that a step in flight samples for."""

    def read(self, event: Event) -> None:
        """Take one event in."""
        match event:
            case Add():
                self._add(event)
            case Schedule():
                self._schedule(event)
            case Times(stage=stage, steps=steps):
                for times in steps:
                    self._steps[times.step].stages[stage] = times
            case Commit():
                self._commit(event)
            case Abort() | Start():
                pass

    def _add(self, add: Add) -> None:
        if self._warm_ups:
            self._warm_ups -= 1
            return
        for seq in range(add.seq, add.seq + add.n):
            self.run.requests[seq] = Served(len(add.prompt), add.max_tokens, Timeline(add.time))

    def _schedule(self, event: Schedule) -> None:
        run, plan = self.run, event.plan
        run.parallelism.append((event.time, event.parallelism))
        if plan is None:
            return
        decodes = sum(row.seq in self._decoding for row in plan.rows)
        work = work_of(plan.step, plan.rows)
        stages: list[StepTime | None] = [None] * len(run.start.layers)
        step = Step(event.time, work, work.tokens - decodes, decodes, stages)
        self._steps[plan.step] = step
        run.steps.append(step)
        if not any(row.seq in run.requests for row in plan.rows):
            self.ignored.add(plan.step)
        for row in plan.rows:
            served = run.requests.get(row.seq)
            if served is not None and row.epoch > served.preempted:
                served.preempted = row.epoch
                self._decoding.discard(row.seq)

    def _commit(self, event: Commit) -> None:
        self._steps[event.result.step].committed = event.time
        for sampled in event.result.sampled:
            served = self.run.requests.get(sampled.seq)
            if served is not None and not sampled.error:
                served.line.mark(event.time)
                self._decoding.add(sampled.seq)
