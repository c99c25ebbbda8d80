"""Measure the overhead of `--step-log` relative to the run that it logs.

A real engine serves a saturating load with the log on. The logged calls are then repeated on a
plain scheduler and on one that writes the log. The difference is the driver's time for the log. Run
as `python -m benchmarks.step_log`; both sides make the same calls in one process.
"""

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

from experiments.logged_servers import serve_logged
from gllm.config.engine import EngineConfig
from gllm.observability.logged_scheduler import LoggedScheduler, replay_event
from gllm.observability.step_log import (
    StepLogEvent,
    StepLogWriter,
)
from gllm.scheduler.scheduler import Scheduler
from gllm.sim.metrics.run_record import build_run_record
from gllm.sim.workloads.requests import make_workload


def calling_seconds(scheduler: Scheduler, events: list[StepLogEvent]) -> float:
    """Return the CPU seconds of the logged calls."""
    begin = time.process_time()
    for event in events:
        replay_event(scheduler, event)
    return time.process_time() - begin


def writing_seconds(events: list[StepLogEvent], folder: Path) -> float:
    """Return the CPU seconds that a logging scheduler takes beyond a plain one."""
    config = build_run_record(events).start.scheduler
    plain = calling_seconds(Scheduler(config), events)
    log = StepLogWriter(folder / "again.jsonl")
    written = calling_seconds(LoggedScheduler(config, log.write, time.monotonic), events)
    begin = time.process_time()
    log.close()
    return written + time.process_time() - begin - plain


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--requests", type=int, default=200)
    options = parser.parse_args()
    print("| stages | micro-batches | ms each | log, us each | share of the run |")
    print("| --- | --- | --- | --- | --- |")
    for stages in (1, 2):
        config = EngineConfig.from_options("demo", pipeline_parallel_size=stages)
        jobs = make_workload("uniform:16,400,8,60", options.requests, arrivals="static")
        events = serve_logged(config, jobs)
        run = build_run_record(events)
        with tempfile.TemporaryDirectory() as folder:
            spent = [writing_seconds(events, Path(folder)) for _ in range(options.rounds)]
        seconds, steps = run.end_time() - run.begin_time(), len(run.micro_batches)
        cost = statistics.median(spent)
        print(
            f"| {stages} | {steps} | {1e3 * seconds / steps:.2f} | {1e6 * cost / steps:.0f} "
            f"| {100 * cost / seconds:.2f} % |"
        )
    print(f"\n{os.cpu_count()} cores; medians of {options.rounds}")


if __name__ == "__main__":
    main()
