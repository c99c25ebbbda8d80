"""Simulated deployment: a model cut into stages, a cost model and a scheduler configuration."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

from gllm.config.emulation import DEFAULT_HOST
from gllm.config.engine import NO_EXPERTS
from gllm.observability.step_log import StartEvent, StepLogEvent
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.eviction import EvictionOrder
from gllm.scheduler.kv_memory import divide_kv_memory
from gllm.scheduler.output_lengths import OutputLengths
from gllm.scheduler.sequence import SchedulerRequest
from gllm.sim.client import SimulatedClient
from gllm.sim.costs.base import CostModel
from gllm.sim.costs.roofline import DeviceEfficiency, RooflineCostModel
from gllm.sim.depth_control import replay_depth, start_depth
from gllm.sim.event_loop import EventLoop
from gllm.sim.hardware.devices import parse_host
from gllm.sim.hardware.shapes import ModelShape
from gllm.sim.hardware.stages import PipelineSpec, build_hardware, offload_experts
from gllm.sim.hindsight import HindsightEviction
from gllm.sim.metrics.run_record import (
    DepthChange,
    RunRecord,
    StageReport,
    build_run_record,
)
from gllm.sim.metrics.run_recorder import RunRecorder
from gllm.sim.metrics.session_turns import TurnResult
from gllm.sim.observer import PipelineObserver
from gllm.sim.pipeline import SimulatedPipeline
from gllm.sim.sessions import TurnSender, has_pauses
from gllm.sim.workloads.requests import (
    PromptTokens,
    WorkloadRequest,
    iterate_scheduler_requests,
)

if TYPE_CHECKING:
    from gllm.sim.metrics.delays import DelayLimitStop

USABLE_MEMORY_SHARE = 0.9
"""Share of a device's memory for weights and KV cache; activations and system get the rest."""


class ModelFitError(ValueError):
    """Raised if a model's weights or KV cache do not fit into the memory of the devices.

    Args:
        message: Error message with the sizes and a remedy.
        constraint: Part that does not fit: weights, or KV cache.
    """

    def __init__(self, message: str, constraint: str) -> None:
        super().__init__(message)
        self.constraint = constraint


@dataclass(frozen=True)
class Deployment:
    """Configuration of one simulated engine: model, stages, cost model and scheduler settings."""

    model: str
    layers: list[int]
    """Number of layers of each stage."""
    cost: CostModel
    scheduler: SchedulerConfig
    output_lengths: OutputLengths | None = None
    """Output lengths of earlier requests, from which the scheduler predicts at the start."""
    degrees: list[int] = field(default_factory=list)
    """Number of tensor-parallel ranks of each stage; empty: one each."""
    hardware: PipelineSpec | None = None
    """Model shape, devices and links; None if only measured times are known."""
    depth: int | str | None = None
    """Number of micro-batches in flight, or AUTO_DEPTH to adapt it during the run; None for the
    scheduler's default."""

    @property
    def peak_flops(self) -> float | None:
        """Peak FLOP/s of all devices together; None if they are unknown."""
        return self.hardware.peak_flops if self.hardware else None

    def start_event(self, time: float, engine: str = "") -> StartEvent:
        """Return the start event of a step log with this model and configuration.

        Args:
            time: Time of the start in seconds.
            engine: Name of the engine.
        """
        return StartEvent(
            time,
            self.model,
            self.layers,
            self.scheduler,
            source="simulator",
            degrees=self.degrees,
            engine=engine,
        )


def simulate(
    deployment: Deployment,
    jobs: list[WorkloadRequest],
    log: Callable[[StepLogEvent], None] | None = None,
    stop: "DelayLimitStop | None" = None,
    check: Callable[[], None] | None = None,
) -> RunRecord:
    """Simulate a workload on one engine and return the record of its requests and micro-batches.

    Requests have the times of the client. Where the cost model has measured them, these include the
    way of requests and tokens through the frontend; the log has the times of the driver.

    Args:
        deployment: Model, cost model and scheduler configuration of the engine.
        jobs: Requests sorted by arrival time.
        log: Receives the events of the step log; None: no log.
        stop: Condition that stops the simulation early, with unfinished requests; None: none.
        check: Called now and then; an error that it raises ends the simulation.

    Raises:
        ValueError: A request is longer than the model's context.
    """
    if has_pauses(jobs):
        if stop is not None:
            raise ValueError(
                "the workload's requests wait for each other, so that it has no rate to search "
                "for: leave --capacity out or choose another workload"
            )
        return simulate_sessions(deployment, jobs, log, check).record
    recorder, pipeline = _create_pipeline(deployment, jobs, log, check)
    requests = iterate_scheduler_requests(jobs)
    if deployment.cost.request_transfer(is_busy=True).is_free:
        pipeline.submit_each(requests)
    else:
        SimulatedClient(pipeline).send_each(requests)
    if stop is None:
        pipeline.loop.run()
        return recorder.record
    time = recorder.record.start.time
    while True:
        time += stop.interval_seconds
        pipeline.loop.run(time)
        if pipeline.loop.is_empty or stop.is_met(recorder.record.requests, time):
            return recorder.record


