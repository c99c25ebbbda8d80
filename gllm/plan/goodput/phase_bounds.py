"""Closed forms of an engine's goodput in one phase: bounds, estimates and binding constraints.

Source: "DistServe" (OSDI'24, arXiv 2401.09670), section 3: a prefill engine is an M/D/1 queue whose
service time is that of its slowest stage; a decode engine serves the largest batch within the limit
of TPOT.
"""

from collections.abc import Sequence
from math import ceil, inf
from statistics import fmean

from gllm.options.slo import Slo
from gllm.plan.best_first import CandidateBound
from gllm.plan.engine_bounds import EngineBounds, measure_workload
from gllm.plan.engine_times import EngineTimes, prefill_work
from gllm.sim.deployment import Deployment
from gllm.sim.workloads.requests import WorkloadRequest, longest_job

SLACK = 1.5
"""Bound of a phase's goodput, per closed form within the limits: lengths vary, some requests may
miss a limit. The throughput of the engine without limits is a bound, too."""
CONSTRAINTS = ("GPU memory", "KV cache", "TTFT", "TPOT")
"""Constraints in the order in which an engine has to meet them."""


def bound_prefill(engine: Deployment, jobs: Sequence[WorkloadRequest], slo: Slo) -> CandidateBound:
    """Return an upper bound and an estimate of a prefill engine's goodput in requests per second.

    The bound is the throughput when all requests arrive at once. The estimate is the rate at which
    the mean queueing delay of an M/G/1 queue plus the prefill time of a long prompt equals the TTFT
    limit.

    Args:
        engine: Simulated engine that only prefills.
        jobs: Requests of the workload.
        slo: Limits of TTFT and TPOT, and the share of requests within them.
    """
    if reason := _refuse_cache(engine, jobs):
        return CandidateBound(0.0, 0.0, reason)
    times = EngineTimes(engine.cost, len(engine.layers))
    ttft, _ = slo.require("ttft", "tpot")
    prompts = [job.num_prompt_tokens for job in jobs]
    slow = sorted(prompts)[ceil(slo.attainment * len(prompts)) - 1]
    wait = ttft - times.total(prefill_work([slow]))
    if wait < 0:
        return CandidateBound(0.0, 0.0, CONSTRAINTS[2])
    batches = _pack(prompts, engine.scheduler.prefill_batch_tokens or max(prompts))
    services = [max(times.stages(prefill_work(batch))) for batch in batches]
    saturated = len(prompts) / sum(services)
    mean, square = fmean(services), fmean(seconds**2 for seconds in services)
    per_batch = len(prompts) / len(batches)
    expected = per_batch * 2 * wait / (square + 2 * wait * mean)
    score = min(
        SLACK * saturated, _max_rate(engine, [job._replace(num_output_tokens=1) for job in jobs])
    )
    return CandidateBound(score, min(expected, saturated))


def _pack(prompts: Sequence[int], limit: int) -> list[list[int]]:
    """Return first-come batches of prompts with at most a number of tokens; longer ones alone."""
    batches: list[list[int]] = []
    for prompt in prompts:
        if batches and sum(batches[-1]) + prompt <= limit:
            batches[-1].append(prompt)
        else:
            batches.append([prompt])
    return batches


def bound_decode(engine: Deployment, jobs: Sequence[WorkloadRequest], slo: Slo) -> CandidateBound:
    """Return an upper bound and an estimate of a decode engine's goodput in requests per second.

    The estimate is the rate of the largest batches whose step time is within the TPOT limit and
    whose KV cache fits.

    Args:
        engine: Simulated engine that only decodes.
        jobs: Requests of the workload.
        slo: Limits of TTFT and TPOT.
    """
    if reason := _refuse_cache(engine, jobs):
        return CandidateBound(0.0, 0.0, reason)
    _, tpot = slo.require("ttft", "tpot")
    prompt = fmean(job.num_prompt_tokens for job in jobs)
    output = max(1.0, fmean(job.num_output_tokens for job in jobs) - 1)
    context, stages = prompt + output / 2, len(engine.layers)
    config = engine.scheduler
    capacity = config.num_blocks * config.block_size / (context * stages)
    largest = max(1, min(config.max_num_seqs // stages, int(capacity)))
    rate = EngineTimes(engine.cost, stages).decode_rate(context, tpot, largest) / output
    if not rate:
        return CandidateBound(0.0, 0.0, CONSTRAINTS[3])
    # Requests of one token have no decode.
    decoded = [job for job in jobs if job.num_output_tokens > 1]
    most = _max_rate(engine, decoded) * len(jobs) / len(decoded) if decoded else inf
    return CandidateBound(min(SLACK * rate, most), rate)


def _max_rate(engine: Deployment, jobs: Sequence[WorkloadRequest]) -> float:
    """Return the requests per second that no schedule of an engine exceeds."""
    return EngineBounds(engine, measure_workload(jobs)).max_rate()


def _refuse_cache(engine: Deployment, jobs: Sequence[WorkloadRequest]) -> str:
    """Return the constraint if the longest request does not fit the KV cache; else empty."""
    longest = longest_job(jobs)
    config = engine.scheduler
    return CONSTRAINTS[1] if config.num_blocks * config.block_size < longest else ""


def constraint_of_nearest_candidate(reasons: Sequence[str]) -> str:
    """Return the failed constraint of the candidate that met most: the last one in CONSTRAINTS.

    Args:
        reasons: Constraint that each candidate failed.
    """
    known = [constraint for constraint in CONSTRAINTS if constraint in reasons]
    return known[-1] if known else CONSTRAINTS[0]
