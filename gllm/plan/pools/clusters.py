"""Simulated clusters of prompt and token machines, and their highest rate within the SLOs.

Source: Patel et al., "Splitwise", ISCA 2024 (arXiv 2311.18677); limits of batches and the overlap
of transfers from its simulator, splitwise-sim (MIT).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import ceil, log
from typing import NamedTuple

from gllm.observability.latency import RequestTimeline
from gllm.plan.attainment import Attainment, AttainmentTest, JudgedRequest
from gllm.plan.engine_bounds import EngineBounds, measure_workload
from gllm.plan.engine_checks import planned_max_model_len
from gllm.plan.engine_times import EngineTimes, decode_step_work, prefill_work
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.cluster.paired import simulate_pool, simulate_split
from gllm.sim.costs.base import CostModel, DecodeOnlyCostModel
from gllm.sim.costs.splitwise import SplitwiseCostModel, SplitwiseProfile, read_splitwise_profile
from gllm.sim.deployment import Deployment
from gllm.sim.hardware.machines import ClusterDesign, MachineType
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.metrics.slowdowns import (
    SPLITWISE_SLOS,
    RequestLatencies,
    SloMargin,
    check_slos,
    measure_latencies,
    worst_margin,
)
from gllm.sim.monotone_search import find_last
from gllm.sim.workloads.requests import WorkloadRequest, cut_requests, make_workload

MODEL = "bloom-176b"
"""Model of the paper's cluster studies."""
PROFILES = {"bloom-176b": "bloom-176b", "llama-2-70b": "llama2-70b"}
"""Name in Splitwise's measurements by name of the model's shape."""
MIN_SECONDS = 30.0
"""Shortest time in which requests arrive: a conversation's decode takes 10 s, and a cluster whose
requests arrive within it is never full."""
LONGEST_REQUEST = 14_089
"""Tokens of the longest request of the traces."""
USABLE_SHARE = 0.9
"""Share of the GPUs' memory for weights and KV cache."""
MAX_BATCH = 512
"""Requests of a batch in splitwise-sim."""
PROMPT_BATCH_TOKENS = 2048
"""Prompt tokens of a batch, from which throughput does not rise."""
ACTIVATION_BYTES = 2
"""Bytes per element of the activations between two machines."""
MEDIAN_TBT_LIMIT = next(slo.limit for slo in SPLITWISE_SLOS if slo[:2] == ("tbt", 50))
"""Limit of the slowdown."""
OVERLAP_FACTOR = 10.0
"""Factor on the bandwidth that stands for transfers under computation, as in splitwise-sim."""
RATE_STEP = 1.05
"""Rates of a search are powers of this."""
MAX_FACTOR = 10
"""Limit of a search, per rate at its start."""
FIRST_STEP = 4
"""First step of a search, as a power of RATE_STEP."""
MIN_REQUESTS = 500
"""Requests of the first run of a test, at least."""
MAX_REQUESTS = 2000
"""Requests of the longest run of a test, unless its time asks for more. Where it decides nothing,
the shares of its requests decide."""
FIRST_SECONDS, MAX_SECONDS = 80.0, 200.0
"""Least times of the first and of the longest run of a test, whatever the rate: a cluster fills for
40 s, as conversations take 10 to 30 s, and looks overloaded until it is full."""
WORKLOADS = {"code": "azure-code", "conversation": "azure-conv"}
"""Shipped traces of the paper's workloads; arrivals are Poisson's, as in the paper."""


class SampleSize(NamedTuple):
    """Smallest number of requests and shortest duration in seconds of a simulation."""

    requests: int
    """Smallest number of requests."""
    seconds: float = MIN_SECONDS
    """Shortest time in which the requests arrive, in seconds."""

    def at_rate(self, rate: float) -> int:
        """Return the number of requests of a simulation at a rate per second."""
        return max(self.requests, ceil(rate * self.seconds))


