"""Latency limits that a share of the requests is expected to miss, from a simulation of a plan."""

from collections.abc import Sequence
from dataclasses import replace
from math import ceil
from pathlib import Path

from gllm.observability.latency import (
    RequestTimeline,
    collect_latencies,
    percentile,
    slo_attainment,
)
from gllm.options.slo import Slo
from gllm.plan.serving_plan import ServingPlan
from gllm.sim.configured import simulate_requests
from gllm.sim.options import SimulationConfig, build_deployment, build_workload

TARGET_ATTAINMENT = 0.8
"""Share of the requests that are expected within both limits, at least."""
ATTAINMENT_RANGE = (0.6, 0.95)
"""Expected attainment of a comparison that says something: errors in both directions show."""
SHIFT = 0.01
"""Relative change of all latencies that shows how much the attainment depends on them."""
ROUNDING_SECONDS = 1e-4
"""Limits are rounded up to a multiple of it."""


def simulate_plan(
    plan: ServingPlan, profile: Path, workload: str, num_requests: int
) -> list[RequestTimeline]:
    """Return the requests of a plan's engines of one stage at its rate, simulated.

    Args:
        plan: With the figures of `gllm plan search`.
        profile: File of `gllm profile` from which it was made.
        workload: Workload of the plan.
        num_requests: Number of requests.
    """
    assert plan.expected is not None, "gllm plan search writes figures"
    assert plan.router is not None, "and a router"
    config = SimulationConfig(
        profile=str(profile),
        pipeline_parallel_size=1,
        workload=workload,
        requests=num_requests,
        rate=plan.expected.rate,
        engines=len(plan.engines),
    )
    options = next(iter(plan.engines.values())).scheduler
    config = replace(
        config,
        scheduler=replace(config.scheduler, **options),
        routing_policy=plan.router.policy or config.routing_policy,
    )
    jobs = build_workload(config)
    longest = max(job.num_prompt_tokens + job.num_output_tokens for job in jobs)
    served = simulate_requests(config, build_deployment(config, longest), jobs)
    return [each.line for each in served.values()]


def choose_limits(timelines: Sequence[RequestTimeline], tpot: float) -> Slo:
    """Return the lowest limit of TTFT, a whole percentile, with which TARGET_ATTAINMENT is kept.

    TPOT keeps the limit of the search: it hardly varies, so that any percentile of it would turn an
    error of 1 % into one of a fifth of the requests.

    Args:
        timelines: Requests of a simulation.
        tpot: Limit of TPOT in seconds.

    Raises:
        RuntimeError: The share of requests within the limits is out of ATTAINMENT_RANGE: latencies
            are too much alike.
    """
    ttfts = collect_latencies(timelines)["ttft"]
    for percent in range(round(100 * TARGET_ATTAINMENT), 101):
        ttft = ceil(percentile(ttfts, percent) / ROUNDING_SECONDS) * ROUNDING_SECONDS
        limits = Slo(round(ttft, 6), tpot)
        if slo_attainment(timelines, limits) >= TARGET_ATTAINMENT:
            break
    check_attainment(slo_attainment(timelines, limits))
    return limits


def shifted_attainments(timelines: Sequence[RequestTimeline], limits: Slo) -> tuple[float, float]:
    """Return the attainments (0..1) if all latencies were longer, and shorter, by SHIFT."""
    longer, shorter = (
        Slo((limits.ttft_seconds or 0) / factor, (limits.tpot_seconds or 0) / factor)
        for factor in (1 + SHIFT, 1 - SHIFT)
    )
    return slo_attainment(timelines, longer), slo_attainment(timelines, shorter)


def check_attainment(attainment: float | None) -> None:
    """Raise RuntimeError if an expected attainment (0..1) is unknown or out of its range."""
    low, high = ATTAINMENT_RANGE
    if attainment is None or not low <= attainment <= high:
        raise RuntimeError(
            f"the expected attainment is {attainment}, but has to be {low} to {high}: the limits "
            "say nothing; simulate more --requests"
        )
