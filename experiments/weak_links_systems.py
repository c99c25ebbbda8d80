"""Serving systems over weak links, simulated: those of MoLink's tables, and gllm.

Owns the assumptions about each system and the simulation of one setting.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from random import Random
from statistics import fmean
from types import MappingProxyType
from typing import NamedTuple

from experiments.link_policies import BASELINE_LINK_POLICIES
from experiments.request_pipelines import RequestPipelines
from experiments.virtual_engines import VirtualEngines
from experiments.weak_links_paper import WeakLinkSetting
from gllm.observability.latency import RequestTimeline
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.plan import StepOutput, StepPlan
from gllm.scheduler.sequence import SchedulerRequest
from gllm.scheduler.stage_work import StageWork
from gllm.sim.costs.base import CostModel, DelegatingCostModel, TransferCost
from gllm.sim.costs.roofline import RooflineCostModel
from gllm.sim.deployment import USABLE_MEMORY_SHARE
from gllm.sim.depth_control import AUTO_DEPTH, start_depth
from gllm.sim.event_loop import EventLoop
from gllm.sim.hardware.devices import NetworkLink
from gllm.sim.hardware.stages import PipelineSpec, build_hardware
from gllm.sim.observer import PipelineObserver
from gllm.sim.pipeline import SimulatedPipeline, make_pipeline_links
from gllm.sim.workloads.requests import (
    WorkloadRequest,
    iterate_scheduler_requests,
    sample_arrival_times,
)
from gllm.sim.workloads.traces import TRACES, load_trace

WARM_UP_SECONDS = 60.0
"""Arrivals before this time are served but not counted, as in the first paper."""
RUN_SECONDS = WARM_UP_SECONDS + 1800.0
"""Duration of the arrivals of the first paper: a minute of warm-up and half an hour."""
MAX_MODEL_LEN = 3072
"""Holds every request of the settings, in tokens."""
AWQ_BYTES_PER_WEIGHT = 0.53
"""Bytes of a weight of 4 bits with its share of scales and zero points, groups of 128."""


class EngineKind(Enum):
    """Micro-batches of a system."""

    VIRTUAL = auto()
    """Virtual engines: micro-batches of the same requests, each once in flight."""
    PER_REQUEST = auto()
    """Requests that travel by themselves; each stage computes those that have arrived."""
    TWO_LANES = auto()
    """gllm: one engine with two lanes, whose depth follows stages and links."""


@dataclass(frozen=True)
class ServingSystem:
    """A system on a pipeline with weak links."""

    link_policy: str
    """A name of LINK_POLICIES, or an entry `module:Class`."""
    batches_per_stage: float
    """Virtual engines, and so micro-batches in flight, over the number of stages; 0 without virtual
    engines."""
    delays_per_hop: int
    """One-way delays until a message has arrived: 1 over a stream that is kept warm, more where
    each message is a call of its own whose flow-control windows open anew."""
    tensors_per_hop: int
    """Tensors of the hidden size per token: 2 where hidden states and residual travel apart."""
    engine: EngineKind = EngineKind.VIRTUAL

    def num_batches(self, num_stages: int) -> int:
        """Return the number of virtual engines."""
        return round(self.batches_per_stage * num_stages)


SHARED = "virtual engines, links shared"
"""Virtual engines with fair sharing of the links, as of MoLink's own sender without chunks, which
starts a task per message; also a reading of vllm, see weak_links_readings."""
SYSTEMS: Mapping[str, ServingSystem] = MappingProxyType(
    {
        "vllm": ServingSystem("serial", 1, 3, 2),
        "helix": ServingSystem("serial", 0, 3, 2, EngineKind.PER_REQUEST),
        SHARED: ServingSystem(BASELINE_LINK_POLICIES["concurrent"], 1, 3, 2),
        # The first paper: 5 micro-batches on 3 stages.
        "molink": ServingSystem(BASELINE_LINK_POLICIES["molink-paper"], 5 / 3, 3, 2),
        "chunks only": ServingSystem(BASELINE_LINK_POLICIES["molink-paper"], 1, 3, 2),
        "micro-batches only": ServingSystem(BASELINE_LINK_POLICIES["concurrent"], 5 / 3, 3, 2),
        # The platform paper: a fixed chunk, at most 2 micro-batches per stage.
        "molink platform": ServingSystem(BASELINE_LINK_POLICIES["fixed-chunk"], 2, 3, 2),
        "gllm": ServingSystem("molink", 0, 1, 1, EngineKind.TWO_LANES),
    }
)
"""Assumptions per system; experiments/pages/weak-links.md states which of them are fitted."""


SimulatedEngine = VirtualEngines | RequestPipelines | SimulatedPipeline


class TrialFigures(NamedTuple):
    """Means over the requests of a simulation, or over several simulations."""

    ttft: float
    """Seconds."""
    tpot: float
    """Seconds."""
    e2el: float
    """Seconds."""
    tokens_per_second: float
    """Output tokens per second, from the first arrival to the last token."""


@dataclass(frozen=True)
class WeakLinkTrial:
    """One simulation."""

    setting: WeakLinkSetting
    system: str
    """A name of SYSTEMS."""
    max_requests: int
    """Number of requests at most; arrivals end after RUN_SECONDS."""
    seed: int = 0


class WeakLinkCostModel(DelegatingCostModel):
    """Costs of a model whose messages between stages take several tensors and delays.

    Args:
        cost: Costs with one tensor and one delay per message.
        system: The system that sends.
    """

    def __init__(self, cost: CostModel, system: ServingSystem) -> None:
        super().__init__(cost)
        self._system = system

    def activation_transfer(self, stage: int, work: StageWork) -> TransferCost:
        """Return the cost of all tensors as one message."""
        occupancy, propagation, num_bytes = self._cost.activation_transfer(stage, work)
        tensors = self._system.tensors_per_hop
        delay = propagation * self._system.delays_per_hop
        return TransferCost(occupancy * tensors, delay, num_bytes * tensors)

    def return_transfer(self, work: StageWork) -> TransferCost:
        """Return the cost of a result that takes several delays."""
        transfer = self._cost.return_transfer(work)
        delay = transfer.propagation_seconds * self._system.delays_per_hop
        return transfer._replace(propagation_seconds=delay)


class LatencyRecorder(PipelineObserver):
    """Observer that keeps the times of each request's tokens."""

    def __init__(self) -> None:
        self.lines: dict[int, RequestTimeline] = {}
        """By sequence."""

    def on_added(self, request: SchedulerRequest, now: float) -> None:
        """Begin the timeline of a request."""
        self.lines[request.seq] = RequestTimeline(now)

    def on_committed(self, plan: StepPlan, output: StepOutput, now: float) -> None:
        """Record the tokens of a step."""
        for seq in output.seqs:
            self.on_token(seq, now)

    def on_token(self, seq: int, now: float) -> None:
        """Record a token."""
        self.lines[seq].record_output(now, 1)


