"""Consecutive layers of a model on this machine's device, and the times of their steps."""

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Self

import torch

from gllm.config.engine import EngineConfig
from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.models.config import ModelConfig
from gllm.recovery.placement import RankWorker, make_placement
from gllm.runtime.head.assignment import StageAssignment
from gllm.runtime.worker.batch import Batch
from gllm.runtime.worker.device import count_gpus
from gllm.runtime.worker.stage_resources import create_backend
from gllm.scheduler.plan import ScheduledRow, StepPlan
from gllm.scheduler.stage_work import StageWork, compute_stage_work
from gllm.scheduler.state_slots import create_direct_segments
from gllm.transport.solo_group import create_solo_groups

WARM_UP_STEPS = 2
"""Steps that are not timed: kernels are chosen and programs recorded in them."""

StepRows = Sequence[tuple[int, int]]
"""For each row the tokens of its sequence that are in the KV cache, and the tokens it computes."""


def count_blocks(rows: StepRows, block_size: int) -> int:
    """Return the number of KV blocks that the sequences of a step occupy.

    Args:
        rows: (cached tokens, new tokens) of each sequence.
        block_size: tokens per block.
    """
    return sum(-(-(start + tokens) // block_size) for start, tokens in rows)


class TimedSpan:
    """Consecutive layers of a model, loaded on one rank to time their steps; a context manager.

    With tensor parallelism this is rank 0, whose all-reduces return at once without other ranks.

    Args:
        config: configuration of the engine.
        model: configuration of the whole model.
        folder: folder with the model's weights.
        layers: indices of the layers.
        steps: steps that will be timed, which determine the size of the KV cache.
        num_ranks: tensor parallel size.

    Raises:
        FieldError: the layers cannot be computed as configured.
        ModelError: the folder does not have the weights.
    """

    def __init__(
        self,
        config: EngineConfig,
        model: ModelConfig,
        folder: Path,
        layers: range,
        steps: Sequence[StepRows],
        num_ranks: int = 1,
    ) -> None:
        length = config.max_model_len or model.model.context_length
        config = replace(config, max_model_len=length)
        slots = [RankWorker(sender + 1) for sender in range(num_ranks)]
        placement = make_placement(1, [(0, model.model.num_layers)], slots, [num_ranks])
        assignment = StageAssignment(placement, 1, config, str(folder), "", is_probe=True)
        backend = create_backend(assignment, model, count_gpus(config.device), layers)
        executor = self.executor = backend.executor
        executor.bind_thread()
        executor.load(folder, lambda done, total: None)
        if num_ranks > 1:
            device = None if backend.streams is None else executor.device
            executor.join(create_solo_groups(0, num_ranks, device))
        scheduler = backend.reserve()
        self._block_size = scheduler.block_size
        num_blocks = max(count_blocks(rows, self._block_size) for rows in steps)
        num_slots = max(map(len, steps)) if executor.state_bytes else 0
        executor.allocate(num_blocks, self._block_size, num_state_slots=num_slots)
        backend.prepare_steps()
        self._step = 0
        self._num_sequences = 0
        self._max_model_len = length

    def __enter__(self) -> Self:
        """Return the span."""
        return self

    def __exit__(self, *error: object) -> None:
        """Free the weights and the KV cache."""
        self.executor.close()
        self.executor.release_weights()

    def prepare(self, rows: StepRows, should_sample: bool = True) -> tuple[Batch, StageWork]:
        """Build the inputs of a step; return them with its counts of tokens and sequences."""
        self._step += 1
        scheduled, first_block = [], 0
        for seq, (start, tokens) in enumerate(rows):
            end = first_block + count_blocks([(start, tokens)], self._block_size)
            blocks = list(range(first_block, end))
            first_block = end
            scheduled.append(
                ScheduledRow(seq, self._step, start, tokens, blocks, [], should_sample)
            )
            if seq == self._num_sequences:
                self._register(seq)
        segments = create_direct_segments(scheduled) if self.executor.state_bytes else ()
        plan = StepPlan(self._step, scheduled, [], state_segments=segments)
        return self.executor.prepare(plan), compute_stage_work(self._step, scheduled)

    def time_step(self, rows: StepRows, should_sample: bool = True) -> tuple[StageWork, float]:
        """Compute a step; return its counts of tokens and sequences, and its seconds.

        On a CPU it is the CPU time of this thread, which other programs do not affect; on a GPU the
        time between CUDA events.
        """
        batch, work = self.prepare(rows, should_sample)
        executor = self.executor
        hidden = None if executor.is_first else self.make_hidden(work.num_tokens)
        begin = time.thread_time()
        output = executor.compute(batch, hidden)
        seconds = time.thread_time() - begin
        if executor.is_asynchronous:
            seconds = executor.wait(batch).busy
        if executor.has_sampler:
            executor.sample(batch, output)
        return work, seconds

    def repeat_step(
        self, rows: StepRows, repeats: int, should_sample: bool = True
    ) -> tuple[StageWork, float]:
        """Compute a step several times; return its token counts and the median of its seconds."""
        for _ in range(WARM_UP_STEPS):
            work, _ = self.time_step(rows, should_sample)
        return work, median(self.time_step(rows, should_sample)[1] for _ in range(repeats))

    def make_hidden(self, num_tokens: int) -> torch.Tensor:
        """Return activations of ones, [tokens, hidden]."""
        executor = self.executor
        shape = num_tokens, executor.model.hidden_size
        return torch.ones(shape, dtype=executor.dtype, device=executor.device)

    def _register(self, seq: int) -> None:
        """Register a sequence whose prompt is as long as any text may be."""
        sampling = SequenceSamplingParams(temperature=0.0)
        length = self._max_model_len
        self.executor.register(RegisterSequences(seq, length, [0] * length, sampling))
        self._num_sequences = seq + 1