@dataclass(frozen=True)
class ClusterPoint:
    """Arguments of one simulation of a cluster with separate prefill and decode machines.

    In Splitwise's words these are prompt and token machines.
    """

    design: ClusterDesign
    """Types and numbers of the prompt and token machines."""
    workload: str
    """A name of WORKLOADS."""
    rate: float
    """Requests per second."""
    size: SampleSize
    is_static: bool = False
    """True if all requests arrive at once, as a batch job."""
    policy: str = "splitwise"
    """Scheduling policy of every machine."""
    seed: int = 0
    model: str = MODEL
    """A name of PROFILES."""
    max_request_tokens: int | None = None
    """Tokens to which longer requests are cut; None: none is cut."""

    @property
    def num_requests(self) -> int:
        """Number of simulated requests."""
        return self.size.requests if self.is_static else self.size.at_rate(self.rate)

    def jobs(self, count: int) -> list[WorkloadRequest]:
        """Return the first requests. Those of a shorter run are the first ones of a longer run."""
        arrivals = "static" if self.is_static else "poisson"
        jobs = make_workload(WORKLOADS[self.workload], count, self.rate, arrivals, self.seed)
        return cut_requests(jobs, self.max_request_tokens)


@dataclass(frozen=True)
class PointOutcome:
    """Result of one simulation of a cluster: throughput, and slowdowns relative to their limits."""

    margins: list[SloMargin]
    """The nine percentiles of slowdowns (TTFT, TBT, E2E) with their limits."""
    requests_per_second: float
    """Completed requests over the time from the first arrival to the last token."""
    busy_seconds: float
    """Time in which machines computed, summed over all machines."""

    @property
    def is_served(self) -> bool:
        """True if all nine SLOs hold."""
        return all(margin.is_met for margin in self.margins)

    @property
    def worst(self) -> SloMargin:
        """Slowdown that is largest relative to its limit."""
        return worst_margin(self.margins)


def machine_profile(model: str, device: str) -> SplitwiseProfile:
    """Return the step times of a model on a machine type, as measured by Splitwise's authors.

    Args:
        model: A name of PROFILES.
        device: Name of the GPU in the measurements, such as `a100-80gb`.

    Raises:
        ValueError: The model was not measured.
    """
    if model not in PROFILES:
        raise ValueError(f"model {model!r} was not measured: choose from {', '.join(PROFILES)}")
    return read_splitwise_profile(PROFILES[model], device)


def reference_latencies(prompt: int, output: int, model: str = MODEL) -> RequestLatencies:
    """Return the latencies of a request on an idle DGX-A100, the reference of Splitwise's SLOs.

    Args:
        prompt: Prompt tokens.
        output: Output tokens.
        model: A name of PROFILES.
    """
    profile = machine_profile(model, "a100-80gb")
    ttft, tbt = profile.prompt_seconds(prompt), profile.token_seconds(1)
    return RequestLatencies(ttft, tbt if output > 1 else None, ttft + (output - 1) * tbt)


def kv_capacity(machine: MachineType, model: str, num_machines: int = 1) -> int:
    """Return how many tokens fit the KV cache of an engine on one or more equal machines.

    Args:
        machine: Type of the machines.
        model: A name of PROFILES.
        num_machines: Number of machines among which the model is divided.

    Raises:
        ValueError: The weights do not fit.
    """
    shape = MODELS[model]
    weight_bytes = shape.parameters * shape.bytes_per_weight / num_machines
    kv_bytes = shape.layers * shape.kv_bytes / num_machines
    return machine.kv_tokens(weight_bytes, kv_bytes, USABLE_SHARE)


def machine_scheduler(policy: str) -> SchedulerConfig:
    """Return the scheduler options of every machine, simulated and planned.

    Machines of the policy `splitwise` admit requests as in the authors' simulator, from which the
    figures of the plans are.

    Args:
        policy: Scheduling policy.
    """
    return SchedulerConfig(
        policy=policy,
        kv_admission="reserve-max" if policy == "splitwise" else "auto",
        max_num_batched_tokens=PROMPT_BATCH_TOKENS + MAX_BATCH,
        max_num_seqs=MAX_BATCH,
        prefix_cache=False,
        async_scheduling=False,
    )


