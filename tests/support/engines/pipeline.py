"""Several stages in one process, driven by hand-made plans.

Owns the bookkeeping that a scheduler would do in tests of the arithmetic: positions, block tables
in a scattered order, plans.
"""

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from gllm.config.engine import EngineConfig
from gllm.messages.sampling import SampleDetails, SequenceSamplingParams
from gllm.messages.steps import RegisterSequences
from gllm.models.config import ModelConfig, read_config
from gllm.models.split import split_layers
from gllm.runtime.worker.batch import Batch
from gllm.runtime.worker.cpu.executor import CpuExecutor
from gllm.runtime.worker.executor import Executor
from gllm.scheduler.plan import SampledToken, ScheduledRow, StepPlan
from gllm.scheduler.state_slots import create_direct_segments

GREEDY = SequenceSamplingParams(temperature=0.0)
NUM_STATE_SLOTS = 64
"""Sequences of a model with recurrent layers, by their numbers."""


@dataclass
class Held:
    """A sequence: its tokens, those computed, its blocks."""

    prompt_len: int
    tokens: list[int]
    computed: int = 0
    num_preemptions: int = 0
    blocks: int = 0


@dataclass
class Pipeline:
    """Stages of one model and the sequences in them."""

    folder: Path
    stages: int = 1
    block_size: int = 4
    num_blocks: int = 64
    dtype: str = "float32"
    quantization: str = "none"
    kv_cache_dtype: str = "auto"
    attention_backend: str = "auto"
    held: dict[int, Held] = field(default_factory=dict)
    steps: int = 0
    logprobs: list[SampleDetails] = field(default_factory=list)
    """All that the sampling rows told."""

    def __post_init__(self) -> None:
        self.config: ModelConfig = read_config(self.folder)
        engine = EngineConfig.from_options(
            str(self.folder),
            pipeline_parallel_size=self.stages,
            dtype=self.dtype,
            quantization=self.quantization,
            kv_cache_dtype=self.kv_cache_dtype,
            attention_backend=self.attention_backend,
            block_size=self.block_size,
        )
        cut = split_layers(self.config.model, self.stages)
        self.executors = [self.create_executor(engine, layers) for layers in cut]
        for executor in self.executors:
            executor.load(self.folder, lambda done, total: None)
            num_slots = NUM_STATE_SLOTS if self.config.model.has_state else 0
            executor.allocate(self.num_blocks, self.block_size, num_state_slots=num_slots)
        self.free = list(range(self.num_blocks))
        random.Random(7).shuffle(self.free)

    def create_executor(self, engine: EngineConfig, layers: range) -> Executor:
        """The executor of a stage; classes for other devices replace this."""
        return CpuExecutor(self.config, engine, self.stages, layers)

    def add(self, seq: int, prompt: list[int], sampling: SequenceSamplingParams = GREEDY) -> None:
        """Register a sequence with all stages."""
        self.held[seq] = Held(len(prompt), list(prompt))
        for executor in self.executors:
            executor.register(RegisterSequences(seq, len(prompt), prompt, sampling))

    def row(self, seq: int, tokens: int, samples: bool = True, **given: Any) -> ScheduledRow:
        """The next tokens of a sequence, with blocks for them."""
        held = self.held[seq]
        end = held.computed + tokens
        needed = -(-end // self.block_size) - held.blocks
        blocks = [self.free.pop() for _ in range(needed)]
        brought = held.tokens[max(held.computed, held.prompt_len) : end]
        fields = {"start": held.computed, "num_tokens": tokens, "should_sample": samples, **given}
        held.computed = end
        held.blocks += needed
        fields = {"new_block_ids": blocks, "token_ids": brought, **fields}
        return ScheduledRow(seq=seq, num_preemptions=held.num_preemptions, **fields)

    def decodes_again(self, seq: int) -> StepPlan:
        """A plan that computes every position of a sequence once more, as a decode of its own."""
        length = self.held[seq].computed
        return self.plan([self.row(seq, 0, start=at, num_tokens=1) for at in range(length)])

    def preempt(self, seq: int) -> None:
        """Take a sequence's blocks away (they are not used again here)."""
        held = self.held[seq]
        held.computed = held.blocks = 0
        held.num_preemptions += 1

    def plan(self, rows: list[ScheduledRow], released: list[int] | None = None) -> StepPlan:
        """The next step's plan."""
        self.steps += 1
        segments = create_direct_segments(rows) if self.config.model.has_state else ()
        return StepPlan(self.steps, rows, released or [], state_segments=segments)

    def logits(self, plan: StepPlan) -> tuple[Batch, torch.Tensor]:
        """The last stage's batch and logits."""
        hidden = None
        for executor in self.executors:
            batch = executor.prepare(plan)
            hidden = executor.compute(batch, hidden)
        assert hidden is not None
        return batch, hidden

    def run(
        self, rows: list[ScheduledRow], released: list[int] | None = None
    ) -> list[SampledToken]:
        """Compute and sample a step; drawn tokens are appended to their sequences."""
        batch, logits = self.logits(self.plan(rows, released))
        results, logprobs = self.executors[-1].sample(batch, logits)
        self.logprobs += logprobs
        for result in results:
            self.held[result.seq].tokens.append(result.token_id)
        return results
