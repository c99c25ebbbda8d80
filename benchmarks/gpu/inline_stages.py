"""Several stages on one device in one process, for machines without the workers' packages.

The stages are the executors of the real processes; activations are copied between their streams.
Processes, messages and transports are left out.
"""

import time
from collections import defaultdict, deque
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.gpu.host import HostQueues
from gllm.config.engine import EngineConfig
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.models.config import read_config
from gllm.models.hub import DEMO
from gllm.models.split import split_layers
from gllm.runtime.worker.batch import Batch
from gllm.runtime.worker.cuda.executor import CudaExecutor
from gllm.scheduler.plan import StepPlan, StepResult
from gllm.scheduler.scheduler import Scheduler
from gllm.scheduler.sequence import SchedulerRequest
from gllm.transport.device_streams import CudaRuntime, DeviceRuntime

NUM_BLOCKS, LONGEST, GRAPH_ROWS = 256, 512, 16


class InlinePipeline:
    """The demo model split into stages that share one device."""

    def __init__(self, stages: int, is_dry: bool, options: dict[str, Any]) -> None:
        """Load all stages.

        Args:
            stages: Number of stages.
            is_dry: Use the CPU.
            options: Fields of EngineConfig.
        """
        self._runtime: DeviceRuntime = HostQueues() if is_dry else CudaRuntime()
        config = read_config(DEMO)
        engine = EngineConfig.from_options(
            str(DEMO), max_model_len=LONGEST, pipeline_parallel_size=stages, **options
        )
        self._config = engine.scheduler.resolve(stages, NUM_BLOCKS, LONGEST)
        self._executors = [
            CudaExecutor(config, engine, stages, layers, self._runtime)
            for layers in split_layers(config.model, stages)
        ]
        for executor in self._executors:
            executor.load(DEMO, lambda done, total: None)
            executor.reserve(self._config)
            executor.allocate(NUM_BLOCKS, self._config.block_size)
            executor.warm_up()
            executor.record_graphs(GRAPH_ROWS, lambda done, total: None)

    def generate(self, prompts: Sequence[list[int]], tokens: int) -> list[list[int]]:
        """Return the greedy token ids, `tokens` of each prompt."""
        scheduler = Scheduler(self._config)
        for seq, prompt in enumerate(prompts):
            scheduler.add(SchedulerRequest(seq, prompt, tokens), time.monotonic())
            for executor in self._executors:
                executor.register(
                    RegisterSequences(
                        seq, len(prompt), prompt, SequenceSamplingParams(temperature=0.0)
                    )
                )
        texts: dict[int, list[int]] = defaultdict(list)
        in_flight: deque[tuple[StepPlan, Batch, list[torch.Tensor]]] = deque()
        last = self._executors[-1]
        while True:
            while (plan := scheduler.schedule(time.monotonic())) is not None:
                in_flight.append((plan, *self._compute(plan)))
            if not in_flight:
                return [texts[seq] for seq in range(len(prompts))]
            plan, batch, outputs = in_flight.popleft()
            last.wait(batch)
            sampled, _ = last.sample(batch, outputs[-1])
            for row in sampled:
                if row.error:
                    raise ArithmeticError(row.error)
                texts[row.seq].append(row.token_id)
            scheduler.commit(StepResult(plan.step, sampled))

    def _compute(self, plan: StepPlan) -> tuple[Batch, list[torch.Tensor]]:
        """Enqueue a step on the streams of all stages.

        Returns:
            The last stage's batch and every stage's output. The caller keeps them until the
            step is finished, because other streams read them.
        """
        batches = [executor.prepare(plan) for executor in self._executors]
        outputs: list[torch.Tensor] = []
        for executor, batch in zip(self._executors, batches, strict=True):
            output = executor.compute(batch, outputs[-1] if outputs else None)
            if executor is not self._executors[-1]:
                output = self._transfer(executor, output)
            outputs.append(output)
        return batches[-1], outputs

    def _transfer(self, executor: CudaExecutor, output: torch.Tensor) -> torch.Tensor:
        """Copy activations for the next stage and make its stream wait for the copy.

        The graphs of this stage overwrite their own output.
        """
        with executor.stream.current():
            copied = output.clone()
        sent = self._runtime.event()
        executor.stream.record(sent)
        self._executors[self._executors.index(executor) + 1].stream.wait(sent)
        return copied
