"""Plan of a service that scales by its rate: worker type, number of workers by rate, plan.yaml."""

from collections.abc import Callable
from dataclasses import replace
from math import inf
from statistics import fmean
from typing import NamedTuple

from gllm.plan.best_first import SearchBudget
from gllm.plan.layout import PlannedEngine, PlannedStage, lay_out
from gllm.plan.nodes import DeviceCluster, DeviceNode
from gllm.plan.problem import ServiceProblem
from gllm.plan.scale.fleet_size import FleetCase, FleetOutcome, WorkerSpec, least_fleet
from gllm.plan.scale.latency_fit import FittedLatency, fit_latency
from gllm.plan.scale.worker_type import (
    DEGREES,
    MAX_MODEL_LEN,
    WorkerType,
    best_worker,
    throughput_by_degree,
)
from gllm.plan.serving_plan import ExpectedFigures, RouterPlan, ServingPlan
from gllm.routing.scaling.autoscaler import ScaleRule, fit_scale_rule
from gllm.sim.deployment import roofline_deployment
from gllm.sim.workloads.requests import make_workload

RATE_SHARES = (0.5, 0.75, 1.0)
"""Rates at which the number of workers is searched, per planned rate."""
BASELINE = "least-tokens"
"""Policy that the placement is compared with: join the shortest queue."""
NUM_SAMPLES = 1000
"""Requests of which the mean lengths are taken."""


class ScalePoint(NamedTuple):
    """Fewest engines that serve one request rate, with the policy `aladdin` and with a baseline."""

    rate: float
    """Requests per second."""
    placed: FleetOutcome
    """Smallest fleet with the routing policy `aladdin`."""
    baseline: FleetOutcome | None
    """Smallest fleet with the routing policy BASELINE; None if no fleet was large enough."""


class ScaleResult(NamedTuple):
    """Result of `plan_scale`: GPUs per engine, and the number of engines by request rate."""

    workers: list[WorkerType]
    """Throughput of an engine by number of GPUs."""
    worker: WorkerSpec
    """Chosen engine type."""
    fit: FittedLatency
    """Linear latency model of the chosen engine type."""
    points: list[ScalePoint]
    """Numbers of engines at several request rates."""
    rule: ScaleRule
    """Number of engines as a function of the request rate, fitted to `points`."""

    def num_workers(self, rate: float) -> int:
        """Return the number of engines for a request rate per second."""
        searched = [point.placed.num_workers for point in self.points if point.rate >= rate]
        return max(1, self.rule.num_engines(rate), min(searched, default=0))


def mean_context(workload: str, seed: int = 0) -> float:
    """Return the mean number of KV cache tokens of a request over its lifetime (m_r in Aladdin).

    Args:
        workload: Name of the workload.
        seed: Seed of the sampled lengths.
    """
    jobs = make_workload(workload, NUM_SAMPLES, seed=seed)
    return fmean(
        min(MAX_MODEL_LEN, job.num_prompt_tokens + job.num_output_tokens / 2) for job in jobs
    )


