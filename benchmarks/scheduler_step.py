"""Measure one scheduling decision: schedule + commit at 256 running requests and 4 stages.

Run: python -m benchmarks.scheduler_step
"""

import argparse
import statistics
import time

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.eviction import EVICTION_NAMES
from gllm.scheduler.plan import SampledToken, StepPlan, StepResult
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest


def answer(plan: StepPlan) -> StepResult:
    """Return a result that finishes no sequence."""
    sampled = [
        SampledToken(row.seq, row.num_preemptions, 7) for row in plan.rows if row.should_sample
    ]
    return StepResult(plan.step, sampled)


def measure(policy: str, eviction: str, options: argparse.Namespace) -> list[float]:
    """Return the seconds of each schedule + commit while requests decode and new ones arrive.

    Time passes by 10 ms per step for the order of eviction. Requests end and are followed by others
    all the time, as turns of 512 conversations; arrivals are timed with the step that follows.

    Args:
        policy: Scheduling policy.
        eviction: Order in which cached blocks are evicted.
        options: Parsed flags: running requests, stages, steps, KV blocks, and whether the changes
            of the prefix cache are recorded with token ids and fetched after each step.
    """
    running, stages, steps = options.running, options.stages, options.steps
    config = SchedulerConfig(policy=policy, max_num_seqs=running, prefix_cache_eviction=eviction)
    scheduler = Scheduler(config.resolve(stages, options.blocks, 4096))
    if options.watch:
        scheduler.kv_cache.watch(with_token_ids=True)
    in_flight: list[StepPlan] = []
    times: list[float] = []
    seq, now = 0, 0.0
    while len(times) < steps + 200:
        begin = time.perf_counter()
        while len(scheduler._sequences) < running + 8:
            request = SchedulerRequest(seq, [seq] * 200, 100 + seq % 300)
            scheduler.add(request._replace(client=str(seq % 32), session=str(seq % 512)), now)
            seq += 1
        now += 0.01
        plan = scheduler.schedule(now)
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
    parser.add_argument("--blocks", type=int, default=20_000, help="KV blocks of the cache")
    parser.add_argument("--watch", action="store_true", help="record KV cache events")
    options = parser.parse_args()
    print("| policy | eviction | median us | mean us | p99 us |\n| --- | --- | --- | --- | --- |")
    for policy in ("throttle", "sarathi", "prefill-first"):
        for eviction in EVICTION_NAMES:
            times = measure(policy, eviction, options)
            p99 = times[int(len(times) * 0.99)]
            values = (statistics.median(times), statistics.mean(times), p99)
            print(f"| {policy} | {eviction} | {' | '.join(f'{1e6 * t:.0f}' for t in values)} |")


if __name__ == "__main__":
    main()