def build_weak_pipeline(setting: WeakLinkSetting) -> PipelineSpec:
    """Return the stages of a setting and its links; the driver is beside the first stage."""
    hardware = build_hardware(setting.model, setting.device, setting.num_stages)
    if setting.is_quantized:
        model = replace(hardware.model, bytes_per_weight=AWQ_BYTES_PER_WEIGHT)
        hardware = replace(hardware, model=model)
    link = NetworkLink(setting.megabits * 1e6 / 8, setting.delay_ms / 1e3)
    num_links = setting.num_stages - 1
    return replace(
        hardware,
        links=(link,) * num_links,
        plan_links=(None,) + (link,) * num_links,
        return_link=link if num_links else None,
    )


def make_jobs(setting: WeakLinkSetting, max_requests: int, seed: int) -> list[WorkloadRequest]:
    """Return requests with Poisson arrivals and the lengths of azure-conv within the limits."""
    lengths = [
        (prompt, output)
        for prompt, output in load_trace(TRACES["azure-conv"]).lengths
        if prompt <= setting.max_prompt_tokens and output <= setting.max_output_tokens
    ]
    count = min(max_requests, round(setting.rate * RUN_SECONDS))
    rng = Random(seed)
    times = sample_arrival_times("poisson", count, setting.rate, seed)
    # A short list of lengths is used several times over.
    return [WorkloadRequest(time, *rng.choice(lengths)) for time in times]