def build_machine(
    machine: MachineType,
    policy: str,
    has_prefill: bool = True,
    model: str = MODEL,
    num_stages: int = 1,
    longest: int = LONGEST_REQUEST,
) -> Deployment:
    """Return the simulated engine of a machine, which runs the model with tensor parallelism 8.

    Args:
        machine: Type of the machine.
        policy: Scheduling policy.
        has_prefill: False for a token machine, where prefills take no time.
        model: A name of PROFILES.
        num_stages: Pipeline stages, one on each of as many machines.
        longest: Tokens of the longest request.
    """
    config = machine_scheduler(policy)
    blocks = kv_capacity(machine, model, num_stages) // config.block_size
    shape = MODELS[model]
    cost: CostModel = SplitwiseCostModel(
        machine_profile(model, machine.device),
        num_stages,
        shape.hidden * ACTIVATION_BYTES / machine.link.bandwidth,
    )
    if not has_prefill:
        cost = DecodeOnlyCostModel(cost)
    layers = [shape.layers // num_stages] * num_stages
    length = planned_max_model_len(longest, blocks * config.block_size, shape.max_context)
    return Deployment(model, layers, cost, config.resolve(num_stages, blocks, length))


def transfer_seconds(design: ClusterDesign, num_tokens: int, model: str = MODEL) -> float:
    """Return the seconds of a KV transfer that do not overlap with computation.

    Args:
        design: Cluster, whose slower link is used.
        num_tokens: Tokens whose KV cache is transferred.
        model: A name of PROFILES.
    """
    shape = MODELS[model]
    bandwidth = min(design.prompt.link.bandwidth, design.token.link.bandwidth)
    return num_tokens * shape.layers * shape.kv_bytes / (bandwidth * OVERLAP_FACTOR)


def simulate_point(point: ClusterPoint) -> PointOutcome:
    """Simulate prefill and decode machines at a request rate and check Splitwise's nine SLOs.

    Args:
        point: Machines, workload and rate.
    """
    jobs = point.jobs(point.num_requests)
    lines, busy = _serve(point, jobs, None)
    pairs = pair_latencies(lines, jobs, point.model)
    span = max(line.times[-1] for line in lines) - jobs[0].arrival_seconds
    return PointOutcome(check_slos(pairs), len(pairs) / span, busy)


class PointVerdict(NamedTuple):
    """Result of a test of a cluster at a rate."""

    is_served: bool
    """True if all nine SLOs hold and the cluster is stable."""
    worst: SloMargin
    """Slowdown of the longest run that is largest relative to its limit."""
    attainment: Attainment | None = None
    """Verdict by the share of requests within each limit; None: not tested."""


def judge_point(point: ClusterPoint, check: Callable[[], None] | None = None) -> PointVerdict:
    """Test whether a cluster is stable at a rate and within the nine SLOs; runs are extended.

    A percentile is within its limit if that share of the requests is. The first run has the
    requests of `point.num_requests`, or more.

    Args:
        point: Machines, workload and rate.
        check: Called now and then; an error that it raises ends the simulation.
    """
    worst: list[SloMargin] = []

    def simulate(count: int) -> list[JudgedRequest]:
        requests, margin = judge_requests(point, count, check)
        worst[:] = [margin]
        return requests

    goals = tuple(slo.percent / 100 for slo in SPLITWISE_SLOS)
    first = max(point.num_requests, MIN_REQUESTS, ceil(point.rate * FIRST_SECONDS))
    most = max(first, MAX_REQUESTS, ceil(point.rate * MAX_SECONDS))
    attainment = AttainmentTest(goals, first, most).run(simulate)
    return PointVerdict(attainment.is_likely, worst[0], attainment)


def judge_requests(
    point: ClusterPoint, count: int, check: Callable[[], None] | None = None
) -> tuple[list[JudgedRequest], SloMargin]:
    """Simulate the first requests of a point.

    Args:
        point: Machines, workload and rate.
        count: Number of requests.
        check: Called now and then; an error that it raises ends the simulation.

    Returns:
        Scores of the requests for the nine limits, and the slowdown that is largest relative to its
        limit.
    """
    jobs = point.jobs(count)
    lines, _ = _serve(point, jobs, check)
    pairs = pair_latencies(lines, jobs, point.model)
    requests = [
        JudgedRequest(line.arrival, line.times[-1], _scores(*pair))
        for line, pair in zip(lines, pairs, strict=True)
    ]
    return requests, worst_margin(check_slos(pairs))


def _scores(ours: RequestLatencies, alone: RequestLatencies) -> tuple[float, ...]:
    """Return 1 for each of the nine limits that a request is within, else 0."""

    def is_within(metric: str, limit: float) -> bool:
        value, reference = getattr(ours, metric), getattr(alone, metric)
        return value is None or not reference or value <= limit * reference

    return tuple(float(is_within(slo.metric, slo.limit)) for slo in SPLITWISE_SLOS)


def pair_latencies(
    lines: Sequence[RequestTimeline], jobs: Sequence[WorkloadRequest], model: str = MODEL
) -> list[tuple[RequestLatencies, RequestLatencies]]:
    """Return each request's simulated latencies, paired with those on an idle DGX-A100.

    Requests that have not finished are left out.

    Args:
        lines: Simulated times of each request.
        jobs: Lengths of the same requests.
        model: A name of PROFILES.
    """
    pairs = []
    for line, job in zip(lines, jobs, strict=True):
        if (latencies := measure_latencies(line)) is not None:
            reference = reference_latencies(job.num_prompt_tokens, job.num_output_tokens, model)
            pairs.append((latencies, reference))
    return pairs


def _serve(
    point: ClusterPoint, jobs: list[WorkloadRequest], check: Callable[[], None] | None
) -> tuple[list[RequestTimeline], float]:
    """Return the timelines of the jobs and the busy time of all machines."""
    design = point.design

    def machines(machine: MachineType, count: int, has_prefill: bool) -> dict[str, Deployment]:
        deployment = build_machine(
            machine,
            point.policy,
            has_prefill,
            point.model,
            longest=point.max_request_tokens or LONGEST_REQUEST,
        )
        return {f"{machine.name}-{index}": deployment for index in range(count)}

    prompts = machines(design.prompt, design.num_prompt, True)
    if not design.num_token:
        run = simulate_pool(prompts, jobs, "pending-tokens", point.seed, check)
        return [run.requests[seq].line for seq in range(len(jobs))], run.busy_seconds()
    tokens = machines(design.token, design.num_token, False)
    split = simulate_split(
        prompts,
        tokens,
        jobs,
        lambda count: transfer_seconds(design, count, point.model),
        seed=point.seed,
        check=check,
    )
    return split.lines, split.busy_seconds


@cache
def mean_workload_lengths(
    workload: str, max_request_tokens: int | None = None
) -> tuple[float, float]:
    """Return the mean number of prompt tokens and of output tokens of a workload.

    Args:
        workload: A name of WORKLOADS.
        max_request_tokens: Tokens to which longer requests are cut; None: none is cut.
    """
    jobs = cut_requests(make_workload(WORKLOADS[workload], 4000), max_request_tokens)
    num_prompt_tokens = sum(job.num_prompt_tokens for job in jobs)
    return num_prompt_tokens / len(jobs), sum(job.num_output_tokens for job in jobs) / len(jobs)


def fluid_rate(
    design: ClusterDesign,
    workload: str,
    model: str = MODEL,
    max_request_tokens: int | None = None,
) -> float:
    """Return the request rate that saturates a cluster's prompt or token machines, by a formula.

    Queueing is ignored. Prompt machines prefill full batches. Token machines decode the largest
    batch within the median TBT limit that fits the KV cache. Machines of a cluster without token
    machines do both in turn.

    Args:
        design: Types and numbers of the machines.
        workload: A name of WORKLOADS.
        model: A name of PROFILES.
        max_request_tokens: Tokens to which longer requests are cut; None: none is cut.

    Returns:
        Requests per second.
    """
    pair = design.prompt, design.token
    prompt_rate, token_rate = fluid_rates(pair, workload, model, max_request_tokens)
    if not design.num_token:
        return design.num_prompt / (1 / prompt_rate + 1 / token_rate)
    return min(design.num_prompt * prompt_rate, design.num_token * token_rate)


@cache
def bound_rates(
    pair: tuple[MachineType, MachineType],
    workload: str,
    policy: str,
    model: str = MODEL,
    max_request_tokens: int | None = None,
) -> tuple[float, float]:
    """Return upper bounds of the requests per second of one prompt and of one token machine.

    No schedule serves more, whatever the latencies.

    Args:
        pair: Types of the prompt and token machines.
        workload: A name of WORKLOADS.
        policy: Scheduling policy of every machine.
        model: A name of PROFILES.
        max_request_tokens: Tokens to which longer requests are cut; None: none is cut.
    """
    jobs = cut_requests(make_workload(WORKLOADS[workload], MAX_REQUESTS), max_request_tokens)
    phases = (
        [job._replace(num_output_tokens=1) for job in jobs],
        [job for job in jobs if job.num_output_tokens > 1],
    )
    prompt, token = (
        EngineBounds(
            build_machine(machine, policy, has_prefill, model), measure_workload(requests)
        ).max_rate()
        for machine, has_prefill, requests in zip(pair, (True, False), phases, strict=True)
    )
    # Requests of one token need no token machine.
    return prompt, token * len(jobs) / len(phases[1])


def fluid_rates(
    pair: tuple[MachineType, MachineType],
    workload: str,
    model: str = MODEL,
    max_request_tokens: int | None = None,
) -> tuple[float, float]:
    """Return the request rates that saturate one prompt and one token machine: see `fluid_rate`."""
    prompt, output = mean_workload_lengths(workload, max_request_tokens)
    return (
        _prompt_rate(pair[0], model) / prompt,
        _token_rate(pair[1], prompt + output, model) / output,
    )


def _prompt_rate(machine: MachineType, model: str) -> float:
    """Return the prompt tokens per second of full batches."""
    times = EngineTimes(SplitwiseCostModel(machine_profile(model, machine.device)))
    return PROMPT_BATCH_TOKENS / times.total(prefill_work([PROMPT_BATCH_TOKENS]))


def _token_rate(machine: MachineType, length: float, model: str) -> float:
    """Return the output tokens per second of batches within the median TBT's limit."""
    times = EngineTimes(SplitwiseCostModel(machine_profile(model, machine.device)))
    limit = MEDIAN_TBT_LIMIT * machine_profile(model, "a100-80gb").token_seconds(1)
    most = max(1, min(MAX_BATCH, int(kv_capacity(machine, model) / length)))
    return times.decode_rate(length, limit, most) or 1 / times.total(decode_step_work(1, length))


def highest_rate(point: ClusterPoint) -> tuple[float, int]:
    """Search by simulation for the highest request rate at which a cluster meets all SLOs.

    Args:
        point: Cluster and workload; its rate is the first one to try.

    Returns:
        Requests per second, and the number of simulations.
    """
    return search_rate(lambda rate: simulate_point(replace(point, rate=rate)).is_served, point.rate)


def search_rate(serves: Callable[[float], bool], start_rate: float) -> tuple[float, int]:
    """Search for the highest request rate for which a function returns True.

    Rates are powers of RATE_STEP. The search covers the rates from 1 / MAX_FACTOR to MAX_FACTOR
    times the first one.

    Args:
        serves: Returns True if a rate in requests per second is served.
        start_rate: First rate to try.

    Returns:
        The rate, 0 if even the lowest is not served, and the number of calls of `serves`.
    """
    served: dict[int, bool] = {}

    def is_served(index: int, *_: int) -> bool:
        if index not in served:
            served[index] = serves(RATE_STEP**index)
        return served[index]

    start, reach = (round(log(value) / log(RATE_STEP)) for value in (start_rate, MAX_FACTOR))
    index = find_last(is_served, start, FIRST_STEP, start - reach, start + reach)
    return 0.0 if index is None else RATE_STEP**index, len(served)
