"""Step log: every call of the scheduler and every stage's step times, as JSON lines.

The driver and the simulator write the same format (gllm/observability/logged_scheduler.py). One
file holds all epochs of an engine: a RestartEvent separates them, and step numbers start at 0
after it, because the scheduler is new. Times are seconds of one monotonic clock. An event's `event`
field on disk is the tag of its class.
"""

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Literal

import msgspec

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import StepPlan, StepResult, StepTime

_log = logging.getLogger(__name__)

BUFFER_BYTES = 2**18
"""Size of the file buffer."""
ASYNC_SCHEDULING, ASYNC_SCHEDULING_ON_DISK = b'"async_scheduling":', b'"lookahead":'
"""Key of a scheduler option in JSON, and its key in step logs, which never changes."""


KvTransferCall = Literal[
    "take_fetches",
    "take_pushes",
    "record_fetch_progress",
    "finish_fetch",
    "take_revocations",
    "renew_holds",
    "release_holds",
    "confirm_revocation",
    "hand_off",
    "keep_computed",
    "set_push_threshold",
]
"""Calls of `SchedulerTransfers`, and of `hand_off` and `keep_computed` of Scheduler, that change
the state of transfers, by names that never change in step logs: take_fetches is `start_fetches`,
take_pushes `pop_readable`, take_revocations `pop_revocations`."""
HEADER_PREFIXES = (b'{"event":"start"', b'{"event":"restart"')
"""Beginnings of the lines that contain a configuration."""


class StartEvent(msgspec.Struct, frozen=True, tag_field="event", tag="start"):
    """First event of a step log: the model, its stages and the scheduler configuration."""

    time: float
    model: str
    layers: list[int]
    """Number of layers per stage."""
    scheduler: SchedulerConfig
    """Configuration after `resolve`."""
    source: str
    """`driver` or `simulator`."""
    warm_ups: int = 0
    """Number of warm-up requests at the beginning."""
    output_lengths: dict[int, list[int]] = {}
    """Output lengths, by request class, that the scheduler starts with; empty in a file's first
    line."""
    degrees: list[int] = []
    """Number of tensor-parallel ranks per stage; empty: one per stage."""
    engine: str = ""
    """Name of the engine in a deployment of several engines; empty for a single engine."""
    process_seconds: float = 0.0
    """Age of the driver's process when the event was written; 0 in a simulation."""


class RestartEvent(msgspec.Struct, frozen=True, tag_field="event", tag="restart"):
    """Event of a step log: the engine restarted after a failure, with a new scheduler.

    Steps that were in flight are lost. Each restart starts a new epoch, in which step numbers start
    at 0 again.
    """

    time: float
    epoch: int
    """Number of the epoch that starts."""
    cause: str
    """Failure that caused the restart."""
    num_resumed_requests: int
    """Unfinished requests that waited for the epoch; an AddEvent follows for each that is not
    aborted meanwhile."""
    layers: list[int]
    """Number of layers per stage."""
    scheduler: SchedulerConfig
    """Configuration after `resolve`."""
    warm_ups: int = 0
    """Number of warm-up requests at the beginning of the epoch."""
    output_lengths: dict[int, list[int]] = {}
    """Output lengths of earlier epochs that the scheduler begins with, by class."""
    degrees: list[int] = []
    """Number of tensor-parallel ranks per stage; empty: one per stage."""


class AddEvent(msgspec.Struct, frozen=True, tag_field="event", tag="add"):
    """Event of a step log: a request arrived. The fields are those of `SchedulerRequest`."""

    time: float
    seq: int
    prompt: list[int]
    max_tokens: int
    stop_ids: list[int] = []
    priority: int = 0
    cache_salt: str = ""
    n: int = 1
    reads_cache: bool = True
    outputs: list[list[int]] = []
    age_seconds: float = 0.0
    kv_ticket: int = 0
    kv_source_tokens: int = 0
    is_kv_foreign: bool = False
    predicted_output_tokens: int = 0
    kv_source_ticket: int = 0
    reports_first_chunk: bool = False
    is_ticket_foreign: bool = False
    is_kv_on_disk: bool = False
    client: str = ""
    session: str = ""
    allows_guesses: bool = True


class PrefetchEvent(msgspec.Struct, frozen=True, tag_field="event", tag="prefetch"):
    """Event of a step log: a prefetch of a later request's KV cache from another engine began.

    Records a call of `SchedulerTransfers.prefetch`; the fields are those of `PrefetchRequest`.
    """

    time: float
    ticket: int
    prompt: list[int]
    max_tokens: int
    priority: int = 0
    cache_salt: str = ""
    age_seconds: float = 0.0
    predicted_output_tokens: int = 0
    is_checkpoint: bool = False


