"""Simulated systems of a goodput search, separate phases or engines for both, and their goodput.

Prefill and decode run as one simulated cluster with production's pair policy, holds and fetches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil, inf
from random import Random
from statistics import fmean
from typing import NamedTuple

from gllm.observability.latency import RequestTimeline
from gllm.options.slo import Slo
from gllm.plan.attainment import Attainment, AttainmentTest, JudgedRequest
from gllm.plan.goodput.engines import EngineCosts, make_engine
from gllm.plan.layout import Parallelism
from gllm.routing.disaggregation.policy_registry import make_pair_policy
from gllm.routing.policy_registry import make_policy
from gllm.sim.cluster.cluster import simulate_cluster
from gllm.sim.cluster.handoffs import HandoffRecord, KvNetwork
from gllm.sim.cluster.paired import simulate_pairs
from gllm.sim.cluster.router import PolicyRouter
from gllm.sim.deployment import simulate
from gllm.sim.hardware.devices import LINKS
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.monotone_search import find_last
from gllm.sim.workloads.requests import WorkloadRequest, make_workload

SEED = 0


@dataclass(frozen=True)
class System:
    """A service to simulate: separate prefill and decode engines, or engines for both phases."""

    name: str
    model: str
    costs: EngineCosts
    prefill: Parallelism
    decode: Parallelism | None = None
    """Parallelism of decode engines; None: the engines of `prefill` run both phases."""
    num_prefill: int = 1
    num_decode: int = 1
    prefill_policy: str = "distserve"
    decode_policy: str = "distserve"
    network: str = "nvlink"
    """Name of the link that transfers KV caches from prefill to decode engines."""
    node_link: str = "nvlink"
    """Name of the link between stages on different nodes."""
    prefill_crossings: frozenset[int] = frozenset()
    """Stages of prefill engines whose next stage is on another node."""
    decode_crossings: frozenset[int] = frozenset()
    """The same of decode engines."""
    async_scheduling: bool = False
    """True if engines schedule a step before the tokens of the last one are known."""
    is_paired: bool = False
    """True if each prefill engine hands its requests to the decode engine of the same number."""

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of all engines."""
        decode = self.num_decode * self.decode.num_gpus if self.decode else 0
        return self.num_prefill * self.prefill.num_gpus + decode

    @property
    def crosses_nodes(self) -> bool:
        """True if an engine has stages on several nodes."""
        return bool(self.prefill_crossings or self.decode_crossings)

    @property
    def placement(self) -> str:
        """Numbers and parallelism of the engines as text."""
        if self.decode is None:
            return str(self.prefill)
        pairs = (self.num_prefill, self.prefill), (self.num_decode, self.decode)
        return ", ".join(f"{count} x {cut}" if count > 1 else str(cut) for count, cut in pairs)


class Outcome(NamedTuple):
    """Simulated latencies of the requests, in seconds."""

    ttft: tuple[float, ...]
    tpot: tuple[float, ...]
    """Time per output token by request; 0 for a request with a single token."""
    parts: tuple[float, ...] = ()
    """Mean seconds in each of the five phases of PARTS; empty without separate decode engines."""
    transfers: tuple[float, ...] = ()
    """Duration of each KV transfer."""
    arrivals: tuple[float, ...] = ()
    """Arrival time by request."""
    finishes: tuple[float, ...] = ()
    """Time of the last token by request; infinite without one."""

    def attainment(self, ttft: float | None, tpot: float | None, scale: float = 1.0) -> float:
        """Return the share (0..1) of requests within latency limits multiplied by a scale."""
        met = [
            (ttft is None or first <= ttft * scale)
            and (tpot is None or tpot_seconds <= tpot * scale)
            for first, tpot_seconds in zip(self.ttft, self.tpot, strict=True)
        ]
        return sum(met) / len(met)

    def judged(self, slo: Slo) -> list[JudgedRequest]:
        """Return the requests for a test of attainment: those within both limits score 1."""
        ttft, tpot = slo.require("ttft", "tpot")
        rows = zip(self.arrivals, self.finishes, self.ttft, self.tpot, strict=True)
        return [
            JudgedRequest(arrival, finish, (float(first <= ttft and seconds <= tpot),))
            for arrival, finish, first, seconds in rows
        ]


PARTS = ("prefill queue", "prefill", "transfer", "decode queue", "decode")
"""Parts of a request's latency, as in the paper's Figure 10."""


