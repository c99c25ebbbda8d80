"""Split the times of a run into costs of stages, links and the driver."""

from bisect import bisect
from collections.abc import Iterator, Sequence
from math import inf
from typing import NamedTuple

from gllm.sim.metrics.micro_batch_table import MicroBatch
from gllm.sim.metrics.run_record import RunRecord


class StepCosts(NamedTuple):
    """Seconds of one step."""

    step: MicroBatch
    plan_seconds: float | None
    """From the driver's news to the first stage's start; None where that stage was busy."""
    stage_seconds: list[float]
    """From its start, or where it was busy from the end of the step before, to its end: a stage
    that has work costs time between steps as well."""
    link_seconds: list[float | None]
    """From a stage's end to the next one's start; None where that was busy."""
    return_seconds: float
    """From the last stage's end until the driver has received the result."""
    num_arrivals: list[int]
    """Requests that arrived in the time of each stage."""


def measure_step_costs(run: RunRecord) -> Iterator[StepCosts]:
    """Return the costs of all steps with complete times, in order."""
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
