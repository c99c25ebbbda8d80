"""Measure one scheduling decision: schedule + commit at 256 running requests and 4 stages.

Run: python -m benchmarks.scheduler_step
"""

import argparse
import statistics
import time

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import SampledToken, StepPlan, StepResult
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest


def answer(plan: StepPlan) -> StepResult:
    """Return a result that finishes no sequence."""
    sampled = [
        SampledToken(row.seq, row.num_preemptions, 7) for row in plan.rows if row.should_sample
    ]
    return StepResult(plan.step, sampled)


def measure(
    policy: str, running: int, stages: int, steps: int, is_watched: bool = False
) -> list[float]:
    """Return the seconds of each schedule + commit while requests decode and new ones arrive.

    Args:
        policy: Scheduling policy.
        running: Number of decoding requests.
        stages: Number of pipeline stages.
        steps: Number of measured steps.
        is_watched: Record the changes of the prefix cache with token ids and fetch them after each
            step.
    """
    config = SchedulerConfig(policy=policy, max_num_seqs=running)
    scheduler = Scheduler(config.resolve(stages, 20_000, 4096))
    if is_watched:
        scheduler.kv_cache.watch(with_token_ids=True)
    in_flight: list[StepPlan] = []
    times: list[float] = []
    seq = 0
    while len(times) < steps + 200:
        while len(scheduler._sequences) < running + 8:
            scheduler.add(SchedulerRequest(seq, [seq] * 200, 100 + seq % 300), 0.0)
            seq += 1
        begin = time.perf_counter()
        plan = scheduler.schedule(0.0)
        spent = time.perf_counter() - begin
        if plan is not None:
            in_flight.append(plan)
        if len(in_flight) == stages:
            result = answer(in_flight.pop(0))
            begin = time.perf_counter()
            scheduler.commit(result)
            scheduler.kv_cache.pop_events()
            times.append(spent + time.perf_counter() - begin)
    return sorted(times[200:])


def main() -> None:
    """Print a table of the median and the 99th percentile per policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--running", type=int, default=256)
    parser.add_argument("--stages", type=int, default=4)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--watch", action="store_true", help="record KV cache events")
    options = parser.parse_args()
    print("| policy | median us | p99 us |\n| --- | --- | --- |")
    for policy in ("throttle", "sarathi", "prefill-first"):
        times = measure(policy, options.running, options.stages, options.steps, options.watch)
        p99 = times[int(len(times) * 0.99)]
        print(f"| {policy} | {statistics.median(times) * 1e6:.0f} | {p99 * 1e6:.0f} |")


if __name__ == "__main__":
    main()
