"""Attention plans made on the host for a device, to be taken there with a step's other inputs.

Owns which part of a plan goes over. Knows nothing of kernels and of what is copied when.
"""

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
from gllm.runtime.batch import Windows

CPU = torch.device("cpu")


def plan_tables(
    rows: PagedBatch,
    dtype: torch.dtype,
    windows: Windows,
    asked: set[int] | None = None,
    backend: str = "triton",
) -> dict[int | None, AttentionPlan]:
    """Plans for layers with these windows and a backend that reads tables, all with the same slots
    and tables. Steps with as many rows, blocks in a row and tokens are laid out alike.

    asked: which tiles of prefill chunks kernels ask for. The first step that is computed tells (the
    largest one, at start-up), and all that are planned with the same set bring them along.
    """
    asked = set() if asked is None else asked
    slots, tables = torch.from_numpy(compute_slot_mapping(rows)), build_device_tables(rows, CPU)
    listed = {}
    if len(rows.context_len) > rows.num_decodes:
        # A copy: kernels ask on another thread.
        for tokens in tuple(asked):
            listed[tokens] = torch.from_numpy(list_prefill_tiles(rows, tokens))
    tables = replace(tables, prefill_tiles=listed, requested_tile_sizes=asked)
    plan = AttentionPlan(rows, slots, None, backend, tables=tables)
    return {window: replace(plan, window=window) for window in windows}


def block_table_of(inputs: StageInputs) -> Tensor | None:
    """[rows, blocks] int32: what of a step's inputs is as wide as its longest context; None where
    nothing is."""
    tables = next(iter(inputs.attention.values())).tables
    return None if tables is None else tables.block_table
