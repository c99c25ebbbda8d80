"""KV blocks that a recovery keeps: sets of blocks, and the placements whose files still fit.

A set of blocks is bytes with a bit per block; the lowest bit of the first byte is block 0.
"""

from collections.abc import Iterable

from gllm.recovery.placement import Placement


def has_same_places(before: Placement, after: Placement) -> bool:
    """Return True if every rank has the same layers on the same machine in both placements.

    The processes may be others.
    """
    return before.layers == after.layers and before.nodes == after.nodes


def intersect_block_sets(block_sets: Iterable[bytes]) -> bytes:
    """Return the blocks that are in all sets; empty without sets, or if one of them is empty."""
    sets = list(block_sets)
    if not sets:
        return b""
    num_bytes = min(map(len, sets))
    common = (1 << 8 * num_bytes) - 1
    for blocks in sets:
        common &= int.from_bytes(blocks[:num_bytes], "little")
    return common.to_bytes(num_bytes, "little") if common else b""


def contains_block(block_set: bytes, block: int) -> bool:
    """Return True if a block is in a set."""
    index, bit = divmod(block, 8)
    return index < len(block_set) and bool(block_set[index] >> bit & 1)
