"""Requests that miss Aladdin's limit of the mean time per token, and the prompts that delayed them.

Constraint (d) protects requests that decode. A prompt that is placed before the first token of
another request of the worker, and computed in a later step, delays that request's second token
without a constraint: the paper computes all new prompts of a heartbeat in one step.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

from experiments.aladdin_cases import MAX_WORKERS, QUICK_SECONDS, SLO, FleetSearchTask
from experiments.base import ExperimentOptions
from experiments.parallel import map_parallel
from gllm.plan.scale.fleet_size import run_fleet_case
from gllm.sim.metrics.report import format_table
from gllm.sim.metrics.run_record import ServedRequest
from gllm.sim.workloads.requests import make_workload

SHORT_TOKENS = 25
"""Longest output that counts as short."""
NUM_LENGTHS = 2000
"""Requests of a workload whose lengths are counted."""
DELAY_SECONDS = 0.1
"""Time between two tokens from which on a prompt, not a decode step, is the cause."""


@dataclass(frozen=True)
class MissTask:
    """Simulation of a number of workers."""

    search: FleetSearchTask
    num_workers: int


class MissSummary(NamedTuple):
    """Requests that miss a limit."""

    num_requests: int
    num_missed: int
    num_late_first: int
    """Those that miss the limit of the first token."""
    longest_output: int
    """Most output tokens of those that miss a limit."""
    num_delayed_by_earlier: int
    """Those that a prompt has delayed which had been placed before their first token."""


def find_misses(task: MissTask) -> MissSummary:
    """Return which requests of a fleet miss a limit."""
    run = run_fleet_case(task.search.case, task.num_workers)
    missed, num_late_first, num_delayed = [], 0, 0
    for engine in run.engines.values():
        served = list(engine.record.requests.values())
        for each in served:
            is_late_first, is_slow = _is_late(each)
            if not (is_late_first or is_slow):
                continue
            missed.append(each.line.num_tokens)
            num_late_first += is_late_first
            num_delayed += is_delayed_by_earlier(each, served)
    return MissSummary(
        len(run.requests), len(missed), num_late_first, max(missed, default=0), num_delayed
    )


def _is_late(request: ServedRequest) -> tuple[bool, bool]:
    """Return True for each limit that a request misses: of the first token, and of ATGT."""
    ttft, tpot = SLO.require("ttft", "tpot")
    line = request.line
    return line.ttft is None or line.ttft > ttft, (line.tpot or 0.0) > tpot


def is_delayed_by_earlier(request: ServedRequest, served: list[ServedRequest]) -> bool:
    """Return True if a prompt that was there before a request's first token delayed a later one.

    Args:
        request: The request.
        served: All requests of its worker.
    """
    times = request.line.times
    delays = [(begin, end) for begin, end in pairwise(times) if end - begin > DELAY_SECONDS]
    return any(
        other is not request
        and other.line.arrival < times[0]
        and begin < other.line.times[0] <= end
        for other in served
        for begin, end in delays
    )


def format_misses(workloads: Mapping[str, float], options: ExperimentOptions) -> str:
    """Return a table of the requests of the workload with real lengths that miss, on fleets.

    Args:
        workloads: Requests per second by workload.
        options: Of the experiment.
    """
    workload = "sharegpt-like" if options.quick else "sharegpt"
    search = FleetSearchTask(workload, workloads[workload], "aladdin")
    if options.quick:
        search = replace(search, seconds=QUICK_SECONDS)
    tasks = [MissTask(search, count) for count in (16, MAX_WORKERS)]
    summaries = map_parallel(find_misses, tasks, options.jobs, options.progress)
    rows = [
        [str(task.num_workers), *map(str, summary)]
        for task, summary in zip(tasks, summaries, strict=True)
    ]
    header = ["workers", "requests", "miss", "TTFT", "longest output", "delayed by such a prompt"]
    shares = ", ".join(f"{workload} {short_share(workload):.1%}" for workload in workloads)
    return (
        f"`aladdin`, {workload} at {search.rate:g} requests/s; *such a prompt* was placed before "
        f"their first token and computed after it.\n\n{format_table(header, rows)}\n\n"
        f"Outputs of at most {SHORT_TOKENS} tokens: {shares}."
    )


def short_share(workload: str) -> float:
    """Return the share of outputs of at most SHORT_TOKENS tokens, 0..1."""
    jobs = make_workload(workload, NUM_LENGTHS)
    return sum(job.num_output_tokens <= SHORT_TOKENS for job in jobs) / len(jobs)
