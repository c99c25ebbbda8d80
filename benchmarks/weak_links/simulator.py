"""The simulator against the rig: the same requests over the same links, TTFT and TPOT compared.

Each configuration has an engine of its own that is started on its links, as a user starts one:
congestion windows and estimates that a connection brings from other links would count as errors of
the simulator otherwise. The times of stages and processes are measured on an engine over fast
links, where a hop has no delay.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import fmean
from types import MappingProxyType
from typing import Any, NamedTuple

import msgspec

from benchmarks.cpu.page import ForeignCpu
from benchmarks.net.engine import RigEngine
from benchmarks.net.rig import NamespaceRig
from benchmarks.weak_links.congestion_window import MIN_TIMEOUT_SECONDS, CongestionWindow
from benchmarks.weak_links.engines import engine_flags, running_engine
from benchmarks.weak_links.limits import WeakLink
from benchmarks.weak_links.load import PromptMaker, StreamedRequest, send_schedule
from benchmarks.weak_links.traffic import BASE_LINK, FIFO, OURS, SETUPS, Progress
from benchmarks.weak_model import TOKEN_BYTES
from gllm.observability.step_log import StepLogEvent, read_step_log
from gllm.pacing.link_estimator import PACING_SHARE
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import StageWork
from gllm.sim.compare import read_requests
from gllm.sim.costs.base import CostModel, DelegatingCostModel, TransferCost
from gllm.sim.costs.fitted import FittedCostModel
from gllm.sim.costs.profile import build_profile
from gllm.sim.depth_control import AUTO_DEPTH, start_depth
from gllm.sim.event_loop import EventLoop
from gllm.sim.link import make_link
from gllm.sim.metrics.run_record import RunRecord, build_run_record
from gllm.sim.pipeline import PipelineLinks, SimulatedPipeline, make_pipeline_links
from gllm.transport.link.link_monitor import WARM_SECONDS

MAX_ERROR = 0.15
"""Largest relative error of mean TTFT and TPOT."""
CONGESTION = "cubic"
PACED_SHARES = MappingProxyType({FIFO: 1.0, OURS: PACING_SHARE})
"""Share of a link's rate that prefills get: paced connections leave the queues empty."""
RATE, PROMPT_TOKENS, OUTPUT_TOKENS = 1.2, (64, 300), (16, 48)
"""Requests per second, and the ranges of their lengths."""
NUM_WARM_UP = 6
"""First requests of an engine, which the simulator serves too, but which do not count: connections
and the depth of the pipeline adapt meanwhile."""
NUM_LONE = 16
"""Requests that the engine over fast links serves one after the other."""
SHORT_PROMPT_TOKENS = 8
"""Prompts of requests that decode together."""
SETTLED_CORES, SETTLE_SECONDS = 0.2, 60.0
"""Cores that an engine without requests may keep busy, and the limit of the wait for that: standby
workers are loaded after it is ready."""
LOG_SECONDS = 1.5
"""Time until the driver has logged the last steps."""


class RigCase(NamedTuple):
    """One configuration of the comparison."""

    setup: str
    link: WeakLink


CASES = (
    RigCase(FIFO, BASE_LINK),
    RigCase(OURS, BASE_LINK),
    RigCase(OURS, WeakLink(60, 30)),
    RigCase(OURS, WeakLink(200, 30)),
    RigCase(OURS, WeakLink(100, 10)),
    RigCase(OURS, WeakLink(100, 50)),
)


class ComparisonPlan(NamedTuple):
    """Lengths of the measurements."""

    num_stages: int
    num_requests: int
    """Per case, NUM_WARM_UP included."""
    num_together: int
    """Requests that decode together on the engine over fast links, more than in any case."""


class LinkedCostModel(DelegatingCostModel):
    """Stages of another cost model on machines that are joined by links of one kind.

    The other model was measured over fast links: its times between stages are those of the
    processes, which come on top.
    """

    def __init__(self, cost: CostModel, link: WeakLink, share: float) -> None:
        """Use links of which prefills get a share (0..1) of the rate."""
        super().__init__(cost)
        self._link, self._share = link, share

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the time of all bytes on the link, and the delay of link and processes."""
        num_bytes = work.num_tokens * TOKEN_BYTES
        share = self._share if work.prefill_chunks else 1.0
        seconds = self._link.sending_seconds(num_bytes) / share
        process_seconds = super().activation_transfer(stage, work).propagation_seconds
        return TransferCost(seconds, self._link.delay_seconds + process_seconds, num_bytes)

    def plan_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the delay; the first stage is beside the driver."""
        return TransferCost(0.0, self._link.delay_seconds if stage else 0.0)

    def return_transfer(self, work: StageWork) -> TransferCost:
        """Return the delay: results are small."""
        return TransferCost(0.0, self._link.delay_seconds)


