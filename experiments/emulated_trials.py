"""Trials served by engines on emulated devices instead of simulated.

Each load has an engine of its own, because a policy that learns keeps what it has learnt of earlier
loads. Engines run together as far as their CPU time permits, those of about the same time. Those
that run together start together: a start needs all cores, and would delay the steps of others.
"""

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace as replace_struct

from experiments.trials import (
    MAX_MODEL_LEN,
    SimulationTrial,
    TrialRun,
    deploy_trial,
    trial_jobs,
)
from gllm.commands.bench.real import LOG_DRAIN_SECONDS, run_logged, serve_workload
from gllm.config.engine import EngineConfig
from gllm.engine.engine import Engine
from gllm.observability.progress import show_progress
from gllm.observability.step_log import (
    AddEvent,
    StageTimesEvent,
    StepLogEvent,
)
from gllm.scheduler.plan import StepTime
from gllm.sim.metrics.run_record import build_run_record
from gllm.sim.workloads.requests import WorkloadRequest

ENGINES = 3
"""Engines that run at a time, whatever their load."""
MAX_ENGINES = 6
"""Engines that run at a time at most: their processes start together."""
MAX_CORES = 0.5
"""CPU time per second up to which more than ENGINES run together."""
STEP_SECONDS = 1.35e-3
"""CPU time of all processes of an engine per micro-batch and device, the client's included:
experiments/pages/emulation.md."""
MAX_LATE = 0.02
"""Lateness, as a share of the time of the steps, up to which an emulated run is valid."""


@dataclass(frozen=True)
class ServedWorkload:
    """A workload that an engine has served."""

    events: list[StepLogEvent]
    """Step log of the engine."""
    late_share: float = 0.0
    """Time from the ends of steps until the workers noticed them, over the time of the steps."""


Load = tuple[str, int, float, str, int]
"""Fields of a trial on which its requests depend."""
LoadedEngine = tuple[EngineConfig, list[WorkloadRequest]]
"""An engine, and the requests that it serves."""
GroupServer = Callable[[Sequence[LoadedEngine]], list[ServedWorkload]]
"""Runs engines together, each of which serves its requests."""


class ServedTrial(NamedTuple):
    """A trial on emulated devices."""

    run: TrialRun
    late_share: float

    @property
    def is_valid(self) -> bool:
        """True if its workers were not too late."""
        return self.late_share <= MAX_LATE


class EngineLoad(NamedTuple):
    """Load that an engine on emulated devices puts on this machine while it serves its requests."""

    seconds: float
    """Time from the first request to the last token."""
    cores: float
    """CPU time per second."""


def estimate_load(run: TrialRun, speed: float = 1.0) -> EngineLoad:
    """Return the load of the engine that serves a simulated trial.

    Args:
        run: Simulation of the trial.
        speed: Emulated seconds per second.
    """
    record, setting = run.record, run.trial.setting
    ends = [served.line.times[-1] for served in record.requests.values() if served.line.times]
    seconds = max(ends, default=0.0) / speed
    num_steps = setting.stages * setting.ranks * len(record.micro_batches)
    return EngineLoad(seconds, STEP_SECONDS * num_steps / max(seconds, 1e-9))


def group_engines(loads: Sequence[EngineLoad], usual: int = ENGINES) -> list[list[int]]:
    """Return the engines that run together, by their indices: each engine is in one group.

    The longest engines come first, so that those of a group take about the same time.

    Args:
        loads: Loads of the engines.
        usual: Engines of a group whatever their load; up to MAX_ENGINES if they have MAX_CORES
            together at most.
    """
    groups: list[list[int]] = []
    cores = 0.0
    for index in sorted(range(len(loads)), key=lambda each: -loads[each].seconds):
        cores += loads[index].cores
        is_heavy = cores > MAX_CORES * (1 + 1e-9)
        if not groups or len(groups[-1]) >= (usual if is_heavy else MAX_ENGINES):
            groups.append([])
            cores = loads[index].cores
        groups[-1].append(index)
    return groups


