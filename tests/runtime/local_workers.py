"""Real workers in the process of the test, so that a test can make their steps fail.

The same sockets, edges and messages as `gllm.runtime.launch.WorkerProcesses`, but no
processes. `local_engine` is the embeddable engine over them.
"""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from gllm.config.engine import EngineConfig
from gllm.engine.engine import Engine
from gllm.observability.logs import LogConfig
from gllm.runtime import base_executor as executor_module
from gllm.runtime.batch import Batch, build_inputs
from gllm.runtime.cpu.executor import CpuExecutor
from gllm.runtime.launch import WorkerGroup
from gllm.runtime.worker import Worker
from gllm.scheduler.plan import StepPlan

Fault = Callable[[str, int, int], bool]
"""(prepare, compute or sample; stage of two at most; step) to whether that fails."""


class ClosedLoop:
    """The event loop of a worker that has ended."""

    def call_soon_threadsafe(self, *call: Any) -> None:
        """Nothing: nobody hears of it."""


class LocalWorkers(WorkerGroup):
    """Workers of a pipeline on the running event loop."""

    def __init__(self, stages: int) -> None:
        super().__init__(stages, "gllm-test")
        self.workers: list[Worker] = []
        self._runs: list[asyncio.Task[None]] = []

    def start(
        self, config: EngineConfig, folder: Path, layers: list[range], logs: LogConfig
    ) -> None:
        """Start each worker with its stage of the model."""
        for spec in self._create_specs(config, folder, layers, logs):
            self.workers.append(Worker(spec))
            self._runs.append(asyncio.create_task(self.workers[-1].run()))

    def watch(self, on_exit: Callable[[int, str], None]) -> None:
        """Nothing: there are no processes."""

    async def stop(self) -> None:
        """Wait until the workers have ended."""
        await asyncio.gather(*self._runs)
        for worker in self.workers:
            # A process would end now; a thread may still be at a step.
            worker._runner._loop = ClosedLoop()  # type: ignore[assignment]
        self.remove_sockets()

    @property
    def executors(self) -> list[Any]:
        """Of each stage."""
        return [worker._backend.executor for worker in self.workers]


@asynccontextmanager
async def local_engine(stages: int = 1, **options: Any) -> AsyncIterator[tuple[Engine, Any]]:
    """The demo model over local workers, and those."""
    workers = LocalWorkers(stages)
    config = EngineConfig.from_options(
        "demo",
        pipeline_parallel_size=stages,
        threads=torch.get_num_threads(),
        **{"dtype": "float32", "max_model_len": 256, "kv_cache_memory": 2**25, **options},
    )
    async with Engine(config, workers=workers) as engine:
        yield engine, workers


class InjectedError(RuntimeError):
    """A failure that a test asked for."""


@contextmanager
def failing(fault: Fault) -> Iterator[None]:
    """Within it, steps of all stages fail where `fault` says so."""
    prepare, build = CpuExecutor.prepare, build_inputs
    compute, sample = CpuExecutor.compute, CpuExecutor.sample
    preparing: list[tuple[int, int]] = []

    def stage_of(executor: CpuExecutor) -> int:
        """Of two stages at most."""
        return int(executor.layers.start > 0)

    def check(place: str, stage: int, step: int) -> None:
        if fault(place, stage, step):
            raise InjectedError(f"{place} of step {step} fails")

    def prepare_step(self: CpuExecutor, plan: StepPlan) -> Batch:
        preparing.append((stage_of(self), plan.step))
        try:
            return prepare(self, plan)
        finally:
            preparing.pop()

    def build_step(*args: Any) -> Any:
        if preparing:
            check("prepare", *preparing[-1])
        return build(*args)

    def compute_step(self: CpuExecutor, batch: Batch, hidden: torch.Tensor | None) -> Any:
        check("compute", stage_of(self), batch.step)
        return compute(self, batch, hidden)

    def sample_step(self: CpuExecutor, batch: Batch, logits: torch.Tensor) -> Any:
        check("sample", stage_of(self), batch.step)
        return sample(self, batch, logits)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CpuExecutor, "prepare", prepare_step)
        patch.setattr(executor_module, "build_inputs", build_step)
        patch.setattr(CpuExecutor, "compute", compute_step)
        patch.setattr(CpuExecutor, "sample", sample_step)
        yield
