"""Trials served by engines on emulated devices instead of simulated.

Engines run a few at a time, because each takes a tenth of a core. Those that run together start
together: a start needs all cores, and would delay the steps of others.
"""

import asyncio
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from msgspec.structs import replace as replace_struct

from experiments.trials import (
    MAX_MODEL_LEN,
    SimulationTrial,
    TrialRun,
    deploy_trial,
    trial_jobs,
)
from gllm.commands.bench.real import LOG_DRAIN_SECONDS, serve_workload
from gllm.config.engine import EngineConfig
from gllm.engine.engine import Engine
from gllm.observability.progress import show_progress
from gllm.observability.step_log import (
    AddEvent,
    ScheduleEvent,
    StageTimesEvent,
    StartEvent,
    StepLogEvent,
    read_step_log,
)
from gllm.scheduler.plan import StepTime
from gllm.sim.metrics.run_record import build_run_record
from gllm.sim.workloads.requests import WorkloadRequest

ENGINES = 3
"""Engines that run at a time."""


@dataclass(frozen=True)
class ServedWorkload:
    """A workload that an engine has served."""

    events: list[StepLogEvent]
    """Step log of this workload alone, with the start of the engine."""
    late_share: float = 0.0
    """Time from the ends of steps until the workers noticed them, over the time of the steps."""


Load = tuple[str, int, float, str, int]
"""Fields of a trial on which its requests depend."""
Workloads = list[list[WorkloadRequest]]
GroupServer = Callable[[Sequence[tuple[EngineConfig, Workloads]]], list[list[ServedWorkload]]]
"""Runs engines together, each of which serves its workloads one after another."""


class ServedTrial(NamedTuple):
    """A trial on emulated devices."""

    run: TrialRun
    late_share: float


def trial_config(trial: SimulationTrial, speed: float = 1.0) -> EngineConfig:
    """Return the configuration of the engine on emulated devices that a trial simulates.

    Args:
        trial: The trial.
        speed: All step and link times are divided by this.
    """
    setting = trial.setting
    kv_cache_memory = None
    if trial.kv_share < 1:
        deployment = deploy_trial(trial)
        assert deployment.hardware is not None, "the devices are those of a data sheet"
        model, scheduler = deployment.hardware.model, deployment.scheduler
        token_bytes = model.kv_bytes * sum(deployment.layers)
        kv_cache_memory = scheduler.num_blocks * scheduler.block_size * token_bytes
    return EngineConfig.from_options(
        setting.model,
        device=f"emulated:{setting.device}",
        pipeline_parallel_size=setting.stages,
        tensor_parallel_size=(setting.ranks,),
        max_model_len=MAX_MODEL_LEN,
        kv_cache_memory=kv_cache_memory,
        emulated_link=setting.link,
        emulated_speed=speed,
        policy=trial.policy,
        **dict(trial.options),
    )


def serve_trials(
    trials: Sequence[SimulationTrial],
    speed: float = 1.0,
    progress: bool = True,
    serve: GroupServer | None = None,
) -> list[ServedTrial]:
    """Serve trials on emulated devices; times are those of the emulated devices.

    Trials with the same engine are served by one engine, one after another; those that have the
    same requests too are served once.

    Args:
        trials: The trials.
        speed: Emulated seconds per second.
        progress: Show the progress on standard error.
        serve: Runs the engines; None for those of this machine.

    Raises:
        EngineError: An engine fails.
    """
    serve = serve or serve_groups
    groups: dict[EngineConfig, dict[Load, list[int]]] = {}
    for index, trial in enumerate(trials):
        load = (trial.workload, trial.requests, trial.rate, trial.arrivals, trial.seed)
        loads = groups.setdefault(trial_config(trial, speed), {})
        loads.setdefault(load, []).append(index)
    served: dict[int, ServedTrial] = {}
    with show_progress("engine", len(groups), is_shown=progress) as bar:
        waiting = iter(groups.items())
        while batch := list(islice(waiting, ENGINES)):
            work = [
                (config, [_hurry(trial_jobs(trials[first]), speed) for first, *_ in loads.values()])
                for config, loads in batch
            ]
            for (_, loads), results in zip(batch, serve(work), strict=True):
                for indices, result in zip(loads.values(), results, strict=True):
                    run = build_run_record(_stretch(event, speed) for event in result.events)
                    for index in indices:
                        served[index] = ServedTrial(TrialRun(trials[index], run), result.late_share)
                bar.update()
    return [served[index] for index in range(len(trials))]


