"""Splitwise's mixed pool in simulation: a cluster sized for code serves conversations.

Machines are simulated as one cluster with production's pair policy, holds and transfers.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random

from experiments.claims import ExpectedLimit, PaperClaim
from experiments.overlapped_transfers import OverlappedKvNetwork
from experiments.transfer_mode import TransferModePolicy
from gllm.plan.pools.clusters import (
    WORKLOADS,
    ClusterPoint,
    SampleSize,
    build_machine,
    machine_profile,
    pair_latencies,
    search_rate,
)
from gllm.routing.disaggregation.policy import PairRequest
from gllm.routing.disaggregation.role_pools import Pools
from gllm.routing.disaggregation.splitwise import SplitwisePairPolicy
from gllm.routing.state import EngineSnapshot
from gllm.sim.cluster.paired import simulate_pairs
from gllm.sim.hardware.devices import NetworkLink
from gllm.sim.hardware.machines import ClusterDesign
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.metrics.report import format_table
from gllm.sim.metrics.slowdowns import SloMargin, check_slos
from gllm.sim.workloads.requests import make_workload

LOCAL_POLICY = "splitwise"
MAX_LOSS = 0.05
"""Aim: share of the throughput that the wrong split may cost with the mixed pool."""
NOTE = """\
The homogeneous cluster that is best for code, with conversations: machines are one simulated
cluster with production's router policy `splitwise`, so that the mixed pool lends machines to the
other phase. *without*: the same router, which never lends. *best split*: the best of the other
splits of as many machines, with the mixed pool. The paper's loss is 0 % for AA and HH, 7 % for HA
and HHcap."""


class HomePoolsPolicy(SplitwisePairPolicy):
    """Splitwise's router without a mixed pool."""

    def _find_prefill(self, request: PairRequest, pools: Pools) -> EngineSnapshot | None:
        return self._least_pending(request, pools.prefill)

    def _find_decode(self, request: PairRequest, pools: Pools) -> EngineSnapshot | None:
        return self._least_reserved(pools.decode)


def serves_point(point: ClusterPoint, has_mixed_pool: bool = True, num_stages: int = 1) -> bool:
    """Return True if a cluster serves a point within all nine SLOs; see `measure_margins`."""
    return all(margin.is_met for margin in measure_margins(point, has_mixed_pool, num_stages))


def measure_margins(
    point: ClusterPoint, has_mixed_pool: bool = True, num_stages: int = 1
) -> list[SloMargin]:
    """Return the nine slowdowns of a point with their limits, as one simulated cluster.

    Args:
        point: The point. Its design counts engines.
        has_mixed_pool: False if no machine changes its role.
        num_stages: Machines of an engine, one stage each.
    """
    design, shape = point.design, MODELS[point.model]
    names: Sequence[str] = [f"machine-{index}" for index in range(design.num_machines)]
    roles = {
        name: "prefill" if index < design.num_prompt else "decode"
        for index, name in enumerate(names)
    }
    engines = {
        name: build_machine(
            design.prompt if role == "prefill" else design.token,
            point.policy,
            model=point.model,
            num_stages=num_stages,
        )
        for name, role in roles.items()
    }
    jobs = make_workload(
        WORKLOADS[point.workload], point.num_requests, point.rate, "poisson", point.seed
    )
    # Each stage sends its own layers.
    bandwidth = num_stages * min(design.prompt.link.bandwidth, design.token.link.bandwidth)
    network = OverlappedKvNetwork(
        NetworkLink(bandwidth, 0.0),
        shape.layers * shape.kv_bytes,
        shape.layers,
        machine_profile(point.model, design.prompt.device).prompt_seconds,
        TransferModePolicy(),
    )
    policy = (SplitwisePairPolicy if has_mixed_pool else HomePoolsPolicy)(Random(point.seed))
    run = simulate_pairs(engines, roles, jobs, policy, network)
    lines = [run.cluster.requests[index].line for index in range(len(jobs))]
    return check_slos(pair_latencies(lines, jobs, point.model))


@dataclass(frozen=True)
class MixedTask:
    """Search for the highest rate of a cluster, with or without the mixed pool."""

    point: ClusterPoint
    has_mixed_pool: bool


def mixed_rate(task: MixedTask) -> float:
    """Return the highest rate within the SLOs, requests per second."""
    rate, _ = search_rate(
        lambda rate: serves_point(replace(task.point, rate=rate), task.has_mixed_pool),
        task.point.rate,
    )
    return rate


def mixed_tasks(code_design: ClusterDesign, rate: float, size: SampleSize) -> list[MixedTask]:
    """Return the searches: the cluster for code with and without the mixed pool, other splits.

    Args:
        code_design: Best homogeneous cluster for code.
        rate: First rate, requests per second.
        size: Requests of a simulation.
    """
    pair = code_design.prompt, code_design.token
    total = code_design.num_machines
    point = ClusterPoint(code_design, "conversation", rate, size, policy=LOCAL_POLICY)
    others = [
        replace(point, design=ClusterDesign(*pair, total - num_token, num_token))
        for num_token in range(code_design.num_token + 1, min(total, code_design.num_token + 4))
    ]
    return [
        MixedTask(point, True),
        MixedTask(point, False),
        *(MixedTask(other, True) for other in others),
    ]


def mixed_table(
    searches: Sequence[tuple[MixedTask, float]], scale: int
) -> tuple[str, list[PaperClaim]]:
    """Return the rates at the paper's size, and the loss by the wrong split.

    Args:
        searches: Those of `mixed_tasks` in their order, with their rates; empty: not measured.
        scale: The paper's machines per machine.
    """
    if not searches:
        return "Not measured.", []
    rates = [rate for _, rate in searches]
    best = max(rate for task, rate in searches if task.has_mixed_pool)
    rows = []
    for task, rate in searches:
        design = task.point.design
        whole = f"{scale * design.num_prompt}P/{scale * design.num_token}T"
        change = f"{100 * (rate / best - 1):+.1f} %" if best else "-"
        rows.append([whole, "yes" if task.has_mixed_pool else "no", f"{scale * rate:.1f}", change])
    table = format_table(["cluster", "mixed pool", "requests/s", "against the best split"], rows)
    loss = 1 - rates[0] / best if best else None
    gain = rates[0] / rates[1] if rates[1] else None
    return table, [
        PaperClaim(
            "cluster for code, conversations: loss with the mixed pool",
            ExpectedLimit(MAX_LOSS),
            loss,
        ),
        PaperClaim(
            "the same beside no mixed pool",
            ExpectedLimit(1.0, is_minimum=True, unit="x"),
            gain,
            "" if gain else "without it no rate is served",
        ),
    ]
