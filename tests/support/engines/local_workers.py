"""Real workers in the process of the test, so that a test can make their steps fail.

The same sockets, edges and messages as `gllm.runtime.local_node.LocalNode`, but no processes.
`local_engine` is the embeddable engine over them.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest
import torch

from gllm.cluster.liveness import ProcessSample
from gllm.config.engine import EngineConfig
from gllm.engine.engine import Engine
from gllm.runtime import base_executor as executor_module
from gllm.runtime.assignment import (
    StageAssignment,
    WorkerIdentity,
    decode_parent_message,
    encode_parent_message,
)
from gllm.runtime.batch import Batch, build_inputs
from gllm.runtime.cpu.executor import CpuExecutor
from gllm.runtime.node import Node, OnExit
from gllm.runtime.worker import Worker
from gllm.scheduler.plan import StepPlan

Fault = Callable[[str, int, int], bool]
"""(prepare, compute or sample; stage of two at most; step) to whether that fails."""


class LocalWorkers(Node):
    """Workers of an engine on the running event loop."""

    def __init__(self) -> None:
        super().__init__("gllm-test")
        self.workers: dict[int, Worker] = {}
        """Workers that run, by sender."""
        self._runs: dict[int, asyncio.Task[None]] = {}
        self._ends: set[asyncio.Task[None]] = set()
        """Instances of killed workers that free what a process would not keep."""
        self._on_exit: OnExit = lambda sender, how: None

    def watch(self, on_exit: OnExit) -> None:
        """See Node."""
        self._on_exit = on_exit

    def spawn(self, identity: WorkerIdentity) -> None:
        """Start a worker."""
        sender = identity.sender
        self.workers[sender] = Worker(identity)
        self._runs[sender] = asyncio.create_task(self._run(sender))

    async def _run(self, sender: int) -> None:
        worker = self.workers[sender]
        await worker.run()
        await self._free(worker)
        if self.workers.pop(sender, None) is not None:
            self._on_exit(sender, f"worker {sender} exited with {int(worker.has_failed)}")

    @staticmethod
    async def _free(worker: Worker) -> None:
        """Free what the end of a process would free."""
        if worker.instance is not None:
            await worker.instance.close()

    def kill(self, sender: int) -> None:
        """End a worker in the middle of whatever it does, without a word to anybody."""
        worker = self.workers.pop(sender, None)
        if worker is None:
            return
        self._runs.pop(sender).cancel()
        worker.done.set()
        worker.disconnect()
        ending = asyncio.create_task(self._free(worker))
        self._ends.add(ending)
        ending.add_done_callback(lambda _: self._on_exit(sender, f"worker {sender} was killed"))

    def sample(self, sender: int) -> ProcessSample | None:
        """Nothing: there are no processes."""
        return None

    def dump_stacks(self, sender: int) -> None:
        """Nothing: the test's process writes its own."""

    def read_stacks(self, sender: int) -> str:
        """Nothing."""
        return ""

    async def stop(self) -> None:
        """Wait until the workers have ended."""
        self._on_exit = lambda sender, how: None
        await asyncio.gather(*self._runs.values(), *self._ends)
        self.close_kv_memory()
        self.on_generation_ready()

    def _send(self, assignment: StageAssignment) -> None:
        if assignment.sender in self.workers:
            payload, descriptors = encode_parent_message(assignment)
            message = decode_parent_message(payload, [os.dup(each) for each in descriptors])
            assert isinstance(message, StageAssignment)
            self.workers[assignment.sender].assign(message)

    @property
    def executors(self) -> list[Any]:
        """Of each stage."""
        instances = [worker.instance for worker in self.workers.values()]
        placed = [each for each in instances if each is not None]
        return [each.executor for each in sorted(placed, key=lambda each: each.assignment.stage)]


@asynccontextmanager
async def local_engine(stages: int = 1, **options: Any) -> AsyncIterator[tuple[Engine, Any]]:
    """The demo model over local workers, and those."""
    workers = LocalWorkers()
    config = EngineConfig.from_options(
        "demo",
        pipeline_parallel_size=stages,
        threads=torch.get_num_threads(),
        **{"dtype": "float32", "max_model_len": 256, "kv_cache_memory": 2**25, **options},
    )
    async with Engine(config, node=workers) as engine:
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
