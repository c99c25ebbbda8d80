"""Simulate policies with a KV cache that is too small; print a Markdown table.

The load is 300 azure-conv requests at 2/s on qwen2.5-32b, 4 x L20, with and without expected output
lengths.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from typing import NamedTuple

from gllm.scheduler.config import SchedulerConfig
from gllm.sim.deployment import roofline_deployment, simulate
from gllm.sim.metrics.report import format_table, summarize_run
from gllm.sim.workloads.requests import make_workload

POLICIES = {
    6000: ("throttle", "throttle-paper", "throttle-no-ut", "sarathi"),
    1300: ("throttle", "throttle-no-ut", "sarathi"),
}
"""Policies by number of KV blocks."""
EXPECTED_TOKENS = (SchedulerConfig().expected_output_tokens, 0)
HEADER = (
    "blocks",
    "expected tokens",
    "policy",
    "tokens/s",
    "mean TTFT, s",
    "mean TPOT, ms",
    "longest wait, s",
    "preemptions",
    "waste",
)


class Case(NamedTuple):
    """Parameters of one simulation."""

    num_blocks: int
    expected_tokens: int
    policy: str


def simulate_case(case: Case) -> list[str]:
    """Return the row of a case; waste is the share of tokens computed more than once."""
    config = SchedulerConfig(policy=case.policy, expected_output_tokens=case.expected_tokens)
    deployment = roofline_deployment("qwen2.5-32b", "L20", 4, 16384, "pcie", config)
    scheduler = replace(deployment.scheduler, num_blocks=case.num_blocks)
    jobs = make_workload("azure-conv", 300, 2.0, "poisson", 0)
    run = simulate(replace(deployment, scheduler=scheduler), jobs)
    figures = summarize_run(run)
    served = run.requests.values()
    # The last token of an output is never an input.
    needed = sum(request.num_prompt_tokens + request.line.num_tokens - 1 for request in served)
    computed = sum(step.work.num_tokens for step in run.micro_batches)
    longest_wait = max(max(request.line.itl, default=0.0) for request in served)
    return [
        f"{case.num_blocks:,}",
        str(case.expected_tokens),
        case.policy,
        f"{figures['steady_tokens_per_second']:,.0f}",
        f"{figures['ttft']['mean']:.1f}",
        f"{1e3 * figures['tpot']['mean']:.0f}",
        f"{longest_wait:.1f}",
        str(figures["preemptions"]),
        f"{100 * (computed / needed - 1):.1f} %",
    ]


def main() -> None:
    """Simulate every case and print the table."""
    cases = [
        Case(num_blocks, expected, policy)
        for num_blocks, policies in POLICIES.items()
        for expected in EXPECTED_TOKENS
        for policy in policies
    ]
    with ProcessPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        print(format_table(list(HEADER), list(pool.map(simulate_case, cases))))


if __name__ == "__main__":
    main()
