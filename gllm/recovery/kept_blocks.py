"""KV blocks that a recovery keeps: sets of blocks, and the placements whose files still fit.

A set of blocks is bytes with a bit per block; the lowest bit of the first byte is block 0.
"""

import math
from collections.abc import Iterable

from gllm.recovery.placement import Placement
from gllm.scheduler.intact_slots import NO_SLOTS, IntactSlots


def has_same_places(before: Placement, after: Placement) -> bool:
    """Return True if every rank has the same layers on the same machine in both placements.

    The processes may be others.
    """
    return before.layers == after.layers and before.nodes == after.nodes


def intersect_slots(workers: Iterable[IntactSlots]) -> IntactSlots:
    """Return the slots that are intact on all workers; none without workers."""
    parts = list(workers)
    if not parts:
        return NO_SLOTS
    num_bytes = min(len(part.full) for part in parts)
    full = (1 << 8 * num_bytes) - 1
    for part in parts:
        full &= int.from_bytes(part.full[:num_bytes], "little")
    begun = {}
    for block in set().union(*(part.begun for part in parts)):
        # All slots of a block are more than any number of a block that has begun.
        counts = [
            part.begun.get(block, math.inf if contains_block(part.full, block) else 0)
            for part in parts
        ]
        if (count := min(counts)) > 0:
            begun[block] = int(count)
    return IntactSlots(full.to_bytes(num_bytes, "little") if full else b"", begun)


def contains_block(block_set: bytes, block: int) -> bool:
    """Return True if a block is in a set."""
    index, bit = divmod(block, 8)
    return index < len(block_set) and bool(block_set[index] >> bit & 1)
