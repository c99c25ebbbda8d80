"""A micro-batch as tensors, built from its plan: rows and block tables become columns."""

from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gllm.kernels.attention_plan import AttentionPlan, PagedBatch, plan_attention
from gllm.kernels.attention_window import AttentionWindow
from gllm.kernels.state_plan import StatePlan
from gllm.models.stage import StageInputs
from gllm.runtime.worker.sampling import PromptChunk, SamplingMetadata
from gllm.runtime.worker.stage_drafter import DraftRows
from gllm.scheduler.block_table_replica import SequenceView
from gllm.scheduler.plan import ON_DEVICE, ScheduledRow, StepPlan

Int64Array = npt.NDArray[np.int64]
Windows = frozenset[AttentionWindow]
"""Windows of a stage's layers."""
PlanAttention = Callable[
    [PagedBatch, torch.dtype, Windows], Mapping[AttentionWindow, AttentionPlan]
]
"""(rows of a step, dtype of queries, windows) to the attention plan of each window."""


def plan_windows(
    rows: PagedBatch, dtype: torch.dtype, windows: Windows, backend: str | None = None
) -> dict[AttentionWindow, AttentionPlan]:
    """Plan attention of a step on the host, once per distinct window of the stage's layers.

    Args:
        rows: query and context lengths and block tables of the step's sequences.
        dtype: dtype of the queries.
        windows: those of the stage's layers.
        backend: name of the attention backend; None for the default.

    Returns:
        The plan of each window.
    """
    return {window: plan_attention(rows, dtype, window, backend=backend) for window in windows}


@dataclass(slots=True)
class Batch:
    """Micro-batch of one stage: input tensors, sampling parameters and intermediate state.

    It passes from `prepare` to `compute` to `sample`; only one thread at a time changes it.
    """

    step: int
    inputs: StageInputs
    num_tokens: int
    """Without the tokens of padding rows."""
    logits_indices: Tensor
    """[samples] int64: token row whose logits each sampling row takes."""
    sampling: SamplingMetadata
    prompt_chunks: list[PromptChunk]
    """Prompt tokens to score, on the last stage."""
    placeholders: list[tuple[int, int]]
    """(token row, sequence) of inputs that the previous step samples; first stage only."""
    lane: int = 0
    """Lane of the step, as `StepPlan.lane`."""
    embeddings: Tensor | None = None
    """[embedding rows, hidden] float32, once computed."""
    draft_rows: DraftRows | None = None
    """Rows as a draft model or head computes them; None without one."""
    draft_hidden: Tensor | None = None
    """[tokens, hidden] behind the final norm, for a prediction head."""
    device_state: Any = None
    """State of an executor on a device (gllm/runtime/worker/cuda/executor.py)."""


