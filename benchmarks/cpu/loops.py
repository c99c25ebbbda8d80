"""Plain loops over the micro-batches of a served run: a stage's arithmetic and nothing else.

One process per stage computes the recorded micro-batches again, with inputs built beforehand: the
minimum time of a served step. The loops read the engine's step log; they do not use the engine.
"""

import multiprocessing as mp
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from gllm.config.engine import EngineConfig
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.models.config import read_config
from gllm.models.split import split_layers
from gllm.observability.step_log import AddEvent, ScheduleEvent, StartEvent, StepLogEvent

MAX_TRANSFER_TOKENS = 8192
"""Largest micro-batch that `phase_seconds` transfers."""


class StageLoops:
    """One process per stage of an engine's configuration, with the engine's threads per stage."""

    def __init__(self, config: EngineConfig, folder: Path) -> None:
        context = mp.get_context("spawn")
        self._pipes: list[Connection] = []
        self._processes = []
        for stage in range(config.pipeline_parallel_size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_run_loop, args=(theirs, config, folder, stage))
            process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    def prepare(self, events: list[StepLogEvent]) -> None:
        """Read the events that an engine logged since the last call, beginning with its start."""
        self._ask("prepare", events)

    def seconds(self) -> list[list[float]]:
        """Return each step's seconds by stage; all stages compute at once, back to back."""
        return self._ask("seconds")

    def kernel_seconds(self) -> list[list[float]]:
        """Return each step's seconds by stage, in tensor operations and compiled kernels only."""
        return self._ask("kernel_seconds")

    def phase_seconds(self) -> list[dict[str, dict[int, float]]]:
        """Return for each stage the seconds of each phase, by the step's number."""
        return self._ask("phase_seconds")

    def close(self) -> None:
        """Stop the processes."""
        for pipe, process in zip(self._pipes, self._processes, strict=True):
            pipe.send(None)
            process.join()

    def _ask(self, *question: Any) -> list[Any]:
        for pipe in self._pipes:
            pipe.send(question)
        return [pipe.recv() for pipe in self._pipes]


def _run_loop(pipe: Connection, config: EngineConfig, folder: Path, stage: int) -> None:
    """Run the loop of one process: call the method that each request names and send its result."""
    loop = _StageLoop(config, folder, stage)
    while (question := pipe.recv()) is not None:
        name, *arguments = question
        pipe.send(getattr(loop, name)(*arguments))


class _StageLoop:
    """One stage and the micro-batches that it computes."""

    def __init__(self, config: EngineConfig, folder: Path, stage: int) -> None:
        # Imported here because the parent process needs no torch.
        from gllm.kernels.threads import set_num_threads
        from gllm.runtime.worker.cpu.executor import CpuExecutor
        from gllm.runtime.worker.device import threads_per_worker

        stages = config.pipeline_parallel_size
        set_num_threads(threads_per_worker(config.threads, stages))
        model_config = read_config(folder)
        layers = split_layers(model_config.model, stages, config.layer_counts)[stage]
        self._executor = CpuExecutor(model_config, config, stages, layers)
        self._executor.load(folder, lambda done, total: None)
        self._batches: list[tuple[Any, Any]] = []
        self._prepare_seconds: dict[int, float] = {}

    def prepare(self, events: list[StepLogEvent]) -> None:
        """Build all inputs; activations of the previous stage are random."""
        import torch

        executor = self._executor
        self._batches = []
        for event in events:
            if isinstance(event, StartEvent):
                executor.allocate(event.scheduler.num_blocks, event.scheduler.block_size)
            elif isinstance(event, AddEvent):
                greedy = SequenceSamplingParams(temperature=0.0)
                prompt = len(event.prompt)
                executor.register(
                    RegisterSequences(event.seq, prompt, event.prompt, greedy, event.n)
                )
            elif isinstance(event, ScheduleEvent) and event.plan is not None:
                begin = time.perf_counter()
                batch = executor.prepare(event.plan)
                self._prepare_seconds[batch.step] = time.perf_counter() - begin
                shape = batch.num_tokens, executor.model.hidden_size
                activations = torch.randn(shape).to(executor.dtype)
                self._batches.append((batch, None if executor.is_first else activations))

    def seconds(self) -> list[float]:
        """Return each step's seconds; the last stage includes greedy sampling."""
        spent = []
        for batch, hidden in self._batches:
            begin = time.perf_counter()
            self._step(batch, None if hidden is None else hidden.clone())
            spent.append(time.perf_counter() - begin)
        return spent

    def kernel_seconds(self) -> list[float]:
        """Return each step's seconds within its operations."""
        from benchmarks.cpu.operations import Operations

        spent = []
        with Operations() as operations:
            for batch, hidden in self._batches:
                operations.seconds = 0.0
                self._step(batch, None if hidden is None else hidden.clone())
                spent.append(operations.seconds)
        return spent

    def phase_seconds(self) -> dict[str, dict[int, float]]:
        """Return each step's seconds by phase.

        Phases: building inputs, computing, and on the last stage sampling; on earlier stages,
        transferring the activations to the next stage.
        """
        phases: dict[str, dict[int, float]] = {"compute": {}}
        transfer = None if self._executor.is_last else _LocalTransfer(self._executor)
        for batch, hidden in self._batches:
            begin = time.perf_counter()
            output = self._executor.compute(batch, None if hidden is None else hidden.clone())
            phases["compute"][batch.step] = time.perf_counter() - begin
            begin = time.perf_counter()
            if transfer is None:
                self._executor.sample(batch, output)
            else:
                transfer.run(batch.step, output)
            end = time.perf_counter() - begin
            phases.setdefault("sample" if transfer is None else "transfer", {})[batch.step] = end
        return phases | {"build inputs": self._prepare_seconds}

    def _step(self, batch: Any, hidden: Any) -> None:
        from gllm.kernels.sampling import argmax_rows

        output = self._executor.compute(batch, hidden)
        if self._executor.is_last and len(output):
            argmax_rows(output).tolist()


class _LocalTransfer:
    """Both ends of a shared-memory edge within one process."""

    def __init__(self, executor: Any) -> None:
        from gllm.transport.base import EdgeLayout
        from gllm.transport.shared_memory import SharedMemoryReceiver, SharedMemorySender

        descriptors = [os.memfd_create("transfer"), os.eventfd(0)]
        itemsize = executor.dtype.itemsize
        shape = EdgeLayout(1, MAX_TRANSFER_TOKENS, executor.model.hidden_size, itemsize)
        self._sender = SharedMemorySender(descriptors, shape, executor.dtype)
        self._receiver = SharedMemoryReceiver(descriptors, shape, executor.dtype)

    def run(self, step: int, hidden: Any) -> None:
        """Send activations and receive them."""
        self._sender.send(step, hidden)
        self._receiver.receive(step, len(hidden))
