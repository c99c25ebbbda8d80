"""The simulator against the rig: the same requests over the same links, TTFT and TPOT compared."""

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

from benchmarks.net.engine import RigEngine
from benchmarks.net.rig import NamespaceRig
from benchmarks.weak_links.engines import engine_flags, running_engine, set_links
from benchmarks.weak_links.limits import WeakLink
from benchmarks.weak_links.load import PromptMaker, StreamedRequest, send_schedule
from benchmarks.weak_links.traffic import BASE_LINK, FIFO, OURS, SETUPS, SLOW_START, Progress
from benchmarks.weak_model import TOKEN_BYTES
from gllm.observability.step_log import StepLogEvent, read_step_log
from gllm.pacing.send_rate import PACING_SHARE
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import StageWork
from gllm.sim.compare import read_requests
from gllm.sim.costs.base import CostModel, DelegatingCostModel, TransferCost
from gllm.sim.costs.fitted import FittedCostModel
from gllm.sim.costs.profile import build_profile
from gllm.sim.depth_control import AUTO_DEPTH, start_depth
from gllm.sim.event_loop import EventLoop
from gllm.sim.metrics.run_record import RunRecord, build_run_record
from gllm.sim.pipeline import SimulatedPipeline, make_pipeline_links

MAX_ERROR = 0.15
"""Largest relative error of mean TTFT and TPOT."""
CONGESTION = "cubic"
PACED_SHARES = MappingProxyType({FIFO: 1.0, OURS: PACING_SHARE})
"""Share of a link's rate that prefills get: paced connections leave the queues empty."""
RATE, PROMPT_TOKENS, OUTPUT_TOKENS = 1.2, (64, 300), (16, 48)
"""Requests per second, and the ranges of their lengths."""
NUM_WARM_UP = 6
"""First requests after a change of the links, which the simulator serves too, but do not count:
connections and the depth of the pipeline adapt meanwhile."""
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
    num_calibration_requests: int


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


def make_burst(num_requests: int) -> list[tuple[float, StreamedRequest]]:
    """Return requests that arrive together, one of which is longer than all of `make_requests`.

    Their micro-batches are larger than those of any case: cost models do not extrapolate.
    """
    burst = [(0.0, request) for _, request in make_requests(num_requests, RATE, 0)]
    longest = PromptMaker(1).make(PROMPT_TOKENS[1] + 2 * OUTPUT_TOKENS[1])
    return [*burst, (0.0, StreamedRequest(longest, OUTPUT_TOKENS[1]))]


def serve(
    rig: NamespaceRig, engine: RigEngine, requests: Sequence[tuple[float, StreamedRequest]]
) -> tuple[float, float]:
    """Serve requests; return the times of the beginning and the end."""
    begin = time.monotonic()
    with rig.inside(0):
        asyncio.run(send_schedule(engine.url, requests))
    end = time.monotonic()
    time.sleep(LOG_SECONDS)
    return begin, end


def measure_cases(
    setup: str, cases: Sequence[RigCase], model: Path, plan: ComparisonPlan, progress: Progress
) -> list[dict[str, Any]]:
    """Serve the cases of one engine, simulate them, and return a row per case."""
    flags = engine_flags(setup, CONGESTION, plan.num_stages)
    with running_engine(model, plan.num_stages, flags) as (rig, engine):
        for machine in range(plan.num_stages):
            # The simulated connections are always warm.
            rig.set_tcp_option(machine, SLOW_START, 0)
        calibration = serve(rig, engine, make_burst(plan.num_calibration_requests))
        progress(f"simulator: steps of {setup} timed over fast links")
        spans = []
        for seed, case in enumerate(cases, 1):
            set_links(rig, case.link)
            spans.append(serve(rig, engine, make_requests(plan.num_requests, RATE, seed)))
            progress(f"simulator: served over {case.link} by {setup}")
        events = list(read_step_log(engine.step_log))
    run = build_run_record(events)
    cost = FittedCostModel(build_profile([cut_run(run, calibration)], {}))
    rows = []
    for case, span in zip(cases, spans, strict=True):
        rows.append(compare_case(case, run, requests_within(events, run, span), cost))
        progress(f"simulator: {describe_row(rows[-1])}")
    return rows


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
    policy = SETUPS[case.setup][1]
    pipeline = SimulatedPipeline(
        config,
        LinkedCostModel(cost, case.link, PACED_SHARES[case.setup]),
        log=events.append,
        loop=loop,
        links=make_pipeline_links(loop, config.stages, policy),
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
    return f"{row['setup']}, {link}: TTFT {row['ttft_error']:+.1%}, TPOT {row['tpot_error']:+.1%}"


def measure_comparison(
    model: Path, plan: ComparisonPlan, progress: Progress
) -> list[dict[str, Any]]:
    """Return a row per case; the cases of one setup share an engine."""
    return [
        row
        for setup in (FIFO, OURS)
        for row in measure_cases(
            setup, [case for case in CASES if case.setup == setup], model, plan, progress
        )
    ]
