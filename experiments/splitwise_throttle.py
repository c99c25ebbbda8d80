"""Token throttling as the local policy of Splitwise's engines, beside the papers' limits."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from experiments.splitwise_mixed import serves_point
from gllm.plan.pools.clusters import ClusterPoint, SampleSize, fluid_rate, search_rate
from gllm.plan.pools.planner import START_SHARE
from gllm.scheduler.config import PREFILL_BATCH_TOKENS
from gllm.sim.hardware.machines import ClusterDesign
from gllm.sim.metrics.report import format_table

NUM_STAGES = 2
"""Machines of a pipelined engine."""
POLICIES = {
    "splitwise": f"{PREFILL_BATCH_TOKENS['splitwise']:,} prompt tokens",
    "distserve": f"L_m = {PREFILL_BATCH_TOKENS['distserve']}",
    "throttle": "token throttling",
}
"""Limits of prompt batches by scheduling policy."""
NOTE = f"""\
Preset `splitwise` with other local policies in all engines, prompt and token ones. The engines are
the best homogeneous cluster's, but each is a pipeline of {NUM_STAGES} DGX-H100 with half of the
layers at TP 8, so that clusters have {NUM_STAGES} times the machines. A stage takes half of one
machine's time; activations travel over all network cards of a machine. *One stage*: as many
machines, each an engine. All run as one simulated cluster with production's router, as in the
section on the mixed pool. The measured times know no context: cutting a prompt into chunks costs
nothing but the least time of a small batch."""


@dataclass(frozen=True)
class ThrottleTask:
    """Search for the highest rate of a cluster of pipelined engines, or of single machines."""

    point: ClusterPoint
    """Its design counts engines, its policy is the local one of all engines."""
    num_stages: int

    @property
    def num_machines(self) -> int:
        """Return the machines of the cluster."""
        return self.num_stages * self.point.design.num_machines


def throttle_tasks(designs: dict[str, ClusterDesign], size: SampleSize) -> list[ThrottleTask]:
    """Return the searches of each workload: each policy in one stage, then in pipelined engines.

    Args:
        designs: Best homogeneous cluster by workload.
        size: Requests of a simulation.
    """
    tasks = []
    for workload, design in designs.items():
        single = design._replace(
            num_prompt=NUM_STAGES * design.num_prompt, num_token=NUM_STAGES * design.num_token
        )
        rate = START_SHARE * fluid_rate(single, workload)
        tasks += [
            ThrottleTask(ClusterPoint(each, workload, rate, size, policy=policy), num_stages)
            for each, num_stages in ((single, 1), (design, NUM_STAGES))
            for policy in POLICIES
        ]
    return tasks


def throttle_rate(task: ThrottleTask) -> float:
    """Return the highest rate within the SLOs, requests per second."""
    rate, _ = search_rate(
        lambda rate: serves_point(replace(task.point, rate=rate), num_stages=task.num_stages),
        task.point.rate,
    )
    return rate


def throttle_table(searches: Sequence[tuple[ThrottleTask, float]]) -> str:
    """Return the rates per machine, and those beside the pipelined engines of the preset."""
    if not searches:
        return "Not measured."
    base = {
        task.point.workload: rate
        for task, rate in searches
        if task.num_stages > 1 and task.point.policy == "splitwise"
    }
    rows = []
    for task, rate in searches:
        point, other = task.point, base[task.point.workload]
        rows.append(
            [point.workload, str(point.design), str(task.num_stages), point.policy,
             POLICIES[point.policy], f"{rate:.1f}", f"{rate / task.num_machines:.2f}",
             f"{rate / other:.2f}" if other else "-"]
        )  # fmt: skip
    return format_table(
        ["workload", "engines", "stages", "policy", "limit", "requests/s", "per machine",
         "x `splitwise` in stages"],
        rows,
    )  # fmt: skip