def run_system(
    system: System,
    workload: str,
    rate: float,
    num_requests: int,
    seed: int = SEED,
    check: Callable[[], None] | None = None,
) -> Outcome:
    """Simulate prefill and decode engines at a request rate and return the requests' latencies.

    Args:
        system: Engines to simulate.
        workload: Name of the workload, which determines the prompt and output lengths.
        rate: Requests per second of all engines together.
        num_requests: Number of requests.
        seed: Seed of lengths and arrivals.
        check: Called now and then; an error that it raises ends the simulation.
    """
    jobs = make_workload(workload, num_requests, rate, seed=seed)
    if system.decode is None:
        return _run_colocated(system, jobs, check)
    costs = system.costs, system.model
    prefill = make_engine(
        *costs,
        system.prefill,
        system.prefill_policy,
        crossings=system.prefill_crossings,
        network=system.node_link,
        async_scheduling=system.async_scheduling,
    )
    admission = "distserve" if system.decode_policy == "distserve" else "auto"
    decode = make_engine(
        *costs,
        system.decode,
        system.decode_policy,
        admission,
        crossings=system.decode_crossings,
        network=system.node_link,
        async_scheduling=system.async_scheduling,
    )
    engines = {f"P{index}": prefill for index in range(system.num_prefill)}
    engines |= {f"D{index}": decode for index in range(system.num_decode)}
    roles = {name: "prefill" if name[0] == "P" else "decode" for name in engines}
    shape = MODELS[system.model]
    network = KvNetwork(LINKS[system.network], shape.layers * shape.kv_bytes)
    if system.is_paired:
        routes = {f"P{index}": {f"D{index}": 1.0} for index in range(system.num_prefill)}
        policy = make_pair_policy("flow", Random(seed), routes)
    else:
        policy = make_pair_policy("distserve", Random(seed))
    run = simulate_pairs(engines, roles, jobs, policy, network, check=check)
    lines = [run.cluster.requests[index].line for index in range(len(jobs))]
    return _outcome(lines, run.handoffs)


def _run_colocated(
    system: System, jobs: Sequence[WorkloadRequest], check: Callable[[], None] | None
) -> Outcome:
    policy = "vllm" if system.prefill_policy == "distserve" else system.prefill_policy
    engine = make_engine(system.costs, system.model, system.prefill, policy)
    if system.num_prefill == 1:
        record = simulate(engine, list(jobs), check=check)
        return _outcome([record.requests[seq].line for seq in range(len(jobs))], {})
    engines = {f"E{index}": engine for index in range(system.num_prefill)}
    router = PolicyRouter(make_policy("least-requests", Random(SEED)))
    run = simulate_cluster(engines, jobs, router, check=check)
    return _outcome([run.requests[index].line for index in range(len(jobs))], {})


def run_phase(
    system: System,
    phase: str,
    workload: str,
    rate: float,
    num_requests: int,
    seed: int = SEED,
    check: Callable[[], None] | None = None,
) -> Outcome:
    """Simulate one phase alone: prefill with one output token, or decode without prefill time.

    Args:
        system: `prefill` is the parallelism of the engine, for either phase.
        phase: prefill or decode.
        workload: Name of the workload, which determines the prompt and output lengths.
        rate: Requests per second.
        num_requests: Number of requests.
        seed: Seed of lengths and arrivals.
        check: Called now and then; an error that it raises ends the simulation.
    """
    jobs = make_workload(workload, num_requests, rate, seed=seed)
    if phase == "prefill":
        jobs = [job._replace(num_output_tokens=1) for job in jobs]
    engine = make_engine(
        system.costs,
        system.model,
        system.prefill,
        "distserve",
        "auto" if phase == "prefill" else "distserve",
        phase == "prefill",
    )
    record = simulate(engine, jobs, check=check)
    lines = [record.requests[seq].line for seq in range(len(jobs))]
    outcome = _outcome(lines, {})
    if phase == "prefill":
        return outcome
    # Requests arrive with their first token, so that the wait for free blocks delays the second.
    tpot = tuple(
        (line.e2el or 0.0) / (job.num_output_tokens - 1) if job.num_output_tokens > 1 else 0.0
        for line, job in zip(lines, jobs, strict=True)
    )
    return outcome._replace(ttft=(0.0,) * len(jobs), tpot=tpot)


def _outcome(lines: Sequence[RequestTimeline], handoffs: dict[int, HandoffRecord]) -> Outcome:
    ttft = tuple(line.ttft if line.ttft is not None else float("inf") for line in lines)
    tpot = tuple(line.tpot or 0.0 for line in lines)
    parts, transfers = [], []
    for index, handoff in handoffs.items():
        if handoff.fetch_time is None or handoff.arrival_time is None:
            continue
        line = lines[index]
        start = handoff.decode_time or handoff.arrival_time
        transfer = handoff.arrival_time - handoff.fetch_time
        transfers.append(transfer)
        parts.append(
            (
                handoff.prefill_start_time - line.arrival,
                handoff.ready_time - handoff.prefill_start_time,
                transfer,
                handoff.fetch_time - handoff.ready_time + start - handoff.arrival_time,
                line.times[-1] - start,
            )
        )
    means = tuple(fmean(column) for column in zip(*parts, strict=True))
    return Outcome(
        ttft,
        tpot,
        means,
        tuple(transfers),
        tuple(line.arrival for line in lines),
        tuple(line.times[-1] if line.times else inf for line in lines),
    )