def trial_config(trial: SimulationTrial, speed: float = 1.0) -> EngineConfig:
    """Return the configuration of the engine on emulated devices that a trial simulates.

    Args:
        trial: The trial.
        speed: All step and link times are divided by this.
    """
    setting, deployment = trial.setting, deploy_trial(trial)
    kv_cache_memory = None
    if trial.kv_share < 1:
        assert deployment.hardware is not None, "the devices are those of a data sheet"
        model, scheduler = deployment.hardware.model, deployment.scheduler
        token_bytes = model.kv_bytes * sum(deployment.layers)
        kv_cache_memory = scheduler.num_blocks * scheduler.block_size * token_bytes
    return EngineConfig.from_options(
        setting.model,
        device=f"emulated:{setting.device}",
        pipeline_parallel_size=setting.stages,
        layers=tuple(deployment.layers),
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
    simulated: Sequence[TrialRun] | None = None,
) -> list[ServedTrial]:
    """Serve trials on emulated devices; times are those of the emulated devices.

    Trials with the same engine and the same requests are served once. Those whose workers were too
    late are served once more, by one engine at a time; the less late run counts.

    Args:
        trials: The trials.
        speed: Emulated seconds per second.
        progress: Show the progress on standard error.
        serve: Runs the engines; None for those of this machine.
        simulated: Simulations of the trials, whose loads decide which engines run together; None:
            ENGINES with about the same rate do.

    Raises:
        EngineError: An engine fails.
    """
    serve = serve or serve_groups
    if simulated is None:
        loads = [EngineLoad(1 / trial.rate, MAX_CORES / ENGINES) for trial in trials]
    else:
        loads = [estimate_load(run, speed) for run in simulated]
    served = _serve_once(trials, speed, progress, serve, loads)
    late = [index for index, each in enumerate(served) if not each.is_valid]
    if late and progress:
        print(
            f"{len(late)} of {len(served)} trials were late and are served again", file=sys.stderr
        )
    alone = [EngineLoad(loads[index].seconds, MAX_CORES) for index in late]
    again = _serve_once([trials[index] for index in late], speed, progress, serve, alone, 1)
    for index, each in zip(late, again, strict=True):
        served[index] = min(served[index], each, key=lambda run: run.late_share)
    return served


def _serve_once(
    trials: Sequence[SimulationTrial],
    speed: float,
    progress: bool,
    serve: GroupServer,
    loads: Sequence[EngineLoad],
    usual: int = ENGINES,
) -> list[ServedTrial]:
    """Serve trials, with engines together as their loads permit: see `group_engines`."""
    groups: dict[tuple[EngineConfig, Load], list[int]] = {}
    for index, trial in enumerate(trials):
        load = (trial.workload, trial.requests, trial.rate, trial.arrivals, trial.seed)
        groups.setdefault((trial_config(trial, speed), load), []).append(index)
    served: dict[int, ServedTrial] = {}
    with show_progress("engine", len(groups), is_shown=progress and bool(groups)) as bar:
        engines = list(groups.items())
        together = group_engines([loads[indices[0]] for _, indices in engines], usual)
        for batch in ([engines[number] for number in numbers] for numbers in together):
            work = [
                (config, _hurry(trial_jobs(trials[indices[0]]), speed))
                for (config, _), indices in batch
            ]
            for (_, indices), result in zip(batch, serve(work), strict=True):
                run = build_run_record(_stretch(event, speed) for event in result.events)
                for index in indices:
                    served[index] = ServedTrial(TrialRun(trials[index], run), result.late_share)
                bar.update()
    return [served[index] for index in range(len(trials))]


def serve_groups(groups: Sequence[LoadedEngine]) -> list[ServedWorkload]:
    """Serve requests on engines of this machine that run together."""
    return asyncio.run(_serve_together(groups))


async def _serve_together(groups: Sequence[LoadedEngine]) -> list[ServedWorkload]:
    ready, served = (asyncio.Barrier(len(groups)) for _ in range(2))
    async with asyncio.TaskGroup() as group:
        tasks = [
            group.create_task(_serve_one(config, jobs, ready, served)) for config, jobs in groups
        ]
    return [task.result() for task in tasks]


async def _serve_one(
    config: EngineConfig,
    jobs: list[WorkloadRequest],
    ready: asyncio.Barrier,
    served: asyncio.Barrier,
) -> ServedWorkload:
    """Serve requests while the other engines serve theirs."""
    late_share = 0.0

    async def work(engine: Engine) -> None:
        nonlocal late_share
        await ready.wait()
        await serve_workload(engine, jobs)
        await asyncio.sleep(LOG_DRAIN_SECONDS)
        loads = engine.status().stage_loads.values()
        busy = sum(load.busy_seconds for load in loads)
        late_share = sum(load.late_seconds for load in loads) / max(busy, 1e-9)
        await served.wait()

    return ServedWorkload(await run_logged(config, work), late_share)


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
