"""Prompt and token pools one after the other, each a simulated cluster behind its own router.

Every request is computed up to its first token in the prompt pool; the token pool gets it when its
KV cache has arrived, and its prompt takes no time there. Prompts leave the first pool's cache when
they end: token machines that are full do not hold up prompt machines.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from gllm.observability.latency import RequestTimeline
from gllm.sim.cluster.cluster import ClusterRun, simulate_cluster
from gllm.sim.cluster.router import make_router
from gllm.sim.deployment import Deployment
from gllm.sim.workloads.requests import WorkloadRequest

TransferSeconds = Callable[[int], float]
"""Returns the visible seconds of a transfer by the tokens of the prompt."""


class SplitRun(NamedTuple):
    """Run of both pools."""

    lines: list[RequestTimeline]
    """Timeline of each request for its client, in the order of the workload."""
    busy_seconds: float
    """Computing time of all machines."""
    num_preemptions: int


def simulate_pool(
    deployments: Mapping[str, Deployment], jobs: Sequence[WorkloadRequest], router: str, seed: int
) -> ClusterRun:
    """Simulate a pool that serves whole requests; the router is a name of ROUTER_NAMES."""
    return simulate_cluster(deployments, jobs, make_router(router, seed))


def simulate_split(
    prompts: Mapping[str, Deployment],
    tokens: Mapping[str, Deployment],
    jobs: Sequence[WorkloadRequest],
    transfer_seconds: TransferSeconds,
    routers: tuple[str, str] = ("pending-tokens", "least-tokens"),
    seed: int = 0,
) -> SplitRun:
    """Simulate a workload on a prompt pool and a token pool.

    Args:
        prompts: Prompt machines by name.
        tokens: Token machines by name, whose cost models take no time for prompts.
        jobs: Sorted by arrival.
        transfer_seconds: Time of a transfer that no computation hides.
        routers: Names of the routing policies of the prompt pool and of the token pool.
        seed: Seed of the routers.
    """
    first = simulate_pool(
        prompts, [job._replace(num_output_tokens=1) for job in jobs], routers[0], seed
    )
    lines = [replace(first.requests[seq].line) for seq in range(len(jobs))]
    arrivals = [
        line.times[0] + transfer_seconds(job.num_prompt_tokens)
        for line, job in zip(lines, jobs, strict=True)
    ]
    order = sorted(
        (seq for seq, job in enumerate(jobs) if job.num_output_tokens > 1),
        key=arrivals.__getitem__,
    )
    second = simulate_pool(
        tokens,
        [jobs[seq]._replace(arrival_seconds=arrivals[seq]) for seq in order],
        routers[1],
        seed,
    )
    for index, seq in enumerate(order):
        decoded = second.requests[index].line
        # The second pool's first token stands for the one that the client has already.
        lines[seq] = RequestTimeline(
            jobs[seq].arrival_seconds, [*lines[seq].times, *decoded.times[1:]], decoded.num_tokens
        )
    requests = [*first.requests.values(), *second.requests.values()]
    return SplitRun(
        lines,
        busy_seconds(first) + busy_seconds(second),
        sum(served.num_preemptions for served in requests),
    )


def busy_seconds(run: ClusterRun) -> float:
    """Return the computing time of all stages of all engines."""
    return sum(
        usage.busy for engine in run.engines.values() for usage in engine.record.stage_usages()
    )