class AbortEvent(msgspec.Struct, frozen=True, tag_field="event", tag="abort"):
    """Event of a step log: sequences were aborted."""

    time: float
    seqs: list[int]
    """Ids of the sequences."""


class ResetPrefixCacheEvent(msgspec.Struct, frozen=True, tag_field="event", tag="forget"):
    """Event of a step log: the prefix cache was emptied."""

    time: float


class AdoptEvent(msgspec.Struct, frozen=True, tag_field="event", tag="adopt"):
    """Event of a step log: the prefix cache began with blocks of the epoch before."""

    time: float
    digests: dict[int, str]
    """Prefix-cache hash in hexadecimal by block."""
    tails: dict[int, tuple[str, int]] = {}
    """Hash of the first slots of other blocks in hexadecimal, and how many can be used."""


class DepthEvent(msgspec.Struct, frozen=True, tag_field="event", tag="depth"):
    """Event of a step log: the limit of micro-batches in flight (pipeline depth) changed.

    Records a call of `Scheduler.set_depth`, with its arguments.
    """

    time: float
    depth: int
    """New limit of micro-batches in flight."""
    max_prefill_tokens: int | None
    """New limit of prefill tokens per micro-batch; None: only the policy limits them."""
    is_mixed: bool = False
    """With two lanes: micro-batches have decodes and prefill from now on."""


class ScheduleEvent(msgspec.Struct, frozen=True, tag_field="event", tag="schedule"):
    """Event of a step log: the scheduler was called for a step plan."""

    time: float
    plan: StepPlan | None
    """The returned plan; None if no step could be scheduled."""
    parallelism: int
    """Number of stages that the available work could keep busy after the call."""


class CommitEvent(msgspec.Struct, frozen=True, tag_field="event", tag="commit"):
    """Event of a step log: the result of a step (sampled tokens) reached the scheduler."""

    time: float
    result: StepResult


class KvTransferEvent(msgspec.Struct, frozen=True, tag_field="event", tag="kv"):
    """Event of a step log: the scheduler's KV-transfer state changed.

    Records a call of `SchedulerTransfers`; calls that change nothing are left out.
    """

    time: float
    call: KvTransferCall
    ids: list[int] = []
    """Ids of sequences for calls about a fetch, otherwise of KV reservations (tickets). For
    `take_...` calls: those that the call returned; for `hand_off` the sequence and its
    ticket; for `keep_computed` these and the number of tokens; for `set_push_threshold` that."""
    is_ok: bool = True
    """Argument of `finish_fetch`."""


class StageTimesEvent(msgspec.Struct, frozen=True, tag_field="event", tag="times"):
    """Event of a step log: start and end times of the steps that a stage computed.

    Contains the steps since the stage's previous report.
    """

    time: float
    """Time at which the driver received the report."""
    stage: int
    steps: list[StepTime]
    """Number, start and end time of each step."""


StepLogEvent = (
    StartEvent
    | RestartEvent
    | AddEvent
    | AbortEvent
    | ResetPrefixCacheEvent
    | AdoptEvent
    | DepthEvent
    | ScheduleEvent
    | CommitEvent
    | KvTransferEvent
    | PrefetchEvent
    | StageTimesEvent
)


class StepLogError(ValueError):
    """Raised if a file is not a valid step log; the message names the file and the line."""


class StepLogWriter:
    """Writes step-log events to a file as JSON lines, buffered until `flush`.

    Args:
        path: The file.
        appends: Append to the file instead of replacing it.

    Raises:
        OSError: The file cannot be written. Its methods raise it too.
    """

    def __init__(self, path: str | Path, appends: bool = False) -> None:
        self._file = open(path, "ab" if appends else "wb", buffering=BUFFER_BYTES)  # noqa: SIM115
        self._encoder = msgspec.json.Encoder()

    def write(self, event: StepLogEvent) -> None:
        """Append an event to the buffer as one line of JSON."""
        line = self._encoder.encode(event)
        if isinstance(event, StartEvent | RestartEvent):
            line = line.replace(ASYNC_SCHEDULING, ASYNC_SCHEDULING_ON_DISK)
        self._file.write(line)
        self._file.write(b"\n")

    def flush(self) -> None:
        """Write the buffered lines to the file."""
        self._file.flush()

    def close(self) -> None:
        """Write the buffered lines and close the file."""
        self._file.close()


