"""Attention plans made on the host for a device, to be taken there with a step's other inputs.

Owns which part of a plan goes over. Knows nothing of kernels and of what is copied when.
"""

from dataclasses import replace

import torch

from gllm.kernels.attention_plan import AttentionPlan, PagedRows, device_tables, written_slots
from gllm.runtime.batch import Windows

CPU = torch.device("cpu")


def plan_tables(
    rows: PagedRows, dtype: torch.dtype, windows: Windows, backend: str = "triton"
) -> dict[int | None, AttentionPlan]:
    """Plans for layers with these windows and a backend that reads tables, all with the same slots
    and tables. Steps with as many rows, blocks in a row and tokens are laid out alike."""
    slots, tables = torch.from_numpy(written_slots(rows)), device_tables(rows, CPU)
    plan = AttentionPlan(rows, slots, None, backend, tables=tables)
    return {window: replace(plan, window=window) for window in windows}
