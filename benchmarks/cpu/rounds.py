"""Rounds of one workload: an engine serves it, then plain loops compute the same micro-batches.

Owns the order of the two sides and what is kept of a round. Knows nothing of what is made of it.
"""

import asyncio
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from benchmarks.cpu.loops import Loops
from benchmarks.cpu.page import ForeignCpu
from gllm.config.engine import EngineConfig
from gllm.engine.engine import Engine
from gllm.experiments.real import LOG_DRAIN_SECONDS, serve_workload
from gllm.models.hub import resolve_model
from gllm.observability.step_log import StartEvent, StepLogEvent, read_step_log
from gllm.sim.run_record import RunRecord, build_run_record
from gllm.sim.workload import WorkloadRequest


@dataclass(frozen=True)
class Round:
    """What both sides did with one workload."""

    jobs: list[WorkloadRequest]
    served_seconds: float
    """From the first request's way into the engine to the last token's way out."""
    run: RunRecord
    loop_seconds: list[list[float]]
    """By stage, of each micro-batch of the run."""
    foreign_cores: float
    """What others used of the machine meanwhile."""

    @property
    def tokens(self) -> int:
        """Prompt and output."""
        return sum(job.num_prompt_tokens + job.num_output_tokens for job in self.jobs)

    @property
    def loops_seconds(self) -> float:
        """Until the slower loop was through."""
        return max(map(sum, self.loop_seconds))

    @property
    def bubble_shares(self) -> list[float]:
        """By stage, of the time in which it was served."""
        return [use.bubble_share for use in self.run.stage_usages()]

    @property
    def busy_seconds(self) -> list[float]:
        """By stage, what it computed while it was served."""
        return [use.busy for use in self.run.stage_usages()]


class Bench:
    """An engine, its step log and the loops beside it."""

    def __init__(self, engine: Engine, log: Path, loops: Loops) -> None:
        self.loops = loops
        self.events: list[StepLogEvent] = []
        """All that the engine has logged, warm-up included."""
        self._engine = engine
        self._log = log

    async def round(self, jobs: list[WorkloadRequest], seed: int) -> Round:
        """Serve the jobs, with prompts that no other seed has, and compute the same again."""
        foreign = ForeignCpu()
        served = await self.serve(jobs, seed)
        run = build_run_record(await self.news())
        seconds = await asyncio.to_thread(self.loops.seconds)
        return Round(jobs, served, run, seconds, foreign.cores())

    async def serve(self, jobs: list[WorkloadRequest], seed: int) -> float:
        """Serve the jobs; return the seconds that it took."""
        begin = time.perf_counter()
        await serve_workload(self._engine, jobs, seed)
        return time.perf_counter() - begin

    async def news(self) -> list[StepLogEvent]:
        """The log's start and what was logged since the last call; the loops are fed with it."""
        await asyncio.sleep(LOG_DRAIN_SECONDS)
        events = list(read_step_log(self._log))
        new, self.events = events[len(self.events) :], events
        await asyncio.to_thread(self.loops.prepare, new)
        start = events[0]
        assert isinstance(start, StartEvent), "read_step_log has checked it"
        return [msgspec.structs.replace(start, warm_ups=0), *new]


@asynccontextmanager
async def bench(config: EngineConfig) -> AsyncIterator[Bench]:
    """Both sides, started and warm."""
    with tempfile.TemporaryDirectory(prefix="gllm-") as folder:
        log = Path(folder) / "steps.jsonl"
        scheduler = replace(config.scheduler, prefix_cache=False)
        config = replace(config, step_log=str(log), scheduler=scheduler)
        loops = Loops(config, resolve_model(config.model))
        try:
            async with Engine(config) as engine:
                made = Bench(engine, log, loops)
                await made.news()
                yield made
        finally:
            loops.close()
