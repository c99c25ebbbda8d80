"""The ranks of a stage in one process, each step on a thread per rank, as one executor.

Schedulers and stages of other tests run over it unchanged.
"""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from gllm.config.engine import EngineConfig
from gllm.messages.sampling import SampleDetails
from gllm.messages.steps import RegisterSequences
from gllm.models.config import ModelConfig
from gllm.models.split import split_layers
from gllm.runtime.worker.batch import Batch
from gllm.runtime.worker.cpu.executor import CpuExecutor
from gllm.scheduler.plan import SampledToken, StepPlan
from gllm.transport.groups import StageGroups
from tests.support.models.thread_group import run_ranks, thread_groups


class RankStage:
    """Executors of all ranks of a stage, behind the interface of one."""

    def __init__(self, executors: Sequence[CpuExecutor]) -> None:
        self.ranks = executors
        self.is_first, self.is_last = executors[0].is_first, executors[0].is_last
        self.model = executors[0].model
        size = len(executors)
        self._ends = [
            StageGroups(*ends)
            for ends in zip(thread_groups(size), thread_groups(size), strict=True)
        ]

    def load(self, folder: Path, on_progress: Callable[[int, int], None]) -> None:
        for executor, groups in zip(self.ranks, self._ends, strict=True):
            executor.load(folder, on_progress)
            if len(self.ranks) > 1:
                executor.join(groups)

    def allocate(self, num_blocks: int, block_size: int, kv_memory: int | None = None) -> None:
        assert kv_memory is None, "each rank has a KV cache of its own"
        for executor in self.ranks:
            executor.allocate(num_blocks, block_size)

    def register(self, message: RegisterSequences) -> Any:
        compiling, *others = [executor.register(message) for executor in self.ranks]
        assert not any(others), "only rank 0 has grammars"
        return compiling

    def prepare(self, plan: StepPlan) -> list[Batch]:
        return [executor.prepare(plan) for executor in self.ranks]

    def compute(self, batches: list[Batch], hidden: Tensor | None) -> Tensor:
        """Rank 0's output; those of the others are the same bits, or have no row."""

        def run(group: Any) -> Tensor:
            own = None if hidden is None else hidden.clone()
            return self.ranks[group.rank].compute(batches[group.rank], own).clone()

        first, *others = run_ranks([ends.layers for ends in self._ends], run)
        for other in others:
            if self.is_last:
                assert len(other) == 0
            else:
                assert torch.equal(first, other)
        return first

    def sample(
        self, batches: list[Batch], output: Tensor
    ) -> tuple[list[SampledToken], list[SampleDetails]]:
        return self.ranks[0].sample(batches[0], output)


def make_stages(
    config: ModelConfig, engine: EngineConfig, degrees: Sequence[int]
) -> list[RankStage]:
    """Stages that have not loaded; degrees: ranks of each."""
    return [
        RankStage(
            [
                CpuExecutor(config, engine, len(degrees), layers, rank=rank, num_ranks=num_ranks)
                for rank in range(num_ranks)
            ]
        )
        for layers, num_ranks in zip(split_layers(config.model, len(degrees)), degrees, strict=True)
    ]
