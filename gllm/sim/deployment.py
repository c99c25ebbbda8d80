"""Simulated deployment: a model cut into stages, a cost model and a scheduler configuration."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from gllm.config.degrees import expand_degrees
from gllm.observability.step_log import StartEvent, StepLogEvent
from gllm.scheduler.config import SchedulerConfig
from gllm.scheduler.output_lengths import OutputLengths
from gllm.scheduler.sequence import SchedulerRequest
from gllm.sim.costs.base import CostModel
from gllm.sim.costs.roofline import DeviceEfficiency, RooflineCostModel
from gllm.sim.event_loop import run_events
from gllm.sim.hardware.devices import DEVICES
from gllm.sim.hardware.links import LINKS
from gllm.sim.hardware.models import MODELS
from gllm.sim.hardware.stages import split_layers_evenly
from gllm.sim.metrics.run_record import RunRecord, StageReport, build_run_record
from gllm.sim.pipeline import SimulatedPipeline
from gllm.sim.workloads.requests import WorkloadRequest, to_scheduler_requests

USABLE_MEMORY_SHARE = 0.9
"""Share of a device's memory for weights and KV cache; activations and system get the rest."""


@dataclass(frozen=True)
class Deployment:
    """One replica. `scheduler` is resolved."""

    model: str
    layers: list[int]
    """Number of layers of each stage."""
    cost: CostModel
    scheduler: SchedulerConfig
    output_lengths: OutputLengths | None = None
    """Output lengths that the scheduler begins with."""
    degrees: list[int] = field(default_factory=list)
    """Number of tensor-parallel ranks of each stage; empty: one each."""

    def start_event(self, time: float) -> StartEvent:
        """Return the first event of a log of this deployment."""
        return StartEvent(
            time,
            self.model,
            self.layers,
            self.scheduler,
            source="simulator",
            degrees=self.degrees,
        )


def simulate(
    deployment: Deployment, jobs: list[WorkloadRequest]
) -> tuple[RunRecord, list[StepLogEvent]]:
    """Simulate a workload; return the run and its log. Raises ValueError as `serve_requests`."""
    return serve_requests(deployment, to_scheduler_requests(jobs))


def serve_requests(
    deployment: Deployment,
    requests: list[tuple[float, SchedulerRequest]],
    aborts: Iterable[tuple[float, list[int]]] = (),
    told: list[StageReport] | None = None,
) -> tuple[RunRecord, list[StepLogEvent]]:
    """Simulate requests and aborts at their times.

    `told`: reports of stages' step times; by default each stage reports at the end of each step.

    Raises ValueError for a request that is longer than the deployment's context.
    """
    config = deployment.scheduler
    longest = max((len(each.prompt_token_ids) + each.max_tokens for _, each in requests), default=0)
    if longest > config.max_model_len:
        raise ValueError(
            f"the workload has a request of {longest} tokens, but max_model_len is "
            f"{config.max_model_len}: raise it or choose another workload"
        )
    begin = requests[0][0] if requests else 0.0
    events: list[StepLogEvent] = [deployment.start_event(begin)]
    pipeline = SimulatedPipeline(
        config, deployment.cost, events.append, told is None, deployment.output_lengths
    )
    others = [pipeline.abortion(time, seqs) for time, seqs in aborts]
    others += [
        pipeline.telling(each.received_time, each.stage, each.steps)
        for each in told or ()
        if each.received_time
    ]
    run_events([*pipeline.arrivals(requests), *others])
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
) -> Deployment:
    """Return a deployment on equal devices, one per rank, whose free memory is KV cache.

    Args:
        model: A name of MODELS.
        device: A name of DEVICES.
        stages: Number of stages.
        max_model_len: Longest text in tokens.
        link: A name of LINKS, between neighbouring stages.
        scheduler: Default: SchedulerConfig().
        efficiency: Default: DeviceEfficiency().
        degrees: Number of tensor-parallel ranks of all stages, or of each.
        rank_link: A name of LINKS, between the ranks of a stage; default: `link`.

    Raises:
        ValueError: A name is unknown, sizes do not divide, or the model does not fit.
    """
    rank_link = rank_link or link
    for kind, name, table in (
        ("model", model, MODELS), ("device", device, DEVICES), ("link", link, LINKS),
        ("link", rank_link, LINKS),
    ):  # fmt: skip
        if name not in table:
            raise ValueError(f"{kind} {name!r} is none of {', '.join(table)}")
    shape, hardware = MODELS[model], DEVICES[device]
    layers, ranks = split_layers_evenly(shape.layers, stages), expand_degrees(degrees, stages)
    config = scheduler or SchedulerConfig()
    blocks = []
    for stage, count in enumerate(layers):
        shard = shape.shard(ranks[stage])
        free_bytes = hardware.memory * USABLE_MEMORY_SHARE - shard.stage_bytes(stage, layers)
        blocks.append(int(free_bytes // (count * shard.kv_bytes * config.block_size)))
    if min(blocks) < 1:
        raise ValueError(
            f"model {model} does not fit {sum(ranks)} x {device}: "
            f"its weights are {shape.parameters * 2 / 1e9:.0f} GB; raise --pp or --tp"
        )
    cost = RooflineCostModel(
        shape, hardware, LINKS[link], layers, efficiency, ranks, LINKS[rank_link]
    )
    resolved = config.resolve(stages, min(blocks), max_model_len)
    return Deployment(model, layers, cost, resolved, degrees=ranks if max(ranks) > 1 else [])