def serve_groups(
    groups: Sequence[tuple[EngineConfig, Workloads]],
) -> list[list[ServedWorkload]]:
    """Serve workloads on engines of this machine that run together."""
    return asyncio.run(_serve_together(groups))


async def _serve_together(
    groups: Sequence[tuple[EngineConfig, Workloads]],
) -> list[list[ServedWorkload]]:
    ready, served = (asyncio.Barrier(len(groups)) for _ in range(2))
    tasks = []
    async with asyncio.TaskGroup() as group:
        for config, workloads in groups:
            tasks.append(group.create_task(_serve_one(config, workloads, ready, served)))
    return [task.result() for task in tasks]


async def _serve_one(
    config: EngineConfig, workloads: Workloads, ready: asyncio.Barrier, served: asyncio.Barrier
) -> list[ServedWorkload]:
    """Serve the workloads while the other engines serve theirs."""
    begins, shares = [], []
    with tempfile.TemporaryDirectory(prefix="gllm-") as folder:
        log = Path(folder) / "steps.jsonl"
        async with Engine(replace(config, step_log=str(log))) as engine:
            await ready.wait()
            late, busy = _count_late(engine)
            for seed, jobs in enumerate(workloads):
                begins.append(time.monotonic())
                await serve_workload(engine, jobs, seed)
                await asyncio.sleep(LOG_DRAIN_SECONDS)
                now_late, now_busy = _count_late(engine)
                shares.append((now_late - late) / max(now_busy - busy, 1e-9))
                late, busy = now_late, now_busy
            await served.wait()
        events = list(read_step_log(log))
    return [
        ServedWorkload(part, share)
        for part, share in zip(split_log(events, begins), shares, strict=True)
    ]


def _count_late(engine: Engine) -> tuple[float, float]:
    """Return the lateness and the time of all steps until now, in seconds."""
    loads = engine.status().stage_loads.values()
    return sum(load.late_seconds for load in loads), sum(load.busy_seconds for load in loads)


def split_log(events: list[StepLogEvent], begins: list[float]) -> list[list[StepLogEvent]]:
    """Return the parts of a step log from each of some ascending times until the next.

    Each part begins with the start event, without warm-ups and reports of earlier steps.
    """
    start = events[0]
    assert isinstance(start, StartEvent), "a step log begins with its start"
    start = replace_struct(start, warm_ups=0)
    ends = [*begins[1:], float("inf")]
    return [
        [start, *_drop_earlier_steps([event for event in events if begin <= event.time < end])]
        for begin, end in zip(begins, ends, strict=True)
    ]


def _drop_earlier_steps(events: list[StepLogEvent]) -> Iterator[StepLogEvent]:
    """Yield the events without step times of steps that were planned before."""
    planned = {
        event.plan.step
        for event in events
        if isinstance(event, ScheduleEvent) and event.plan is not None
    }
    for event in events:
        if isinstance(event, StageTimesEvent):
            steps = [times for times in event.steps if times.step in planned]
            yield replace_struct(event, steps=steps)
        else:
            yield event


def _hurry(jobs: list[WorkloadRequest], speed: float) -> list[WorkloadRequest]:
    """Return the requests at the times of the host."""
    return [job._replace(arrival_seconds=job.arrival_seconds / speed) for job in jobs]


def _stretch(event: StepLogEvent, speed: float) -> StepLogEvent:
    """Return an event at the times of the emulated devices."""
    if speed == 1:
        return event
    event = replace_struct(event, time=event.time * speed)
    if isinstance(event, AddEvent):
        return replace_struct(event, age_seconds=event.age_seconds * speed)
    if isinstance(event, StageTimesEvent):
        steps = [StepTime(s.step, s.start * speed, s.end * speed) for s in event.steps]
        return replace_struct(event, steps=steps)
    return event
