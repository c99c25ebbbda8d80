"""Micro-batches of a run, and their numeric columns for simulated runs.

An object per micro-batch and stage would take ten times the memory of the numbers, and each garbage
collection would visit it.
"""

from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from math import isnan, nan
from typing import overload

from gllm.scheduler.plan import StepTime
from gllm.scheduler.stage_work import StageWork


@dataclass(slots=True)
class MicroBatch:
    """Record of one micro-batch of a run: its tokens, and its times on the driver and the stages.

    Times are seconds of the run's clock.
    """

    planned_time: float
    """Time at which the scheduler planned it."""
    work: StageWork
    num_prefill_tokens: int
    """Prompt tokens, and tokens of preempted sequences that are computed again."""
    num_decode_tokens: int
    stage_times: list[StepTime | None]
    """Start and end on each stage; None if the log ends before the stage reported."""
    committed_time: float | None = None
    """Time at which its output tokens were added to the sequences; None if the run ended before."""
    trigger_time: float = 0.0
    """Time at which the driver received the last event before it planned."""
    received_time: float = 0.0
    """Time at which the driver had received the result and all messages that arrived with it."""
    kv_usage: float | None = None
    """Share of KV blocks that sequences held after the schedule, 0..1; None where a log, which does
    not have it, is the source."""


NUM_TIMES = 5
"""Columns of times: planned, trigger, committed, received, and the KV use."""
COMMITTED, RECEIVED = 2, 3
"""Columns of the times that are set after the schedule."""
NUM_COUNTS = 9
"""Columns of counts: those of StageWork without the chunks, then prefill and decode tokens."""


class MicroBatchTable(Sequence[MicroBatch]):
    """Memory-saving sequence of MicroBatch records, stored as one numeric array per field.

    Reading an entry creates its MicroBatch.

    Args:
        num_stages: Number of pipeline stages.
    """

    def __init__(self, num_stages: int) -> None:
        self._num_stages = num_stages
        self._times = array("d")
        self._stage_times = array("d")
        """Start and end per stage; NaN if unknown."""
        self._no_stage_times = array("d", [nan] * (2 * num_stages))
        self._counts = array("q")
        self._chunks: list[tuple[tuple[int, int], ...]] = []

    def append_planned(
        self,
        planned_time: float,
        trigger_time: float,
        kv_usage: float,
        work: StageWork,
        num_decode_tokens: int,
    ) -> None:
        """Add a micro-batch without times after its schedule; the fields are those of MicroBatch.

        Steps have to be added in order, beginning with step 0.
        """
        self._times.extend((planned_time, trigger_time, nan, nan, kv_usage))
        self._stage_times.extend(self._no_stage_times)
        step, num_tokens, chunks, num_decodes, num_context, num_sampled, *others = work
        num_prefill = num_tokens - num_decode_tokens
        self._counts.extend(
            (
                step, num_tokens, num_decodes, num_context, num_sampled, *others,
                num_prefill, num_decode_tokens,
            )
        )  # fmt: skip
        self._chunks.append(chunks)

    def set_stage_time(self, index: int, stage: int, start: float, end: float) -> None:
        """Set when a stage computed a micro-batch, in seconds."""
        position = 2 * (index * self._num_stages + stage)
        self._stage_times[position] = start
        self._stage_times[position + 1] = end

    def set_committed(self, index: int, time: float) -> None:
        """Set when a micro-batch was committed, in seconds."""
        self._times[index * NUM_TIMES + COMMITTED] = time

    def set_received(self, index: int, time: float) -> None:
        """Set the time in seconds at which the driver had received the result of a step."""
        self._times[index * NUM_TIMES + RECEIVED] = time

    def __len__(self) -> int:
        """Return the number of micro-batches."""
        return len(self._chunks)

    @overload
    def __getitem__(self, index: int) -> MicroBatch: ...
    @overload
    def __getitem__(self, index: slice) -> list[MicroBatch]: ...
    def __getitem__(self, index: int | slice) -> MicroBatch | list[MicroBatch]:
        """Return new objects of one or several micro-batches: a change of them has no effect."""
        places = range(len(self))[index]
        return self._read(places) if isinstance(places, int) else [*map(self._read, places)]

    def __iter__(self) -> Iterator[MicroBatch]:
        """Yield new objects of all micro-batches."""
        return map(self._read, range(len(self)))

    def iterate_stage_times(self) -> Iterator[tuple[int, float, float]]:
        """Yield stage, start and end of each computation, ordered by micro-batch, then stage."""
        times = iter(self._stage_times)
        stages = cycle(range(self._num_stages))
        for stage, start, end in zip(stages, times, times, strict=False):
            if not isnan(start):
                yield stage, start, end

    def _read(self, index: int) -> MicroBatch:
        times = self._times[index * NUM_TIMES : (index + 1) * NUM_TIMES]
        planned, trigger, committed, received, kv_usage = times
        counts = self._counts[index * NUM_COUNTS : (index + 1) * NUM_COUNTS]
        step, num_tokens, num_decodes, num_context, num_sampled, *others = counts
        has_placeholders, num_windows, num_prefill_tokens, num_decode_tokens = others
        work = StageWork(
            step, num_tokens, self._chunks[index], num_decodes, num_context, num_sampled,
            bool(has_placeholders), num_windows,
        )  # fmt: skip
        width = 2 * self._num_stages
        stage_times = iter(self._stage_times[index * width : (index + 1) * width])
        return MicroBatch(
            planned,
            work,
            num_prefill_tokens,
            num_decode_tokens,
            [
                None if isnan(start) else StepTime(step, start, end)
                for start, end in zip(stage_times, stage_times, strict=True)
            ],
            None if isnan(committed) else committed,
            trigger,
            0.0 if isnan(received) else received,
            None if isnan(kv_usage) else kv_usage,
        )


def iterate_stage_times(batches: Iterable[MicroBatch]) -> Iterator[tuple[int, float, float]]:
    """Yield (stage, start, end) of each micro-batch on each stage, skipping unknown times.

    The order is by micro-batch, then by stage; times are seconds.

    Args:
        batches: Micro-batches of a run.
    """
    if isinstance(batches, MicroBatchTable):
        yield from batches.iterate_stage_times()
        return
    for batch in batches:
        for stage, times in enumerate(batch.stage_times):
            if times is not None:
                yield stage, times.start, times.end
