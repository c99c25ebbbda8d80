"""Rounds of one workload: an engine serves it, then plain loops compute the same micro-batches."""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from benchmarks.cpu.loops import StageLoops
from benchmarks.cpu.page import ForeignCpu
from gllm.commands.bench.real import LOG_DRAIN_SECONDS, serve_workload
from gllm.config.engine import EngineConfig
from gllm.engine.engine import Engine
from gllm.models.hub import resolve_model
from gllm.observability.step_log import StartEvent, StepLogEvent, read_step_log
from gllm.sim.metrics.run_record import RunRecord, build_run_record
from gllm.sim.workloads.requests import WorkloadRequest


@dataclass(frozen=True)
class Round:
    """Result of one round: the served run and the loops' times."""

    jobs: list[WorkloadRequest]
    served_seconds: float
    """Seconds from the first request's submission to the last token."""
    run: RunRecord
    loop_seconds: list[list[float]]
    """Seconds by stage, for each micro-batch of the run."""
    foreign_cores: float
    """Average number of cores that other processes used during the measurement."""

    @property
    def tokens(self) -> int:
        """Number of prompt and output tokens."""
        return sum(job.num_prompt_tokens + job.num_output_tokens for job in self.jobs)

    @property
    def loops_seconds(self) -> float:
        """Seconds until the slower loop finished."""
        return max(map(sum, self.loop_seconds))

    @property
    def bubble_shares(self) -> list[float]:
        """Bubble share by stage while serving."""
        return [use.bubble_share for use in self.run.stage_usages()]

    @property
    def busy_seconds(self) -> list[float]:
        """Compute seconds by stage while serving."""
        return [use.busy for use in self.run.stage_usages()]


class RoundRunner:
    """An engine, its step log and the plain loops that repeat its micro-batches."""

    def __init__(self, engine: Engine, log: Path, loops: StageLoops) -> None:
        self.loops = loops
        self.events: list[StepLogEvent] = []
        """Events that the engine has logged, including warm-up."""
        self._engine = engine
        self._log = log

    async def round(self, jobs: list[WorkloadRequest], seed: int) -> Round:
        """Serve the jobs and compute the same micro-batches again; prompts depend on the seed."""
        foreign = ForeignCpu()
        served = await self.serve(jobs, seed)
        run = build_run_record(await self.read_new_events())
        seconds = await asyncio.to_thread(self.loops.seconds)
        return Round(jobs, served, run, seconds, foreign.cores())

    async def serve(self, jobs: list[WorkloadRequest], seed: int) -> float:
        """Serve the jobs and return the elapsed seconds."""
        begin = time.perf_counter()
        await serve_workload(self._engine, jobs, seed)
        return time.perf_counter() - begin

    async def read_new_events(self) -> list[StepLogEvent]:
        """Return the log's start and the events since the last call; pass those to the loops."""
        await asyncio.sleep(LOG_DRAIN_SECONDS)
        events = list(read_step_log(self._log))
        new, self.events = events[len(self.events) :], events
        await asyncio.to_thread(self.loops.prepare, new)
        start = events[0]
        assert isinstance(start, StartEvent), "read_step_log has checked it"
        return [msgspec.structs.replace(start, warm_ups=0), *new]


@asynccontextmanager
async def start_round_runner(config: EngineConfig) -> AsyncIterator[RoundRunner]:
    """Start and warm up the engine and the loops; stop them on exit."""
    with tempfile.TemporaryDirectory(prefix="gllm-") as folder:
        log = Path(folder) / "steps.jsonl"
        scheduler = replace(config.scheduler, prefix_cache=False)
        config = replace(config, step_log=str(log), scheduler=scheduler)
        loops = StageLoops(config, resolve_model(config.model))
        try:
            async with Engine(config) as engine:
                runner = RoundRunner(engine, log, loops)
                await runner.read_new_events()
                yield runner
        finally:
            loops.close()