def plan_scale(
    problem: ServiceProblem,
    num_gpus: int | None = None,
    rank_link: str = "nvlink",
    on_outcome: Callable[[], None] = lambda: None,
    budget: SearchBudget | None = None,
) -> ScaleResult:
    """Search for the GPUs per engine and the number of engines at several request rates (Aladdin).

    Args:
        problem: Model, workload, request rate, latency limits, and one kind of devices.
        num_gpus: GPUs per engine; None: the number with the highest throughput per GPU.
        rank_link: Name of the link between the GPUs of an engine.
        on_outcome: Called after each simulation.
        budget: Time and evaluation limit; None: no limit.

    Raises:
        ValueError: A name is unknown, a latency limit is missing, or no engine or fleet meets the
            limits.
        SearchEndedError: The budget is spent.
    """
    (device,), model = problem.devices, problem.model
    _, tpot = problem.limits.require("ttft", "tpot")
    assert problem.rate is not None, "workers are counted for a rate"
    context = mean_context(problem.workload, problem.seed)
    degrees = DEGREES if num_gpus is None else (num_gpus,)
    workers = throughput_by_degree(model, device, tpot, context, rank_link, degrees)
    best = best_worker(workers)
    if not best.rate:
        raise ValueError(
            f"slo: no number of {device} decodes {model} within {tpot:g} s per token: "
            "loosen tpot or choose another device"
        )
    worker, fit = describe_worker(model, device, best.num_gpus, rank_link)
    points: list[ScalePoint] = []
    attainment, start, is_compared = problem.limits.attainment, 2, True
    for share in RATE_SHARES:
        case = FleetCase(
            worker, problem.workload, share * problem.rate, problem.limits, seed=problem.seed,
            seconds=problem.min_seconds,
        )  # fmt: skip
        placed = least_fleet(
            case, attainment, start, on_outcome=lambda _: on_outcome(), budget=budget
        )
        if placed is None:
            raise ValueError(
                f"slo: no fleet keeps the limits of a share of {attainment:g} of the requests at "
                f"{case.rate:g} requests per second: loosen a limit or the attainment"
            )
        start, baseline = placed.num_workers, None
        if is_compared:
            # Where a fleet of four times the size is too small, a larger one is not tried.
            baseline = least_fleet(
                replace(case, policy=BASELINE), attainment, start, 4 * start,
                lambda _: on_outcome(), budget,
            )  # fmt: skip
            is_compared = baseline is not None
        points.append(ScalePoint(case.rate, placed, baseline))
    rule = fit_scale_rule([(point.rate, point.placed.num_workers) for point in points])
    return ScaleResult(workers, worker, fit, points, rule)


def describe_worker(
    model: str, device: str, num_gpus: int, rank_link: str
) -> tuple[WorkerSpec, FittedLatency]:
    """Return an engine type with roofline step times, and the linear fit of its latencies.

    Args:
        model: Name of the model.
        device: Name of the GPU.
        num_gpus: GPUs of the engine, its tensor-parallel degree.
        rank_link: Name of the link between its GPUs.
    """
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


def to_serving_plan(
    problem: ServiceProblem, result: ScaleResult, startup_seconds: float | None = None
) -> ServingPlan:
    """Convert the result of `plan_scale` into a serving plan with one node for each engine.

    Args:
        problem: Model, workload, request rate and latency limits.
        result: Engine type and numbers of engines.
        startup_seconds: Time from the start of an engine until it serves; None: unknown.
    """
    assert problem.rate is not None, "workers are counted for a rate"
    (device,), gpus = problem.devices, result.worker.num_gpus
    numbers = range(result.num_workers(problem.rate))
    engines = [
        PlannedEngine(
            f"engine{index}",
            (PlannedStage((index,) * gpus, result.worker.num_layers),),
            flags={"max-model-len": MAX_MODEL_LEN},
        )
        for index in numbers
    ]
    flags: dict[str, object] = {"scale": f"1:{len(numbers)}"}
    if result.rule.k5:
        flags["scale-engine-rate"] = round(1 / result.rule.k5, 4)
    if startup_seconds is not None:
        flags["scale-startup-seconds"] = startup_seconds
    at_rate = result.points[-1].placed
    return lay_out(
        problem,
        DeviceCluster(tuple(DeviceNode(f"node{index}", device, gpus) for index in numbers)),
        engines,
        RouterPlan("", policy="aladdin", flags=flags),
        ExpectedFigures(
            "",
            problem.rate,
            attainment=at_rate.attainment,
            startup_seconds=startup_seconds,
        ),
    )


def affordable_workers(
    price: float | None, gpus_per_worker: int, max_dollars: float | None
) -> float:
    """Return the largest number of engines within a price limit; infinite without a limit.

    Args:
        price: US dollars per hour of one GPU; None: unknown.
        gpus_per_worker: GPUs of an engine.
        max_dollars: Limit in US dollars per hour; None: no limit.

    Raises:
        ValueError: There is a limit, but the price is unknown.
    """
    if max_dollars is None:
        return inf
    if price is None:
        raise ValueError(
            "--max-dollars: the device has no price: give one with --prices DEVICE=DOLLARS"
        )
    return max_dollars // (price * gpus_per_worker)
