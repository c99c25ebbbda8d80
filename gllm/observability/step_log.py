"""The step log: every call of the scheduler and every stage's time, as JSON lines.

Owns the format of one run's record, written by the driver and by the simulator alike, and read by
whatever looks at a run afterwards. Times are seconds of one monotonic clock. Knows nothing of what
is made of it.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import StepOutput, StepPlan, StepResult, StepTime
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest

BUFFER_BYTES = 2**18
ASYNC_SCHEDULING, ASYNC_SCHEDULING_ON_DISK = b'"async_scheduling":', b'"lookahead":'
"""Key of a scheduler option in JSON, and the one that files have: keys on disk never change."""


class StartEvent(msgspec.Struct, frozen=True, tag_field="event", tag="start"):
    """The first line: what was run."""

    time: float
    model: str
    layers: list[int]
    """Of each stage."""
    scheduler: SchedulerConfig
    """Resolved."""
    source: str
    """`driver` or `simulator`."""
    warm_ups: int = 0
    """Requests at the beginning that nobody asked for."""


class AddEvent(msgspec.Struct, frozen=True, tag_field="event", tag="add"):
    """A request came: the fields of scheduler.sequence.Request."""

    time: float
    seq: int
    prompt: list[int]
    max_tokens: int
    stop_ids: list[int] = []
    priority: int = 0
    cache_salt: str = ""
    n: int = 1
    reads_cache: bool = True


class AbortEvent(msgspec.Struct, frozen=True, tag_field="event", tag="abort"):
    """Sequences were ended from outside."""

    time: float
    seqs: list[int]


class ResetPrefixCacheEvent(msgspec.Struct, frozen=True, tag_field="event", tag="forget"):
    """The prefix cache was emptied."""

    time: float


class ScheduleEvent(msgspec.Struct, frozen=True, tag_field="event", tag="schedule"):
    """A plan was asked for; None where there was none."""

    time: float
    plan: StepPlan | None
    parallelism: int
    """Stages that the work at hand could keep busy after it (Scheduler.available_parallelism)."""


class CommitEvent(msgspec.Struct, frozen=True, tag_field="event", tag="commit"):
    """A step's result came back."""

    time: float
    result: StepResult


class StageTimesEvent(msgspec.Struct, frozen=True, tag_field="event", tag="times"):
    """What a stage computed since its last line."""

    time: float
    """When the driver heard of it."""
    stage: int
    steps: list[StepTime]


StepLogEvent = (
    StartEvent
    | AddEvent
    | AbortEvent
    | ResetPrefixCacheEvent
    | ScheduleEvent
    | CommitEvent
    | StageTimesEvent
)


class LoggedScheduler(Scheduler):
    """A scheduler whose calls are written down; it decides what the plain one decides.

    write: takes each event, in the order of the calls. clock: seconds now.
    """

    def __init__(
        self,
        config: SchedulerConfig,
        write: Callable[[StepLogEvent], None],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(config)
        self._write = write
        self._clock = clock

    def add(self, request: SchedulerRequest, now: float) -> None:
        """As Scheduler.add; a refused request is not written."""
        super().add(request, now)
        seq, prompt, max_tokens, stop_ids, priority, salt, n, reads = request
        stops = sorted(stop_ids)
        self._write(AddEvent(now, seq, list(prompt), max_tokens, stops, priority, salt, n, reads))

    def abort(self, seqs: list[int]) -> None:
        """As Scheduler.abort."""
        self._write(AbortEvent(self._clock(), seqs))
        super().abort(seqs)

    def reset_prefix_cache(self) -> None:
        """As Scheduler.reset_prefix_cache."""
        self._write(ResetPrefixCacheEvent(self._clock()))
        super().reset_prefix_cache()

    def schedule(self, now: float) -> StepPlan | None:
        """As Scheduler.schedule."""
        plan = super().schedule(now)
        self._write(ScheduleEvent(now, plan, self.available_parallelism()))
        return plan

    def commit(self, result: StepResult) -> StepOutput:
        """As Scheduler.commit."""
        self._write(CommitEvent(self._clock(), result))
        return super().commit(result)

    def record_step_times(self, stage: int, times: list[StepTime]) -> None:
        """As Scheduler.record_step_times."""
        self._write(StageTimesEvent(self._clock(), stage, times))
        super().record_step_times(stage, times)


def to_request(event: AddEvent) -> SchedulerRequest:
    """The request that came."""
    return SchedulerRequest(
        *(event.seq, event.prompt, event.max_tokens, frozenset(event.stop_ids)),
        *(event.priority, event.cache_salt, event.n, event.reads_cache),
    )


def replay_event(scheduler: Scheduler, event: StepLogEvent) -> StepPlan | None:
    """Make the call that an event tells of; the plan, where one was asked for and there is one."""
    match event:
        case ScheduleEvent():
            return scheduler.schedule(event.time)
        case AddEvent():
            scheduler.add(to_request(event), event.time)
        case AbortEvent():
            scheduler.abort(event.seqs)
        case ResetPrefixCacheEvent():
            scheduler.reset_prefix_cache()
        case CommitEvent():
            scheduler.commit(event.result)
        case StageTimesEvent():
            scheduler.record_step_times(event.stage, event.steps)
    return None


class StepLogError(ValueError):
    """A file that is no step log; the message names file, line and fix."""


class StepLogWriter:
    """Writes events to a file. Lines reach the disk when the buffer is full or at `flush`."""

    def __init__(self, path: str | Path) -> None:
        """Raises OSError where the file cannot be written."""
        self._file = open(path, "wb", buffering=BUFFER_BYTES)  # noqa: SIM115
        self._encoder = msgspec.json.Encoder()

    def write(self, event: StepLogEvent) -> None:
        """Append one line."""
        line = self._encoder.encode(event)
        if isinstance(event, StartEvent):
            line = line.replace(ASYNC_SCHEDULING, ASYNC_SCHEDULING_ON_DISK)
        self._file.write(line)
        self._file.write(b"\n")

    def flush(self) -> None:
        """Hand what was written to the system."""
        self._file.flush()

    def close(self) -> None:
        """No more lines."""
        self._file.close()


def read_step_log(path: str | Path) -> Iterator[StepLogEvent]:
    """The events of a file, in the order of the calls.

    The last line may be cut off, as a killed process leaves it. Raises StepLogError for another
    line that is no event, or a file that does not begin with a start; OSError as open does.
    """
    decoder = msgspec.json.Decoder(StepLogEvent)
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines):
        if not line:
            continue
        if number == 0:
            line = line.replace(ASYNC_SCHEDULING_ON_DISK, ASYNC_SCHEDULING)
        try:
            event = decoder.decode(line)
        except msgspec.DecodeError as error:
            if number == len(lines) - 1:
                return
            raise StepLogError(
                f"{path}, line {number + 1}: not a step log's line: {error}"
            ) from None
        if (number == 0) != isinstance(event, StartEvent):
            raise StepLogError(f"{path}, line {number + 1}: a step log has one start, as line 1")
        yield event
