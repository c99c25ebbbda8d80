"""Attention plans built on the host for a device, copied there with a step's other inputs."""

from dataclasses import replace

import torch
from torch import Tensor

from gllm.kernels.attention_plan import (
    AttentionPlan,
    PagedBatch,
    build_device_tables,
    compute_slot_mapping,
    list_prefill_tiles,
)
from gllm.models.stage import StageInputs
from gllm.runtime.worker.batch import Windows

CPU = torch.device("cpu")


def plan_table_attention(
    rows: PagedBatch,
    dtype: torch.dtype,
    windows: Windows,
    requested_tiles: set[int] | None = None,
    backend: str = "triton",
) -> dict[int | None, AttentionPlan]:
    """Return the plan of each window, for a backend that reads tables.

    All plans share slots and tables. Steps with equal numbers of rows, blocks per row and tokens
    have equal layouts.

    Args:
        rows: of the step.
        dtype: of queries; unused, tables do not depend on it.
        windows: of the stage's layers.
        requested_tiles: tile sizes of prefill chunks in tokens that kernels have requested. Kernels
            of the first computed step (the largest one, at start-up) add theirs; plans made with
            the same set include the tiles.
        backend: name of the attention backend.
    """
    requested_tiles = set() if requested_tiles is None else requested_tiles
    slots, tables = torch.from_numpy(compute_slot_mapping(rows)), build_device_tables(rows, CPU)
    listed = {}
    if len(rows.context_len) > rows.num_decodes:
        # A copy: kernels add to the set on another thread.
        for num_tokens in tuple(requested_tiles):
            listed[num_tokens] = torch.from_numpy(list_prefill_tiles(rows, num_tokens))
    tables = replace(tables, prefill_tiles=listed, requested_tile_sizes=requested_tiles)
    plan = AttentionPlan(rows, slots, None, backend, tables=tables)
    return {window: replace(plan, window=window) for window in windows}


def get_block_table(inputs: StageInputs) -> Tensor | None:
    """Return the block table [rows, blocks] int32 of a step's inputs; None without tables.

    It is the only input whose width depends on the longest context.
    """
    tables = next(iter(inputs.attention.values())).tables
    return None if tables is None else tables.block_table
