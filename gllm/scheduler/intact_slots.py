"""Slots of KV blocks that a later process can use."""

from typing import NamedTuple


class IntactSlots(NamedTuple):
    """Slots of KV blocks that hold what an earlier worker has computed."""

    full: bytes
    """Blocks of which all slots are intact, as a bit per block; the lowest bit of the first byte is
    block 0."""
    begun: dict[int, int]
    """Number of intact slots of other blocks, the first ones of each."""


NO_SLOTS = IntactSlots(b"", {})
