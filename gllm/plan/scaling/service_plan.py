"""Plan of a service that scales by its rate: worker type, number of workers by rate, plan.yaml."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf
from statistics import fmean
from typing import NamedTuple

from gllm.options.slo import Slo
from gllm.plan.budget import SearchBudget
from gllm.plan.latency_limits import LatencyLimits
from gllm.plan.scaling.fleet_size import FleetCase, FleetOutcome, WorkerSpec, least_fleet
from gllm.plan.scaling.latency_fit import FittedLatency, fit_latency
from gllm.plan.scaling.worker_type import DEGREES, WorkerType, best_worker, rate_workers
from gllm.plan.serving_plan import (
    EnginePlan,
    ExpectedFigures,
    LatencyGoals,
    NodePlan,
    RouterPlan,
    ServingPlan,
    StagePlan,
)
from gllm.routing.scaling.autoscaler import ScaleRule, fit_scale_rule
from gllm.sim.deployment import roofline_deployment
from gllm.sim.workloads.requests import make_workload

RATE_SHARES = (0.5, 0.75, 1.0)
"""Rates at which the number of workers is searched, per planned rate."""
BASELINE = "least-tokens"
"""Policy that the placement is compared with: join the shortest queue."""
MAX_MODEL_LEN = 4096
NUM_SAMPLES = 1000
"""Requests of which the mean lengths are taken."""


@dataclass(frozen=True)
class ScaleTask:
    """Model, devices, workload and limits of a plan."""

    model: str
    """A name of MODELS."""
    device: str
    """A name of DEVICES."""
    workload: str
    rate: float
    """Requests per second."""
    limits: LatencyLimits
    rank_link: str = "nvlink"
    num_gpus: int | None = None
    """GPUs per worker; None: the best number."""
    seconds: float = 120.0
    """Time in which the requests of a simulation arrive."""
    seed: int = 0

    @property
    def slo(self) -> Slo:
        """Limits of each request.

        Raises:
            ValueError: A limit is missing, or is one of a percentile.
        """
        ttft, tpot = self.limits.ttft, self.limits.tpot
        if ttft is None or tpot is None or self.limits.percentiles:
            raise ValueError(
                "slo: give a limit of each request for both, as in ttft=1.6,atgt=0.075"
            )
        return Slo(ttft, tpot)


class ScalePoint(NamedTuple):
    """Workers at a rate."""

    rate: float
    placed: FleetOutcome
    """With the policy aladdin."""
    baseline: FleetOutcome | None
    """With BASELINE; None if no fleet was large enough."""


class ScaleResult(NamedTuple):
    """Worker type, fleets by rate, and the rule that follows."""

    workers: list[WorkerType]
    worker: WorkerSpec
    fit: FittedLatency
    points: list[ScalePoint]
    rule: ScaleRule

    def num_workers(self, rate: float) -> int:
        """Return the number of workers for a rate: that of the rule, and at least the searched."""
        searched = [each.placed.num_workers for each in self.points if each.rate >= rate]
        return max(1, self.rule.num_engines(rate), min(searched, default=0))


def mean_context(workload: str, seed: int = 0) -> float:
    """Return the mean tokens that a request holds over its life: m_r."""
    jobs = make_workload(workload, NUM_SAMPLES, seed=seed)
    return fmean(
        min(MAX_MODEL_LEN, each.num_prompt_tokens + each.num_output_tokens / 2) for each in jobs
    )


def plan_scale(
    task: ScaleTask,
    on_outcome: Callable[[], None] = lambda: None,
    budget: SearchBudget | None = None,
) -> ScaleResult:
    """Return the worker type and the number of workers at each rate.

    Args:
        task: What is planned.
        on_outcome: Called after each simulation.
        budget: Asked before each simulation; None: no limit.

    Raises:
        ValueError: A name is unknown, the SLO is incomplete, or no worker or fleet meets it.
        SearchEndedError: The budget is spent.
    """
    tpot = task.slo.tpot_seconds
    assert tpot is not None
    context = mean_context(task.workload, task.seed)
    degrees = DEGREES if task.num_gpus is None else (task.num_gpus,)
    workers = rate_workers(task.model, task.device, tpot, context, task.rank_link, degrees)
    best = best_worker(workers)
    if not best.rate:
        raise ValueError(
            f"slo: no number of {task.device} decodes {task.model} within {tpot:g} s per token: "
            "loosen tpot or choose another device"
        )
    worker, fit = describe_worker(task.model, task.device, best.num_gpus, task.rank_link)
    points: list[ScalePoint] = []
    for share in RATE_SHARES:
        points.append(_search_point(task, worker, share * task.rate, points, on_outcome, budget))
    rule = fit_scale_rule([(each.rate, each.placed.num_workers) for each in points])
    return ScaleResult(workers, worker, fit, points, rule)


def describe_worker(
    model: str, device: str, num_gpus: int, rank_link: str
) -> tuple[WorkerSpec, FittedLatency]:
    """Return a worker by the roofline cost model, and the linear fit of its latencies."""
    deployment = roofline_deployment(
        model, device, 1, MAX_MODEL_LEN, degrees=(num_gpus,), rank_link=rank_link
    )
    fit = fit_latency(deployment.cost)
    config = deployment.scheduler
    worker = WorkerSpec(
        model, deployment.layers[0], deployment.cost, fit.model,
        config.num_blocks * config.block_size, num_gpus,
    )  # fmt: skip
    return worker, fit


def _search_point(
    task: ScaleTask,
    worker: WorkerSpec,
    rate: float,
    earlier: Sequence[ScalePoint],
    on_outcome: Callable[[], None],
    budget: SearchBudget | None,
) -> ScalePoint:
    case = FleetCase(worker, task.workload, rate, task.slo, seed=task.seed, seconds=task.seconds)
    start = earlier[-1].placed.num_workers if earlier else 2
    attainment = task.limits.attainment
    placed = least_fleet(case, attainment, start, on_outcome=lambda _: on_outcome(), budget=budget)
    if placed is None:
        raise ValueError(
            f"slo: no fleet keeps the limits of a share of {attainment:g} of the requests at "
            f"{rate:g} requests per second: loosen a limit or the attainment"
        )
    baseline = None
    if not earlier or earlier[-1].baseline is not None:
        # Where a fleet of four times the size is too small, a larger one is not tried.
        baseline = least_fleet(
            replace(case, policy=BASELINE), attainment, placed.num_workers,
            4 * placed.num_workers, lambda _: on_outcome(), budget,
        )  # fmt: skip
    return ScalePoint(rate, placed, baseline)


def to_serving_plan(
    task: ScaleTask,
    result: ScaleResult,
    command: str,
    checkpoint: str | None = None,
    price: float | None = None,
    startup_seconds: float | None = None,
    num_workers: int | None = None,
) -> ServingPlan:
    """Return the plan that `gllm up` starts.

    Args:
        task: What was planned.
        result: Its outcome.
        command: Command that planned it.
        checkpoint: Folder or hub name of the model; None: the name in the table.
        price: Dollars per hour of one device; None: unknown.
        startup_seconds: Time from the start of an engine until it serves; None: unknown.
        num_workers: Workers of the plan; None: those for the rate.
    """
    gpus, slo = result.worker.num_gpus, task.slo
    count = num_workers or result.num_workers(task.rate)
    nodes = {
        f"node{index}": NodePlan(
            f"node{index}", [task.device] * gpus, None if price is None else price * gpus
        )
        for index in range(count)
    }
    devices, layers = list(range(gpus)), result.worker.num_layers
    engines = {
        f"engine{index}": EnginePlan(
            [StagePlan(f"node{index}", layers, devices)], flags={"max-model-len": MAX_MODEL_LEN}
        )
        for index in range(count)
    }
    flags: dict[str, object] = {"scale": f"1:{count}"}
    if result.rule.k5:
        flags["scale-engine-rate"] = round(1 / result.rule.k5, 4)
    if startup_seconds is not None:
        flags["scale-startup-seconds"] = startup_seconds
    at_rate = result.points[-1].placed
    return ServingPlan(
        checkpoint or task.model,
        nodes,
        engines,
        router=RouterPlan("node0", policy="aladdin", flags=flags),
        slo=LatencyGoals(slo.ttft_seconds, slo.tpot_seconds),
        workload=task.workload,
        expected=ExpectedFigures(
            command, task.rate, attainment=at_rate.attainment, startup_seconds=startup_seconds
        ),
    )


def affordable_workers(
    price: float | None, gpus_per_worker: int, max_dollars: float | None
) -> float:
    """Return the number of workers within dollars per hour; infinite without a limit.

    Raises:
        ValueError: There is a limit, but no price.
    """
    if max_dollars is None:
        return inf
    if price is None:
        raise ValueError(
            "--max-dollars: the device has no price: give one with --prices DEVICE=DOLLARS"
        )
    return max_dollars // (price * gpus_per_worker)
