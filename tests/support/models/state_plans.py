"""States of recurrent layers, driven by hand: plans written as lists of segments, and memory."""

from collections.abc import Sequence

import torch

from gllm.kernels.state_plan import StatePlan
from gllm.models.attention import LayerCache
from gllm.models.spec.layer import LayerSpec
from gllm.runtime.worker.kv_cache import KVCache

Segment = tuple[int, int, int]
"""Number of rows, source slot, destination slot."""


def plan_states(*sequences: list[Segment]) -> StatePlan:
    """Return the plan of a step whose rows are those of the segments, one after the other."""
    segments, groups, first = [], [0], 0
    for sequence in sequences:
        for rows, source, destination in sequence:
            segments.append((first, rows, source, destination))
            first += rows
        groups.append(len(segments))
    return StatePlan(
        torch.tensor(segments, dtype=torch.int32).view(-1, 4),
        torch.tensor(groups, dtype=torch.int32),
    )


def allocate_cache(
    layers: Sequence[LayerSpec], blocks: int, block_size: int, dtype: torch.dtype, slots: int
) -> list[LayerCache]:
    """Allocate blocks of attention layers and slots of recurrent ones, which hold no numbers."""
    caches = KVCache(layers, blocks, block_size, dtype, num_state_slots=slots).layers
    for layer, cache in zip(layers, caches, strict=True):
        if (entry := layer.attention.state_entry) is not None:
            for part in cache[-len(entry.parts) :]:
                part.fill_(torch.nan)
    return caches
