"""Closed forms of an engine's goodput in one phase: bounds, estimates and binding constraints.

Source: "DistServe" (OSDI'24, arXiv 2401.09670), section 3: a prefill engine is an M/D/1 queue whose
service time is that of its slowest stage; a decode engine serves the largest batch within the limit
of TPOT.
"""

from collections.abc import Sequence
from math import ceil
from statistics import fmean
from typing import NamedTuple

from gllm.plan.best_first import CandidateBound
from gllm.scheduler.stage_work import StageWork
from gllm.sim.deployment import Deployment
from gllm.sim.workloads.requests import WorkloadRequest

SLACK = 1.5
"""Bound of a phase's goodput, per closed form: lengths vary, and some requests may miss a limit."""
CONSTRAINTS = ("GPU memory", "KV cache", "TTFT", "TPOT")
"""Constraints in the order in which an engine has to meet them."""


class EngineTimes(NamedTuple):
    """Times of one micro-batch in seconds."""

    total: float
    """All stages and the links between them."""
    slowest: float
    """The slowest stage."""


class PhaseLimits(NamedTuple):
    """Requests, and the limits that a share of them has to keep."""

    jobs: Sequence[WorkloadRequest]
    ttft: float
    """Seconds."""
    tpot: float
    """Seconds."""
    target: float
    """Share of the requests, 0..1."""


def measure_times(engine: Deployment, work: StageWork) -> EngineTimes:
    """Return the times of a micro-batch on an engine."""
    stages = [engine.cost.stage_seconds(stage, work) for stage in range(len(engine.layers))]
    total = sum(stages)
    for stage in range(len(stages) - 1):
        transfer = engine.cost.activation_transfer(stage, work)
        total += transfer.occupancy_seconds + transfer.propagation_seconds
    return EngineTimes(total, max(stages))


def prefill_work(prompts: Sequence[int]) -> StageWork:
    """Return the work of whole prompts, by their tokens."""
    return StageWork(0, sum(prompts), tuple((0, n) for n in prompts), 0, 0, len(prompts))


def decode_work(batch: int, context: float) -> StageWork:
    """Return the work of a decode step of a batch with a mean context in tokens."""
    return StageWork(0, batch, (), batch, round(batch * context), batch)


def bound_prefill(engine: Deployment, limits: PhaseLimits) -> CandidateBound:
    """Return the bound and the estimate of a prefill engine's goodput, requests per second.

    The bound is the throughput with all requests at once. The estimate is the rate at which the
    longest prompt that has to keep the limit of TTFT just keeps it after the mean wait: that of the
    M/G/1 queue, which is the M/D/1 queue for prompts of one length.
    """
    if reason := _refuse_cache(engine, limits.jobs):
        return CandidateBound(0.0, 0.0, reason)
    prompts = [job.num_prompt_tokens for job in limits.jobs]
    slow = sorted(prompts)[ceil(limits.target * len(prompts)) - 1]
    wait = limits.ttft - measure_times(engine, prefill_work([slow])).total
    if wait < 0:
        return CandidateBound(0.0, 0.0, CONSTRAINTS[2])
    batches = _pack(prompts, engine.scheduler.prefill_batch_tokens or max(prompts))
    services = [measure_times(engine, prefill_work(batch)).slowest for batch in batches]
    saturated = len(prompts) / sum(services)
    mean, square = fmean(services), fmean(each**2 for each in services)
    per_batch = len(prompts) / len(batches)
    expected = per_batch * 2 * wait / (square + 2 * wait * mean)
    return CandidateBound(SLACK * saturated, min(expected, saturated))


def _pack(prompts: Sequence[int], limit: int) -> list[list[int]]:
    """Return first-come batches of prompts with at most a number of tokens; longer ones alone."""
    batches: list[list[int]] = []
    for prompt in prompts:
        if batches and sum(batches[-1]) + prompt <= limit:
            batches[-1].append(prompt)
        else:
            batches.append([prompt])
    return batches


def bound_decode(engine: Deployment, limits: PhaseLimits) -> CandidateBound:
    """Return the bound and the estimate of a decode engine's goodput, requests per second."""
    if reason := _refuse_cache(engine, limits.jobs):
        return CandidateBound(0.0, 0.0, reason)
    prompt = fmean(job.num_prompt_tokens for job in limits.jobs)
    output = max(1.0, fmean(job.num_output_tokens for job in limits.jobs) - 1)
    context, stages = prompt + output / 2, len(engine.layers)
    config = engine.scheduler
    capacity = config.num_blocks * config.block_size / (context * stages)
    most = max(1, min(config.max_num_seqs // stages, int(capacity)))
    rates = []
    for batch in range(1, most + 1):
        times = measure_times(engine, decode_work(batch, context))
        if times.total > limits.tpot:
            break
        rates.append(batch / times.slowest / output)
    if not rates:
        return CandidateBound(0.0, 0.0, CONSTRAINTS[3])
    return CandidateBound(SLACK * max(rates), max(rates))


def _refuse_cache(engine: Deployment, jobs: Sequence[WorkloadRequest]) -> str:
    """Return the constraint if the longest request does not fit the KV cache; else empty."""
    longest = max(job.num_prompt_tokens + job.num_output_tokens for job in jobs)
    config = engine.scheduler
    return CONSTRAINTS[1] if config.num_blocks * config.block_size < longest else ""


def binding_constraint(reasons: Sequence[str]) -> str:
    """Return the constraint that the most successful of several refused engines fails."""
    known = [each for each in CONSTRAINTS if each in reasons]
    return known[-1] if known else CONSTRAINTS[0]