NUM_STEPS = 32
"""Rates from 0 to the first upper end of a search, where a task states no number."""
MAX_FACTOR = 2**20
"""Limit of a search, per first upper end."""
FIRST_RATES = {"opt-13b": 2.0, "opt-66b": 0.5, "opt-175b": 0.2}
"""Requests per second per GPU at which searches begin, where a task states none."""
PHASE_TARGET = 0.95
"""Attainment of each phase alone, so that both together attain 0.9."""
MIN_SECONDS = 40.0
"""Shortest time in which requests arrive: queues of overloaded systems need it to grow."""
MAX_GROWTH = 8
"""Largest factor by which that raises the number of requests."""


class RunTask(NamedTuple):
    """Arguments of `run_task`: engines, workload, request rate, number of requests and seed.

    A record, so that it can be sent to a pool of processes.
    """

    system: System
    lengths: str
    rate: float
    """Requests per second of the whole system."""
    num_requests: int
    """Smallest number of requests; raised if they would arrive in less than MIN_SECONDS."""
    seed: int = 0


class GoodputTask(NamedTuple):
    """Arguments of `measure_goodput`: engines, workload, latency limits and range of the search."""

    system: System
    lengths: str
    slo: Slo
    """Limits of TTFT and TPOT, and the share of requests that has to be within them."""
    num_requests: int
    phase: str = ""
    """prefill or decode; empty for both."""
    seed: int = 0
    first_rate: float | None = None
    """Upper end of the first range of rates that the search tries, in requests per second."""
    num_steps: int = NUM_STEPS
    """Number of rates in that range: the precision of the search."""
    max_rate: float = inf
    """Upper bound of the goodput by formulas; higher rates are not simulated."""


def run_task(task: RunTask) -> Outcome:
    """Simulate the engines of a task and return the requests' latencies.

    Adds requests where those of the task would arrive in less than MIN_SECONDS.
    """
    num_requests = _count_requests(task.rate, task.num_requests)
    return run_system(task.system, task.lengths, task.rate, num_requests, task.seed)


def _count_requests(rate: float, num_requests: int) -> int:
    return max(num_requests, min(ceil(rate * MIN_SECONDS), MAX_GROWTH * num_requests))


MAX_JUDGED = 4000
"""Requests of the longest run that judges a plan, unless the problem asks for longer ones."""
MIN_JUDGED = 1000
"""Requests of the first one."""


class JudgedPlan(NamedTuple):
    """Verdict on a system at a request rate, and the latencies of the longest run."""

    attainment: Attainment
    outcome: Outcome


def judge_system(task: RunTask, slo: Slo, check: Callable[[], None] | None = None) -> JudgedPlan:
    """Judge by simulation if the engines of a task attain an SLO at its rate, and are stable.

    Args:
        task: Engines, workload, rate and seed; runs have at least the task's number of requests.
        slo: Limits of TTFT and TPOT, and the share of requests that has to be within them.
        check: Called now and then; an error that it raises ends the simulation.
    """
    outcome: Outcome | None = None

    def simulate(count: int) -> Sequence[JudgedRequest]:
        nonlocal outcome
        outcome = run_system(task.system, task.lengths, task.rate, count, task.seed, check)
        return outcome.judged(slo)

    first = max(MIN_JUDGED, task.num_requests)
    test = AttainmentTest((slo.attainment,), first, max(MAX_JUDGED, first))
    attainment = test.run(simulate)
    assert outcome is not None
    return JudgedPlan(attainment, outcome)


def measure_goodput(task: GoodputTask, check: Callable[[], None] | None = None) -> float:
    """Search by simulation for the highest request rate at which enough requests meet the SLO.

    The share of requests within the limits is assumed to fall with the rate. Source: simu_prefill
    and simu_decode of DistServe's artifact (arXiv 2401.09670, section 4.1), but a request has to
    meet both limits.

    Args:
        task: Engines, workload, latency limits, and range and precision of the search.
        check: Called now and then; an error that it raises ends the search.

    Returns:
        Requests per second.

    Raises:
        ValueError: The required share is reached at every rate that was tried.
    """
    system, lengths, seed = task.system, task.lengths, task.seed
    step = (task.first_rate or FIRST_RATES[system.model] * system.num_gpus) / task.num_steps

    def attains(index: int, *_: int) -> bool:
        rate = index * step
        if not 0 < rate <= task.max_rate:
            return rate == 0
        num_requests = _count_requests(rate, task.num_requests)
        if task.phase:
            outcome = run_phase(system, task.phase, lengths, rate, num_requests, seed, check)
        else:
            outcome = run_system(system, lengths, rate, num_requests, seed, check)
        return outcome.attainment(*task.slo[:2]) >= task.slo.attainment

    most = MAX_FACTOR * task.num_steps
    index = find_last(attains, task.num_steps, task.num_steps, 0, most)
    if index is None or index == most:
        raise ValueError(
            f"every rate up to {most * step:g} attains {task.slo.attainment}: set tighter limits"
        )
    return index * step
