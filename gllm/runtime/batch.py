"""A micro-batch as tensors, built from its plan.

Owns the way from rows and block tables to columns. Knows nothing of models; what is random is
described for `gllm.runtime.sampler`, not drawn here.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gllm.kernels.attention_plan import AttentionPlan, PagedBatch, plan_attention
from gllm.models.stage import StageInputs
from gllm.runtime.logprobs import PromptRows
from gllm.runtime.sampler import SampledRows
from gllm.scheduler.block_table_replica import SequenceView
from gllm.scheduler.plan import ON_DEVICE, ScheduledRow, StepPlan

Ints = npt.NDArray[np.int64]
Windows = frozenset[int | None]
PlanAttention = Callable[[PagedBatch, torch.dtype, Windows], Mapping[int | None, AttentionPlan]]


def plan_each(
    rows: PagedBatch, dtype: torch.dtype, windows: Windows, backend: str | None = None
) -> dict[int | None, AttentionPlan]:
    """The attention of a step for layers with these windows, on the host."""
    return {window: plan_attention(rows, dtype, window, backend=backend) for window in windows}


@dataclass(slots=True)
class Batch:
    """One micro-batch for one stage. Never changed by two threads at once: it goes from `prepare`
    to `compute` to `sample`."""

    step: int
    inputs: StageInputs
    num_tokens: int
    """Without those of padding, where inputs have some."""
    sample_rows: Tensor
    """[samples] int64: the token row each sampling row's logits come from."""
    sampled: SampledRows
    prompts: list[PromptRows]
    """Parts of prompts to be scored, on the last stage."""
    placeholders: list[tuple[int, int]]
    """(token row, sequence) of inputs that the step before samples; first stage only."""
    embeddings: Tensor | None = None
    """[embedded rows, hidden] float32, once computed, where some row tells one."""
    device: Any = None
    """What an executor on a device adds (gllm/runtime/cuda/executor.py)."""


@dataclass(slots=True)
class BlockTables:
    """Block tables as arrays, so that a step copies rows instead of converting lists."""

    _arrays: dict[int, tuple[int, int, Ints]] = field(default_factory=dict)
    """By sequence: epoch, blocks, and an array with room for more."""

    def rows(
        self, plan_rows: list[ScheduledRow], followed: list[SequenceView], block_size: int
    ) -> Ints:
        """Block ids [rows, most blocks], zero-padded; each row's up to its last token."""
        needed = [-(-(row.start + row.num_tokens) // block_size) for row in plan_rows]
        table = np.zeros((len(plan_rows), max(needed, default=0)), dtype=np.int64)
        for index, (row, sequence) in enumerate(zip(plan_rows, followed, strict=True)):
            blocks = self._current(row, sequence)[: needed[index]]
            table[index, : len(blocks)] = blocks
        return table

    def release(self, seqs: Iterable[int]) -> None:
        """Forget sequences."""
        for seq in seqs:
            self._arrays.pop(seq, None)

    def _current(self, row: ScheduledRow, sequence: SequenceView) -> Ints:
        """The row's table, brought up to what the plan added."""
        count = len(sequence.block_ids)
        epoch, known, array = self._arrays.get(row.seq, (-1, 0, np.empty(0, dtype=np.int64)))
        if epoch != sequence.epoch:
            known = 0
        if count > len(array):
            grown = np.empty(2 * count, dtype=np.int64)
            grown[:known] = array[:known]
            array = grown
        array[known:count] = sequence.block_ids[known:]
        self._arrays[row.seq] = (sequence.epoch, count, array)
        return array


@dataclass(frozen=True, slots=True)
class CacheShape:
    """What a batch has to know of the KV cache."""

    num_blocks: int
    block_size: int
    dtype: torch.dtype
    """Of queries, not of what is cached."""
    windows: Windows
    """Of the stage's layers."""
    plan: PlanAttention = plan_each
    pad: Callable[[PagedBatch], PagedBatch] = lambda rows: rows
    """Adds rows of one token of padding each, at the end."""


def build_inputs(
    plan: StepPlan,
    followed: list[SequenceView],
    tables: BlockTables,
    cache: CacheShape,
    tokens: bool,
) -> tuple[StageInputs, list[tuple[int, int]]]:
    """A stage's inputs and its placeholders (token row, sequence); `tokens`: on the first stage.

    `followed`: the sequence of each row, the plan applied.
    """
    start = np.array([row.start for row in plan.rows], dtype=np.int64)
    count = np.array([row.num_tokens for row in plan.rows], dtype=np.int64)
    query_start = np.concatenate((np.zeros(1, dtype=np.int64), count.cumsum()))
    positions = np.arange(query_start[-1]) + np.repeat(start - query_start[:-1], count)
    longer = np.flatnonzero(count > 1)
    rows = PagedBatch(
        tables.rows(plan.rows, followed, cache.block_size),
        query_start,
        start + count,
        int(longer[0]) if len(longer) else len(count),
        cache.block_size,
        cache.num_blocks,
    )
    padded = cache.pad(rows)
    padding = np.zeros(padded.query_start[-1] - query_start[-1], dtype=np.int64)
    attention = cache.plan(padded, cache.dtype, cache.windows)
    ids = token_ids(plan.rows, followed) if tokens else np.empty(0, dtype=np.int64)
    unknown = np.flatnonzero(ids == ON_DEVICE)
    owners = np.searchsorted(query_start, unknown, side="right") - 1
    placeholders = [
        (token, plan.rows[owner].seq)
        for token, owner in zip(unknown.tolist(), owners.tolist(), strict=True)
    ]
    if len(padding):
        positions = np.concatenate((positions, padding))
        ids = np.concatenate((ids, padding)) if tokens else ids
    inputs = StageInputs(torch.from_numpy(ids), torch.from_numpy(positions), attention)
    return inputs, placeholders


def token_ids(rows: list[ScheduledRow], followed: list[SequenceView]) -> Ints:
    """Token ids [tokens]: of the prompt as registered, then what the row brings."""
    ids: list[int] = []
    for row, sequence in zip(rows, followed, strict=True):
        end = row.start + row.num_tokens
        if row.start < sequence.prompt_len:
            ids += sequence.prompt_token_ids[row.start : end]
        ids += row.token_ids
    return np.array(ids, dtype=np.int64)