class SessionRun(NamedTuple):
    """Result of a simulation of conversations."""

    record: RunRecord
    turns: list[TurnResult]
    """Served requests of conversations."""


def simulate_sessions(
    deployment: Deployment,
    jobs: list[WorkloadRequest],
    log: Callable[[StepLogEvent], None] | None = None,
    check: Callable[[], None] | None = None,
    has_hindsight: bool = False,
) -> SessionRun:
    """Simulate a workload of conversations on one engine, whose turns may wait for each other.

    Args:
        deployment: Model, cost model and scheduler configuration of the engine.
        jobs: Requests; those without a pause are sorted by arrival time.
        log: Receives the events of the step log; None: no log.
        check: Called now and then; an error that it raises ends the simulation.
        has_hindsight: True to evict cached KV blocks by their next use (`HindsightEviction`);
            False to evict them in the configured order.

    Raises:
        ValueError: A request is longer than the model's context.
    """
    prompts = PromptTokens()
    eviction = None
    if has_hindsight:
        eviction = HindsightEviction(jobs, prompts, deployment.scheduler.block_size)
    sender = TurnSender(jobs, prompts)
    recorder, pipeline = _create_pipeline(deployment, jobs, log, check, [sender], eviction)
    if deployment.cost.request_transfer(is_busy=True).is_free:
        sender.start(pipeline.loop, lambda now, request: pipeline.submit(request, now))
    else:
        sender.start(pipeline.loop, SimulatedClient(pipeline).send)
    pipeline.loop.run()
    return SessionRun(recorder.record, sender.turns(recorder.record))


def _create_pipeline(
    deployment: Deployment,
    jobs: list[WorkloadRequest],
    log: Callable[[StepLogEvent], None] | None,
    check: Callable[[], None] | None,
    observers: Sequence[PipelineObserver] = (),
    eviction: EvictionOrder | None = None,
) -> tuple[RunRecorder, SimulatedPipeline]:
    """Return the pipeline of a workload, before its first request, and what records it."""
    _check_lengths(deployment, (job.num_prompt_tokens + job.num_output_tokens for job in jobs))
    start = deployment.start_event(jobs[0].arrival_seconds if jobs else 0.0)
    cost = deployment.cost
    recorder = RunRecorder(start, cost.delivery_seconds if cost.delivery_seconds(1) else None)
    if log is not None:
        log(start)
    pipeline = SimulatedPipeline(
        deployment.scheduler,
        cost,
        [recorder, *observers],
        log,
        loop=EventLoop(check=check),
        output_lengths=deployment.output_lengths,
        eviction=eviction,
    )
    start_depth(pipeline, deployment.depth)
    return recorder, pipeline


def _check_lengths(deployment: Deployment, lengths: Iterable[int]) -> None:
    """Raise ValueError if the longest request, in tokens, does not fit max_model_len."""
    longest, limit = max(lengths, default=0), deployment.scheduler.max_model_len
    if longest > limit:
        raise ValueError(
            f"the workload has a request of {longest} tokens, but max_model_len is {limit}: raise "
            f"it, cut the requests (--max-request-tokens {limit}) or choose another workload"
        )


def simulate_scheduler_requests(
    deployment: Deployment,
    requests: list[tuple[float, SchedulerRequest]],
    aborts: Iterable[tuple[float, list[int]]] = (),
    stage_reports: list[StageReport] | None = None,
    depth_changes: Iterable[DepthChange] = (),
) -> tuple[RunRecord, list[StepLogEvent]]:
    """Simulate given scheduler requests and aborts on one engine; return the run's record and log.

    Used to repeat a logged run; `simulate` takes a workload of lengths instead.

    Args:
        deployment: Model, cost model and scheduler configuration of the engine.
        requests: Arrival times in seconds, ascending, with the requests.
        aborts: Times in seconds, with the ids of the sequences that are aborted then.
        stage_reports: Times at which the driver receives the step times of stages; None: the stages
            report as workers do.
        depth_changes: Changes of the number of micro-batches in flight in the logged run.

    Raises:
        ValueError: A request is longer than the model's context.
    """
    _check_lengths(
        deployment, (len(request.prompt_token_ids) + request.max_tokens for _, request in requests)
    )
    config = deployment.scheduler
    begin = requests[0][0] if requests else 0.0
    events: list[StepLogEvent] = [deployment.start_event(begin)]
    pipeline = SimulatedPipeline(
        config,
        deployment.cost,
        log=events.append,
        reports_step_times=stage_reports is None,
        output_lengths=deployment.output_lengths,
    )
    start_depth(pipeline, deployment.depth)
    replay_depth(pipeline, depth_changes)
    pipeline.submit_each(requests)
    for time, seqs in aborts:
        pipeline.abort_at(time, seqs)
    for report in stage_reports or ():
        if report.received_time:
            pipeline.report_step_times_at(report.received_time, report.stage, report.steps)
    pipeline.loop.run()
    return build_run_record(events), events