def make_requests(num_requests: int, rate: float, seed: int) -> list[tuple[float, StreamedRequest]]:
    """Return requests of random lengths with Poisson arrivals, in seconds."""
    random, maker = Random(seed), PromptMaker(seed)
    requests, seconds = [], 0.0
    for _ in range(num_requests):
        prompt = maker.make(random.randint(*PROMPT_TOKENS))
        requests.append((seconds, StreamedRequest(prompt, random.randint(*OUTPUT_TOKENS))))
        seconds += random.expovariate(rate)
    return requests


def make_calibration(num_together: int) -> list[list[StreamedRequest]]:
    """Return groups of requests that an engine serves one group after the other.

    Most are alone, so that stages do not compute at once and wait for a core: the cases leave the
    cores idle. Groups have larger micro-batches than any case, because cost models do not
    extrapolate.
    """
    maker = PromptMaker(1)
    lone = [[request] for _, request in make_requests(NUM_LONE, RATE, 0)]
    longest = StreamedRequest(maker.make(PROMPT_TOKENS[1] + 2 * OUTPUT_TOKENS[1]), OUTPUT_TOKENS[1])
    together = [
        StreamedRequest(maker.make(SHORT_PROMPT_TOKENS), OUTPUT_TOKENS[1])
        for _ in range(num_together)
    ]
    prompts = [StreamedRequest(maker.make(PROMPT_TOKENS[1]), 1) for _ in range(num_together // 4)]
    return [*lone, [longest], together[: num_together // 4], together, prompts]


def serve(
    rig: NamespaceRig, engine: RigEngine, groups: Sequence[Sequence[tuple[float, StreamedRequest]]]
) -> tuple[float, float]:
    """Serve groups of requests, one after the other; return the times of the beginning and end."""
    begin = time.monotonic()
    with rig.inside(0):
        for group in groups:
            asyncio.run(send_schedule(engine.url, group))
    end = time.monotonic()
    time.sleep(LOG_SECONDS)
    return begin, end


def wait_until_settled() -> None:
    """Wait until an engine that is ready does nothing more, at most SETTLE_SECONDS."""
    deadline = time.monotonic() + SETTLE_SECONDS
    while time.monotonic() < deadline:
        cpu = ForeignCpu()
        time.sleep(1.0)
        if cpu.own_cores() < SETTLED_CORES:
            break


def measure_processes(setup: str, model: Path, plan: ComparisonPlan) -> FittedCostModel:
    """Return the times of stages and processes of an engine whose links are fast."""
    flags = engine_flags(setup, CONGESTION, plan.num_stages)
    groups = make_calibration(plan.num_together)
    with running_engine(model, plan.num_stages, flags) as (rig, engine):
        wait_until_settled()
        span = serve(rig, engine, [[(0.0, request) for request in group] for group in groups])
        run = build_run_record(list(read_step_log(engine.step_log)))
    return FittedCostModel(build_profile([cut_run(run, span)], {}))


def measure_case(
    case: RigCase, cost: CostModel, seed: int, model: Path, plan: ComparisonPlan
) -> dict[str, Any]:
    """Serve a case on an engine of its own, simulate it, and return its row."""
    flags = engine_flags(case.setup, CONGESTION, plan.num_stages)
    with running_engine(model, plan.num_stages, flags, case.link) as (rig, engine):
        wait_until_settled()
        cpu = ForeignCpu()
        span = serve(rig, engine, [make_requests(plan.num_requests, RATE, seed)])
        cores = {"rig_cores": cpu.own_cores(), "other_cores": cpu.cores()}
        events = list(read_step_log(engine.step_log))
    run = build_run_record(events)
    row = compare_case(case, run, requests_within(events, run, span), cost)
    return row | cores


def describe_processes(cost: FittedCostModel) -> str:
    """Return a line about the measured times of a decode's step."""
    work = StageWork(0, 1, (), 1, 1, 1)
    times = {
        "a stage": cost.stage_seconds(0, work),
        "a hop": cost.activation_transfer(0, work).propagation_seconds,
        "a plan": cost.plan_seconds(work),
        "a result": cost.return_seconds(work),
    }
    return ", ".join(f"{name} {1e3 * seconds:.2f} ms" for name, seconds in times.items())


def cut_run(run: RunRecord, span: tuple[float, float]) -> RunRecord:
    """Return the micro-batches of a run that were planned within some time."""
    begin, end = span
    batches = [batch for batch in run.micro_batches if begin <= batch.planned_time <= end]
    return replace(run, micro_batches=batches)


def requests_within(
    events: list[StepLogEvent], run: RunRecord, span: tuple[float, float]
) -> list[tuple[float, SchedulerRequest]]:
    """Return the requests of a run that arrived within some time, with their output lengths."""
    begin, end = span
    return [each for each in read_requests(events, run) if begin <= each[0] <= end]


def make_windowed_links(loop: EventLoop, case: RigCase, num_stages: int) -> PipelineLinks:
    """Return links whose activations have TCP's window; plans and results always fit into it.

    With two lanes connections are kept warm; otherwise windows halve per timeout of silence.
    """
    policy, link = SETUPS[case.setup][1], case.link
    round_trip = 2 * link.delay_seconds
    arguments = link.bytes_per_second, round_trip, round_trip + MIN_TIMEOUT_SECONDS
    warm_seconds = WARM_SECONDS if case.setup == OURS else 0.0
    activations = [
        make_link(loop, policy, CongestionWindow(*arguments, warm_seconds))
        for _ in range(num_stages - 1)
    ]
    return make_pipeline_links(loop, num_stages, policy)._replace(activations=activations)


def simulate_case(
    case: RigCase,
    run: RunRecord,
    requests: list[tuple[float, SchedulerRequest]],
    cost: CostModel,
) -> RunRecord:
    """Serve requests with the engine's configuration over simulated links."""
    start = msgspec.structs.replace(run.start, time=requests[0][0], warm_ups=0)
    events: list[StepLogEvent] = [start]
    loop, config = EventLoop(), run.start.scheduler
    pipeline = SimulatedPipeline(
        config,
        LinkedCostModel(cost, case.link, PACED_SHARES[case.setup]),
        log=events.append,
        loop=loop,
        links=make_windowed_links(loop, case, config.stages),
    )
    if case.setup == OURS:
        start_depth(pipeline, AUTO_DEPTH)
    pipeline.submit_each(requests)
    loop.run()
    return build_run_record(events)


def compare_case(
    case: RigCase,
    run: RunRecord,
    requests: list[tuple[float, SchedulerRequest]],
    cost: CostModel,
) -> dict[str, Any]:
    """Return mean TTFT and TPOT of rig and simulator in milliseconds, and the errors."""
    simulated = simulate_case(case, run, requests, cost)
    counted = [request.seq for _, request in requests[NUM_WARM_UP:]]
    row: dict[str, Any] = {"setup": case.setup, **case.link._asdict(), "requests": len(counted)}
    for metric in ("ttft", "tpot"):
        rig, model = (
            1e3 * fmean(getattr(each.requests[seq].line, metric) for seq in counted)
            for each in (run, simulated)
        )
        row |= {f"{metric}_rig_ms": rig, f"{metric}_simulated_ms": model}
        row[f"{metric}_error"] = model / rig - 1
    return row


def describe_row(row: dict[str, Any]) -> str:
    """Return a line about a case."""
    link = WeakLink(row["megabits"], row["delay_ms"])
    return (
        f"{row['setup']}, {link}: TTFT {row['ttft_error']:+.1%}, TPOT {row['tpot_error']:+.1%}, "
        f"{row['rig_cores']:.2f} cores, others {row['other_cores']:.2f}"
    )


def measure_comparison(
    model: Path, plan: ComparisonPlan, progress: Progress
) -> list[dict[str, Any]]:
    """Return a row per case."""
    costs = {}
    for setup in (FIFO, OURS):
        costs[setup] = measure_processes(setup, model, plan)
        progress(f"simulator: {setup} over fast links: {describe_processes(costs[setup])}")
    rows = []
    for seed, case in enumerate(CASES, 1):
        rows.append(measure_case(case, costs[case.setup], seed, model, plan))
        progress(f"simulator: {describe_row(rows[-1])}")
    return rows
