"""Some layers of the model on a worker's device, and the times of their steps, for the probe."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from gllm.messages.sampling import SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.models.config import ModelConfig
from gllm.runtime.head.assignment import StageAssignment
from gllm.runtime.worker.base_executor import BaseExecutor
from gllm.runtime.worker.device import count_gpus
from gllm.runtime.worker.stage_loader import create_backend
from gllm.scheduler.plan import ScheduledRow, StepPlan
from gllm.transport.solo_group import create_solo_groups

NUM_DECODES = 16
"""Rows of the decode step."""
CONTEXT_TOKENS = 256
"""Context of each decode."""
CHUNK_TOKENS = 512
"""Tokens of the prefill step."""


@dataclass(frozen=True)
class StepSizes:
    """Sizes of the steps that are timed, within the limits of the configuration."""

    num_decodes: int
    context_tokens: int
    chunk_tokens: int
    block_size: int

    @property
    def blocks_per_decode(self) -> int:
        """KV blocks of a decode's sequence."""
        return self.context_tokens // self.block_size + 1

    @property
    def num_blocks(self) -> int:
        """KV blocks of all sequences."""
        return self.num_decodes * self.blocks_per_decode + -(-self.chunk_tokens // self.block_size)

    def decode_rows(self, epoch: int, should_sample: bool) -> list[ScheduledRow]:
        """Return the rows of a decode step, with their whole block tables."""
        count = self.blocks_per_decode
        return [
            ScheduledRow(
                seq,
                epoch,
                self.context_tokens,
                1,
                [*range(seq * count, (seq + 1) * count)],
                [],
                should_sample,
            )
            for seq in range(self.num_decodes)
        ]

    def chunk_rows(self, epoch: int, should_sample: bool) -> list[ScheduledRow]:
        """Return the row of a prefill step, with its whole block table."""
        blocks = [*range(self.num_decodes * self.blocks_per_decode, self.num_blocks)]
        row = ScheduledRow(self.num_decodes, epoch, 0, self.chunk_tokens, blocks, [], should_sample)
        return [row]


class LayerProbe:
    """Some consecutive layers of the model on the worker's device."""

    def __init__(
        self,
        assignment: StageAssignment,
        model: ModelConfig,
        layers: range,
        clock: Callable[[], float] = time.thread_time,
        num_gpus: int | None = None,
    ) -> None:
        """Choose the device.

        Args:
            assignment: of the worker.
            model: the whole model.
            layers: indices of the layers.
            clock: CPU time of the calling thread in seconds.
            num_gpus: GPUs that the worker may use; None to count them.

        Raises:
            FieldError: the layers cannot be computed as configured.
        """
        if num_gpus is None:
            num_gpus = count_gpus(assignment.config.device)
        self._backend = create_backend(assignment, model, num_gpus, layers)
        self._clock = clock
        self._folder = Path(assignment.model_folder)
        self._slowdown = assignment.config.slowdown_of(assignment.stage)
        self._rank, self._num_ranks = assignment.rank, assignment.num_ranks
        self._epoch = 0
        self.available_bytes: int | None = None
        """Bytes for weights and KV cache, once loaded; None in the host's memory."""

    @property
    def executor(self) -> BaseExecutor:
        """Executor of the layers."""
        executor = self._backend.executor
        assert isinstance(executor, BaseExecutor), "all backends of gllm share it"
        return executor

    def load(self) -> None:
        """Load the layers, and allocate everything for steps."""
        backend, executor = self._backend, self.executor
        executor.bind_thread()
        executor.load(self._folder, lambda done, total: None)
        if self._num_ranks > 1:
            device = None if backend.streams is None else executor.device
            executor.join(create_solo_groups(self._rank, self._num_ranks, device))
        config = backend.reserve()
        assert config.max_num_batched_tokens is not None
        max_model_len, max_tokens = config.max_model_len, config.max_num_batched_tokens
        self._sizes = StepSizes(
            min(NUM_DECODES, config.max_num_seqs, max_tokens),
            min(CONTEXT_TOKENS, max_model_len - 1),
            min(CHUNK_TOKENS, max_model_len, max_tokens),
            config.block_size,
        )
        available = backend.available_bytes()
        if available is not None:
            self.available_bytes = available + executor.weight_bytes
        executor.allocate(self._sizes.num_blocks, config.block_size)
        backend.prepare_steps()
        decode_len = self._sizes.context_tokens + 1
        lengths = [decode_len] * self._sizes.num_decodes + [self._sizes.chunk_tokens]
        for seq, length in enumerate(lengths):
            sampling = SequenceSamplingParams(temperature=0.0)
            executor.register(RegisterSequences(seq, length, [0] * length, sampling))

    def decode(self, should_sample: bool) -> float:
        """Compute a decode step and return its time.

        should_sample: compute the logits of each row too.
        """
        return self._time_step(self._sizes.decode_rows, should_sample)

    def prefill(self, should_sample: bool) -> float:
        """Compute a prefill step and return its time.

        should_sample: compute the logits of the last row too.
        """
        return self._time_step(self._sizes.chunk_rows, should_sample)

    def close(self) -> None:
        """Free everything."""
        self.executor.close()
        self.executor.release_weights()

    def _time_step(
        self, make_rows: Callable[[int, bool], list[ScheduledRow]], should_sample: bool
    ) -> float:
        """Compute a step and return its time."""
        self._epoch += 1
        executor = self.executor
        rows = make_rows(self._epoch, should_sample)
        batch = executor.prepare(StepPlan(self._epoch, rows, []))
        hidden = None
        if not executor.is_first:
            shape = sum(row.num_tokens for row in rows), executor.model.hidden_size
            hidden = torch.ones(shape, dtype=executor.dtype, device=executor.device)
        # CPU time, because other programs would interrupt nearly every step on a busy machine.
        begin = self._clock()
        output = executor.compute(batch, hidden)
        seconds = self._clock() - begin
        if executor.is_asynchronous:
            seconds = executor.wait(batch).busy
        if executor.has_sampler:
            executor.sample(batch, output)
        return seconds * self._slowdown