def roofline_deployment(
    model: str,
    device: str,
    stages: int,
    max_model_len: int,
    link: str = "pcie",
    scheduler: SchedulerConfig | None = None,
    efficiency: DeviceEfficiency | None = None,
    degrees: Sequence[int] = (1,),
    rank_link: str | None = None,
    layers: Sequence[int] | None = None,
    bytes_per_weight: float | None = None,
    shape: ModelShape | None = None,
    memory_share: float = USABLE_MEMORY_SHARE,
    cpu_experts: str = NO_EXPERTS,
    expert_cache: int | None = None,
    host: str = DEFAULT_HOST,
) -> Deployment:
    """Return an engine configuration with step times by the roofline model of given devices.

    The device memory that the weights leave free becomes KV cache.

    Args:
        model: A name of MODELS.
        device: A name of DEVICES for all stages, or one per stage, separated by commas.
        stages: Number of pipeline stages.
        max_model_len: Longest sequence (prompt and output) in tokens.
        link: A name of LINKS for the links between all neighbouring stages, or one per link,
            separated by commas. The driver runs on the machine of the first stage.
        scheduler: Default: SchedulerConfig().
        efficiency: Fractions of the peak rates that kernels reach; default: DeviceEfficiency().
        degrees: Tensor parallel size of all stages, or of each.
        rank_link: A name of LINKS for the links between the ranks of all stages, or one per stage,
            separated by commas; default: the first of `link`.
        layers: Number of layers of each stage; default: equal numbers.
        bytes_per_weight: Default: that of the model.
        shape: Of a model that is not in MODELS; None for one that is.
        memory_share: Share of each device's memory for weights and KV cache.
        cpu_experts: Number of layers, or all, whose routed experts are on the host; none otherwise.
        expert_cache: Bytes on each device for those experts; None for none.
        host: Cores and memory that compute them, as in `parse_host`.

    Raises:
        ValueError: A name is unknown, or sizes do not divide.
        ModelFitError: The model does not fit into the memory of the devices.
    """
    hardware = build_hardware(model, device, stages, link, degrees, rank_link, layers, shape)
    if bytes_per_weight is not None:
        packed = replace(hardware.model, bytes_per_weight=bytes_per_weight)
        hardware = replace(hardware, model=packed)
    if cpu_experts != NO_EXPERTS:
        hardware = offload_experts(hardware, cpu_experts, expert_cache or 0, parse_host(host))
    config = scheduler or SchedulerConfig()
    stage_blocks = hardware.stage_kv_blocks(config.block_size, memory_share)
    blocks = min(stage_blocks)
    if blocks < 1:
        fullest = stage_blocks.index(blocks)
        usable_bytes = memory_share * hardware.stages[fullest].device.memory
        raise ModelFitError(
            f"model {model} does not fit {sum(hardware.degrees)} x {device}: its weights are "
            f"{hardware.model.parameters * hardware.model.bytes_per_weight / 1e9:.0f} GB, "
            f"{hardware.rank_weight_bytes(fullest) / 1e9:.1f} on each device of stage {fullest} "
            f"with {usable_bytes / 1e9:.1f} usable; raise --pp or --tp, or change --layers",
            "weights",
        )
    num_needed, num_slots = -(-max_model_len // config.block_size), 0
    if hardware.model.recurrent is not None:
        memories = hardware.stage_kv_memories(config.block_size, memory_share)
        limits = num_needed, blocks, config.max_num_seqs
        blocks, num_slots = divide_kv_memory(memories, *limits)
    if blocks < num_needed:
        raise ModelFitError(
            f"the KV cache has {blocks} blocks of {config.block_size} tokens, but one sequence of "
            f"max_model_len {max_model_len} needs {num_needed}: raise --pp or --tp, or lower "
            "--max-model-len",
            "KV cache of the longest request",
        )
    ranks = hardware.degrees
    return Deployment(
        model,
        hardware.layer_counts,
        RooflineCostModel(hardware, efficiency),
        config.resolve(stages, blocks, max_model_len, num_state_slots=num_slots),
        degrees=ranks if max(ranks) > 1 else [],
        hardware=hardware,
    )