@dataclass(slots=True)
class BlockTables:
    """Caches the block tables of sequences as numpy arrays, so that a step only copies rows."""

    _arrays: dict[int, tuple[int, int, Int64Array]] = field(default_factory=dict)
    """By sequence: preemptions, number of blocks, and an array with spare capacity."""

    @property
    def seqs(self) -> Set[int]:
        """Sequences that have a table."""
        return self._arrays.keys()

    def gather(
        self,
        plan_rows: list[ScheduledRow],
        sequences: list[SequenceView],
        block_size: int,
        num_more_tokens: int = 0,
    ) -> Int64Array:
        """Return the block ids [rows, most blocks] of a step; unused columns of a row are zero.

        Args:
            plan_rows: rows of the step.
            sequences: block table of each row's sequence, with the plan applied.
            block_size: tokens per block.
            num_more_tokens: tokens behind each row whose blocks are included if there are any.
        """
        num_blocks = [
            -(-(row.start + row.num_tokens + num_more_tokens) // block_size) for row in plan_rows
        ]
        table = np.zeros((len(plan_rows), max(num_blocks, default=0)), dtype=np.int64)
        for index, (row, sequence) in enumerate(zip(plan_rows, sequences, strict=True)):
            blocks = self._update(row, sequence)[: num_blocks[index]]
            table[index, : len(blocks)] = blocks
        return table

    def release(self, seqs: Iterable[int]) -> None:
        """Remove the tables of sequences."""
        for seq in seqs:
            self._arrays.pop(seq, None)

    def _update(self, row: ScheduledRow, sequence: SequenceView) -> Int64Array:
        """Return the row's table, extended by the blocks that the plan added."""
        count = len(sequence.block_ids)
        num_preemptions, known, array = self._arrays.get(
            row.seq, (-1, 0, np.empty(0, dtype=np.int64))
        )
        if num_preemptions != sequence.num_preemptions:
            known = 0
        if count > len(array):
            larger = np.empty(2 * count, dtype=np.int64)
            larger[:known] = array[:known]
            array = larger
        array[known:count] = sequence.block_ids[known:]
        self._arrays[row.seq] = (sequence.num_preemptions, count, array)
        return array


@dataclass(frozen=True, slots=True)
class BatchConfig:
    """KV-cache sizes, query dtype and attention planner that all batches of a stage share."""

    num_blocks: int
    """Usable blocks of the KV cache."""
    block_size: int
    """Tokens per block."""
    dtype: torch.dtype
    """Type of queries; the KV cache may have another one."""
    windows: Windows
    """Windows of the stage's layers."""
    plan_attention: PlanAttention = plan_windows
    """Returns the attention plan of each window for the rows of a step."""
    pad: Callable[[PagedBatch], PagedBatch] = lambda rows: rows
    """Appends padding rows of one token each."""
    has_states: bool = False
    """True if the stage has recurrent layers."""


def build_inputs(
    plan: StepPlan,
    sequences: list[SequenceView],
    tables: BlockTables,
    config: BatchConfig,
    has_token_ids: bool,
) -> tuple[StageInputs, list[tuple[int, int]]]:
    """Build the input tensors of one step of a stage: token ids, positions and attention plans.

    Args:
        plan: rows to compute in the step.
        sequences: block table and tokens of each row's sequence, with the plan applied.
        tables: cached block tables of the stage.
        config: properties that all batches of the stage share.
        has_token_ids: True on the first stage and those with a per-layer embedding.

    Returns:
        The inputs, and (token row, sequence) of each placeholder: an input token that the previous
            step still has to sample.
    """
    start = np.array([row.start for row in plan.rows], dtype=np.int64)
    count = np.array([row.num_tokens for row in plan.rows], dtype=np.int64)
    query_start = np.concatenate((np.zeros(1, dtype=np.int64), count.cumsum()))
    positions = np.arange(query_start[-1]) + np.repeat(start - query_start[:-1], count)
    prefills = np.flatnonzero(count > 1)
    rows = PagedBatch(
        tables.gather(plan.rows, sequences, config.block_size),
        query_start,
        start + count,
        int(prefills[0]) if len(prefills) else len(count),
        config.block_size,
        config.num_blocks,
    )
    padded = config.pad(rows)
    padding = np.zeros(padded.query_start[-1] - query_start[-1], dtype=np.int64)
    attention = config.plan_attention(padded, config.dtype, config.windows)
    ids = gather_token_ids(plan.rows, sequences) if has_token_ids else np.empty(0, dtype=np.int64)
    unknown = np.flatnonzero(ids == ON_DEVICE)
    owners = np.searchsorted(query_start, unknown, side="right") - 1
    placeholders = [
        (token, plan.rows[owner].seq)
        for token, owner in zip(unknown.tolist(), owners.tolist(), strict=True)
    ]
    if len(padding):
        positions = np.concatenate((positions, padding))
        ids = np.concatenate((ids, padding)) if has_token_ids else ids
    states = build_state_plan(plan) if config.has_states else None
    inputs = StageInputs(torch.from_numpy(ids), torch.from_numpy(positions), attention, states)
    return inputs, placeholders


def build_state_plan(plan: StepPlan) -> StatePlan:
    """Build the state plan of a step: the scheduler's segments as tensors."""
    columns = np.array(plan.state_segments, dtype=np.int32).reshape(-1, 4)
    owners, counts = columns[:, 0].copy(), columns[:, 1]
    # The segments have all tokens of the batch, in their order.
    columns[:, 0] = counts.cumsum() - counts
    groups = np.searchsorted(owners, np.arange(len(plan.rows) + 1)).astype(np.int32)
    return StatePlan(torch.from_numpy(columns), torch.from_numpy(groups))


def gather_token_ids(rows: list[ScheduledRow], sequences: list[SequenceView]) -> Int64Array:
    """Return the token ids [tokens] of a step's rows: prompt tokens, then those in the plan."""
    ids: list[int] = []
    for row, sequence in zip(rows, sequences, strict=True):
        end = row.start + row.num_tokens
        if row.start < sequence.prompt_len:
            ids += sequence.prompt_token_ids[row.start : end]
        ids += row.token_ids
    return np.array(ids, dtype=np.int64)
