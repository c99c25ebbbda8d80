"""Real workers in the process of the test, so that a test can make their steps fail.

The same sockets, edges and messages as `gllm.runtime.head.node.LocalNode`, but no processes.
`local_engine` is the embeddable engine over them.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from gllm.config.engine import EngineConfig
from gllm.engine.engine import Engine
from gllm.engine.preflight import plan_model
from gllm.models.split import layer_costs
from gllm.observability.logs import DEFAULT_LOG_CONFIG
from gllm.recovery.liveness import ProcessSample
from gllm.runtime.head.assignment import (
    KvMoverConnection,
    StageAssignment,
    WorkerIdentity,
    decode_parent_message,
    encode_parent_message,
)
from gllm.runtime.head.layer_planner import LayerPlanner
from gllm.runtime.head.node import Node, OnExit
from gllm.runtime.head.supervisor import Supervisor
from gllm.runtime.worker.batch import Batch
from gllm.runtime.worker.cpu import executor as cpu_executor
from gllm.runtime.worker.cpu.executor import CpuExecutor
from gllm.runtime.worker.worker import Worker
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
        self.close_kv_files()
        self.on_epoch_ready()

    def _send(self, assignment: StageAssignment) -> None:
        if assignment.sender in self.workers:
            payload, descriptors = encode_parent_message(assignment)
            message = decode_parent_message(payload, [os.dup(each) for each in descriptors])
            assert isinstance(message, StageAssignment)
            self.workers[assignment.sender].assign(message)

    def connect_kv_mover(self, connection: KvMoverConnection) -> None:
        payload, (descriptor,) = encode_parent_message(connection)
        message = decode_parent_message(payload, [os.dup(descriptor)])
        assert isinstance(message, KvMoverConnection)
        self.workers[message.sender].connect_kv_mover(message)

    def sender_of(self, stage: int) -> int:
        """Return the sender of the worker of a stage, of its first rank that has one."""
        return next(
            sender
            for sender, worker in self.workers.items()
            if worker.instance is not None and worker.instance.assignment.stage == stage
        )

    @property
    def executors(self) -> list[Any]:
        """Of each stage."""
        instances = [worker.instance for worker in self.workers.values()]
        placed = [each for each in instances if each is not None]
        return [each.executor for each in sorted(placed, key=lambda each: each.assignment.stage)]


def local_config(stages: int, **options: Any) -> EngineConfig:
    """Configuration of the demo model with little memory."""
    return EngineConfig.from_options(
        "demo",
        pipeline_parallel_size=stages,
        threads=torch.get_num_threads(),
        **{"dtype": "float32", "max_model_len": 256, "kv_cache_memory": 2**25, **options},
    )


@asynccontextmanager
async def local_engine(stages: int = 1, **options: Any) -> AsyncIterator[tuple[Engine, Any]]:
    """The demo model over local workers, and those."""
    workers = LocalWorkers()
    async with Engine(local_config(stages, **options), node=workers) as engine:
        yield engine, workers


@asynccontextmanager
async def local_supervisor(
    stages: int = 1, **options: Any
) -> AsyncIterator[tuple[Supervisor, LocalWorkers]]:
    """The supervisor of such an engine, whose client has no checks of requests; and the workers."""
    workers = LocalWorkers()
    config = local_config(stages, **options)
    plan = plan_model(config)
    config = replace(config, max_model_len=plan.max_model_len)
    planner = LayerPlanner(config, plan.layers, layer_costs(plan.config.model))
    supervisor = Supervisor(config, planner, lambda done, total: None)
    await supervisor.start(plan.folder, workers, DEFAULT_LOG_CONFIG)
    try:
        yield supervisor, workers
    finally:
        await supervisor.stop()


class InjectedError(RuntimeError):
    """A failure that a test asked for."""


class FaultyExecutor(CpuExecutor):
    """Executor whose steps fail where `fault` says so."""

    fault: Fault

    def _build_sampling(self, plan: StepPlan, sequences: Any) -> Any:
        self._check("prepare", plan.step)
        return super()._build_sampling(plan, sequences)

    def compute(self, batch: Batch, hidden: torch.Tensor | None) -> Any:
        self._check("compute", batch.step)
        return super().compute(batch, hidden)

    def sample(self, batch: Batch, output: torch.Tensor) -> Any:
        self._check("sample", batch.step)
        return super().sample(batch, output)

    def _check(self, place: str, step: int) -> None:
        # Of two stages at most.
        if type(self).fault(place, int(not self.is_first), step):
            raise InjectedError(f"{place} of step {step} fails")


@contextmanager
def failing(fault: Fault) -> Iterator[None]:
    """Within it, steps of the engines that start fail where `fault` says so."""
    kind = type("FaultyExecutor", (FaultyExecutor,), {"fault": staticmethod(fault)})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cpu_executor, "CpuExecutor", kind)
        yield
