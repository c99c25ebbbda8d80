"""Measure the recomputation by preemption: many requests in caches that cannot hold them.

Run: python -m benchmarks.preemption

The figures are counts of a scheduler without a model, not times, so they are the same on every
machine.
"""

import argparse
import math
from collections import deque
from random import Random
from typing import NamedTuple

from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import SampledToken, StepPlan, StepResult
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.step_cost import DEFAULT_RIDGE_TOKENS

STOP = 1
"""Token that ends an output early."""


class Job(NamedTuple):
    """Lengths of one request."""

    prompt_tokens: int
    output_tokens: int
    max_tokens: int


class LoadCase(NamedTuple):
    """Requests that arrive together, and their cache."""

    name: str
    jobs: list[Job]
    num_blocks: int
    max_model_len: int
    prefix_cache: bool = True
    scores_prompts: bool = False
    """Every request sets prompt_logprobs."""
    fast: bool = True
    """The case is small enough for a test."""


class Figures(NamedTuple):
    """Totals of one run."""

    preemptions: int
    computed_tokens: int
    needed_tokens: int
    """Tokens that an unlimited cache would compute."""
    steps: int
    decode_tokens: int
    cost: float
    """Relative time: the sum of hypot(tokens, ridge) over micro-batches (docs/scheduler.md)."""

    @property
    def recomputed_share(self) -> float:
        """Tokens computed beyond those needed, per needed token."""
        return self.computed_tokens / self.needed_tokens - 1


def varied_jobs(count: int, seed: int = 0) -> list[Job]:
    """Return requests of log-normal lengths, most of which stop long before max_tokens."""
    rng = Random(seed)

    def length(median: int, most: int) -> int:
        return max(1, min(most, round(rng.lognormvariate(math.log(median), 0.8))))

    return [Job(length(200, 1500), length(200, 1500), 2000) for _ in range(count)]


DECODE_AND_PROMPT = [Job(16, 1500, 1500), Job(1816, 8, 8)]
"""A long decode, and a prompt that is slightly too large to fit beside it."""
LOADS = (
    LoadCase("500 x (200 + 800), 2,000 blocks", [Job(200, 800, 800)] * 500, 2000, 1000, fast=False),
    LoadCase(
        "60 x (64 + 500), 100 blocks, no prefix cache", [Job(64, 500, 500)] * 60, 100, 564, False
    ),
    LoadCase("500 x varied lengths, 1,000 blocks", varied_jobs(500), 1000, 3500, fast=False),
    LoadCase("1,500 decodes beside a prompt, no prefix cache", DECODE_AND_PROMPT, 114, 1824, False),
    LoadCase("the same with prompt_logprobs", DECODE_AND_PROMPT, 114, 1824, scores_prompts=True),
)


def run_load(load: LoadCase, stages: int, policy: str = "auto", expected: int = 256) -> Figures:
    """Run a load to completion.

    Args:
        load: Requests and cache.
        stages: Number of pipeline stages.
        policy: Scheduling policy.
        expected: Value of expected_output_tokens.
    """
    config = SchedulerConfig(
        policy=policy, prefix_cache=load.prefix_cache, expected_output_tokens=expected
    )
    scheduler = Scheduler(config.resolve(stages, load.num_blocks, load.max_model_len))
    for seq, job in enumerate(load.jobs):
        prompt = [seq, *range(100, 99 + job.prompt_tokens)]
        request = SchedulerRequest(seq, prompt, job.max_tokens, frozenset([STOP]))
        scheduler.add(request._replace(reads_prefix_cache=not load.scores_prompts), 0.0)
    left = [job.output_tokens for job in load.jobs]
    in_flight: deque[StepPlan] = deque()
    cost = 0.0
    while True:
        plan = scheduler.schedule(0.0)
        if plan is not None:
            in_flight.append(plan)
            tokens = sum(row.num_tokens for row in plan.rows)
            cost += math.hypot(tokens, DEFAULT_RIDGE_TOKENS)
        elif in_flight:
            scheduler.commit(answer(in_flight.popleft(), left))
        else:
            break
    stats = scheduler.stats()
    assert not stats.unfinished
    needed = sum(job.prompt_tokens + job.output_tokens - 1 for job in load.jobs)
    computed = stats.prefill_tokens + stats.decode_tokens
    return Figures(stats.preemptions, computed, needed, stats.steps, stats.decode_tokens, cost)


def answer(plan: StepPlan, left: list[int]) -> StepResult:
    """Return a plan's result.

    Args:
        plan: The scheduled step.
        left: Tokens that each sequence has still to generate; updated.
    """
    sampled = []
    for row in plan.rows:
        if row.should_sample:
            left[row.seq] -= 1
            sampled.append(
                SampledToken(row.seq, row.num_preemptions, STOP if left[row.seq] <= 0 else 7)
            )
    return StepResult(plan.step, sampled)


def main() -> None:
    """Print a table of the recomputation and the relative time of each load."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--policy", default="auto")
    parser.add_argument("--expected-output-tokens", type=int, default=256)
    options = parser.parse_args()
    print("| load | stages | preemptions | extra work | steps | decodes a step | relative time |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for load in LOADS:
        for stages in (1, 4):
            figures = run_load(load, stages, options.policy, options.expected_output_tokens)
            print(
                f"| {load.name} | {stages} | {figures.preemptions} | "
                f"{100 * figures.recomputed_share:.1f} % | {figures.steps:,} | "
                f"{figures.decode_tokens / figures.steps:.1f} | {figures.cost:,.0f} |"
            )


if __name__ == "__main__":
    main()