def simulate_weak_link(trial: WeakLinkTrial) -> TrialFigures:
    """Simulate a trial and return the means over its requests after the warm-up."""
    setting, system = trial.setting, SYSTEMS[trial.system]
    hardware = build_weak_pipeline(setting)
    cost = WeakLinkCostModel(RooflineCostModel(hardware), system)
    blocks = min(hardware.stage_kv_blocks(SchedulerConfig.block_size, USABLE_MEMORY_SHARE))
    recorder = LatencyRecorder()
    build = _BUILDERS[system.engine]
    engine = build(system, cost, recorder, setting.num_stages, blocks)
    jobs = make_jobs(setting, trial.max_requests, trial.seed)
    engine.submit_each(iterate_scheduler_requests(jobs))
    engine.loop.run()
    return _mean_figures(list(recorder.lines.values()))


def _build_engine(
    system: ServingSystem,
    cost: CostModel,
    recorder: LatencyRecorder,
    num_stages: int,
    num_blocks: int,
) -> SimulatedPipeline:
    """Return gllm's engine, as it runs between machines."""
    config = SchedulerConfig(lanes="2", prefix_cache=False)
    resolved = config.resolve(num_stages, num_blocks, MAX_MODEL_LEN, has_tcp_edges=True)
    loop = EventLoop()
    links = make_pipeline_links(loop, num_stages, system.link_policy)
    pipeline = SimulatedPipeline(resolved, cost, [recorder], loop=loop, links=links)
    start_depth(pipeline, AUTO_DEPTH)
    return pipeline


def _build_virtual_engines(
    system: ServingSystem,
    cost: CostModel,
    recorder: LatencyRecorder,
    num_stages: int,
    num_blocks: int,
) -> VirtualEngines:
    """Return virtual engines that divide the KV cache."""
    num_engines = system.num_batches(num_stages)
    config = SchedulerConfig(
        policy="vllm", max_in_flight=1, prefix_cache=False, async_scheduling=False
    ).resolve(num_stages, num_blocks // num_engines, MAX_MODEL_LEN)
    return VirtualEngines(num_engines, config, cost, [recorder], system.link_policy)


def _build_request_pipelines(
    system: ServingSystem,
    cost: CostModel,
    recorder: LatencyRecorder,
    num_stages: int,
    num_blocks: int,
) -> RequestPipelines:
    """Return stages that batch what has arrived."""
    return RequestPipelines(
        num_stages,
        num_blocks * SchedulerConfig.block_size,
        cost,
        recorder.on_added,
        recorder.on_token,
        system.link_policy,
    )


_BUILDERS: Mapping[EngineKind, Callable[..., SimulatedEngine]] = MappingProxyType(
    {
        EngineKind.VIRTUAL: _build_virtual_engines,
        EngineKind.PER_REQUEST: _build_request_pipelines,
        EngineKind.TWO_LANES: _build_engine,
    }
)


def _mean_figures(lines: list[RequestTimeline]) -> TrialFigures:
    begin, last_arrival = lines[0].arrival, lines[-1].arrival
    end = max(line.times[-1] for line in lines)
    rate = sum(line.num_tokens for line in lines) / (end - begin)
    if last_arrival > 2 * WARM_UP_SECONDS:
        lines = [line for line in lines if line.arrival >= WARM_UP_SECONDS]
    return TrialFigures(
        fmean(line.ttft for line in lines if line.ttft is not None),
        fmean(line.tpot for line in lines if line.tpot is not None),
        fmean(line.e2el for line in lines if line.e2el is not None),
        rate,
    )


def average_figures(figures: list[TrialFigures]) -> TrialFigures:
    """Return the means over several simulations."""
    return TrialFigures(*(fmean(values) for values in zip(*figures, strict=True)))
