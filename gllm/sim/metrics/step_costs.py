"""Split the times of a run into costs of stages, links and the driver."""

from bisect import bisect
from collections.abc import Iterator
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
    earlier = [0.0] * run.num_stages
    arrivals = sorted(served.line.arrival for served in run.requests.values())
    for step in run.micro_batches:
        times = [time for time in step.stage_times if time is not None]
        if len(times) < len(step.stage_times) or step.committed_time is None:
            continue
        waits: list[float | None] = []
        stages, num_arrivals = [], []
        reached = step.trigger_time
        # A stage may note its end when the next one has begun already: it had handed over by then.
        starts = [time.start for time in times[1:]] + [inf]
        ends = [min(time.end, start) for time, start in zip(times, starts, strict=True)]
        for stage, (start, end) in enumerate(zip((t.start for t in times), ends, strict=True)):
            busy = earlier[stage] > reached
            waits.append(None if busy else max(0.0, start - reached))
            begin = earlier[stage] if busy else start
            stages.append(end - begin)
            num_arrivals.append(bisect(arrivals, end) - bisect(arrivals, begin))
            reached = earlier[stage] = end
        return_seconds = max(0.0, step.received_time - times[-1].end)
        yield StepCosts(step, waits[0], stages, waits[1:], return_seconds, num_arrivals)