class DriverStepLog:
    """Step log of a driver, which serves on if the log cannot be written.

    The first error is a warning and ends the log of this epoch; the next epoch tries again.
    """

    def __init__(self, path: str | Path, open_log: Callable[[], StepLogWriter]) -> None:
        """Open the log.

        Args:
            path: The file, for the warning.
            open_log: Opens the file; may raise OSError.
        """
        self._path = path
        self._log: StepLogWriter | None = None
        """None after an error."""
        try:
            self._log = open_log()
        except OSError as error:
            self._end(error)

    def write(self, event: StepLogEvent) -> None:
        """Append an event."""
        self._try(lambda log: log.write(event))

    def flush(self) -> None:
        """Write the buffered events to the file."""
        self._try(StepLogWriter.flush)

    def close(self) -> None:
        """Write the buffered events and close the file."""
        self._try(StepLogWriter.close)

    def _try(self, operation: Callable[[StepLogWriter], None]) -> None:
        """Do something with the log, unless it has ended; an error ends it."""
        if self._log is not None:
            try:
                operation(self._log)
            except OSError as error:
                self._end(error)

    def _end(self, error: OSError) -> None:
        log, self._log = self._log, None
        if log is not None:
            # It tries once more to write what is buffered, and closes the file nevertheless.
            with suppress(OSError):
                log.close()
        _log.warning(
            "the step log %s ends, because it cannot be written: %s", self._path, error.strerror
        )


def continue_step_log(
    path: str | Path, start: StartEvent, restart: RestartEvent, buffer_bytes: int = BUFFER_BYTES
) -> DriverStepLog:
    """Open a run's step log for appending, when the engine starts or restarts.

    Appends `start` if the file has no event yet, otherwise `restart`. Removes a truncated last
    line, which a killed process leaves. The file must have been emptied at the start of the run.

    Args:
        path: The file.
        start: First event of the log.
        restart: First event after a restart.
        buffer_bytes: Size of the chunks in which the end of the file is read.
    """
    is_empty = True

    def open_log() -> StepLogWriter:
        nonlocal is_empty
        # Pipes and terminals cannot be read: their readers get a start per epoch.
        is_empty = not Path(path).is_file() or not _remove_torn_line(path, buffer_bytes)
        return StepLogWriter(path, appends=True)

    log = DriverStepLog(path, open_log)
    log.write(start if is_empty else restart)
    # A driver that is killed at once must not leave the log without its beginning.
    log.flush()
    return log


def _remove_torn_line(path: str | Path, buffer_bytes: int) -> int:
    """Truncate a file behind its last line break; return the number of bytes that are left."""
    with open(path, "r+b") as file:
        end = file.seek(0, os.SEEK_END)
        num_bytes = 0
        while end and not num_bytes:
            begin = max(0, end - buffer_bytes)
            file.seek(begin)
            newline = file.read(end - begin).rfind(b"\n")
            num_bytes = begin + newline + 1 if newline >= 0 else 0
            end = begin
        file.truncate(num_bytes)
    return num_bytes


def read_step_log(path: str | Path) -> Iterator[StepLogEvent]:
    """Yield the events of a step log in the order in which they were written.

    A truncated last line, which a killed process leaves, is ignored.

    Raises:
        StepLogError: Another line is not an event, or the first event is not a StartEvent.
        OSError: The file cannot be read.
    """
    decoder = msgspec.json.Decoder(StepLogEvent)
    lines = Path(path).read_bytes().split(b"\n")
    for number, line in enumerate(lines):
        if not line:
            continue
        if line.startswith(HEADER_PREFIXES):
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


def split_epochs(events: Iterable[StepLogEvent]) -> list[list[StepLogEvent]]:
    """Split the events of a step log at engine restarts: one list per epoch.

    Each list begins with a StartEvent; it is derived from the RestartEvent for all but the first.
    """
    epochs: list[list[StepLogEvent]] = []
    start: StartEvent | None = None
    for event in events:
        if isinstance(event, StartEvent):
            start = event
        elif isinstance(event, RestartEvent) and start is not None:
            shared = set(StartEvent.__struct_fields__) & set(RestartEvent.__struct_fields__)
            changes = {name: getattr(event, name) for name in shared}
            event = start = msgspec.structs.replace(start, **changes)
        if event is start:
            epochs.append([])
        epochs[-1].append(event)
    return epochs
