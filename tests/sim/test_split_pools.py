"""Routing in the simulated clusters of prompt and token machines."""

import pytest

from gllm.plan.pools.clusters import build_machine
from gllm.sim.cluster.paired import simulate_pool, simulate_split
from gllm.sim.hardware.machines import read_machine_types
from gllm.sim.workloads.requests import WorkloadRequest

NUM_PAIRS = 10


@pytest.mark.parametrize("has_pools", [False, True])
def test_a_short_prompt_goes_past_a_machine_that_computes_a_long_one(has_pools: bool) -> None:
    """A prompt of 2,000 tokens takes 0.5 s on a DGX-A100, one of 128 tokens 0.08 s."""
    a100 = read_machine_types()["DGX-A100"]
    machines = {name: build_machine(a100, "splitwise") for name in "ab"}
    jobs = [
        WorkloadRequest(5.0 * pair + delay, num_tokens, 2)
        for pair in range(NUM_PAIRS)
        for delay, num_tokens in ((0.0, 2000), (0.1, 128))
    ]
    if has_pools:
        tokens = {"t": build_machine(a100, "vllm", has_prefill=False)}
        lines = simulate_split(machines, tokens, jobs, lambda _: 0.0).lines
    else:
        run = simulate_pool(machines, jobs, "pending-tokens", 0)
        lines = [run.requests[seq].line for seq in range(len(jobs))]
    short = [line.ttft for line in lines[1::2]]
    assert all(ttft is not None and ttft < 0.1 for ttft in short)
