"""Division of the memory of the KV cache between blocks of tokens and states of recurrent layers.

The rule: states get half of the memory, but no more than STATE_SLOTS_PER_SEQ slots for each of
max_num_seqs sequences and as many for checkpoints of the prefix cache; and blocks get what one
sequence of full length needs, but two slots are always there. All stages have the same number of
blocks and of slots, so the memory that is the scarcest decides.
"""

from collections.abc import Iterable
from typing import NamedTuple

from gllm.scheduler.config import STATE_SLOTS_PER_SEQ

STATE_SHARE = 0.5
"""Largest share of the memory for states, if the blocks of one sequence leave it."""


MAX_UNSTORED_BLOCKS = 2**18
"""Most blocks of a model without attention layers, unless one sequence of full length needs more.
They hold nothing on the stages; the scheduler keeps some bytes for each."""


class KvMemory(NamedTuple):
    """Memory that some workers share for KV blocks and states, with the sizes of their parts."""

    num_bytes: int
    block_bytes: int
    """Bytes of one KV block over the layers of these workers; 0 without attention layers."""
    state_bytes: int = 0
    """Bytes of one state slot over their layers; 0 without recurrent layers."""


class KvDivision(NamedTuple):
    """Numbers of KV blocks and of state slots on each stage."""

    num_blocks: int
    num_state_slots: int


def divide_kv_memory(
    memories: Iterable[KvMemory],
    num_needed_blocks: int,
    max_blocks: int,
    max_num_seqs: int,
    max_state_slots: int | None = None,
) -> KvDivision:
    """Return the numbers of KV blocks and state slots that fit into each of several memories.

    The number of blocks is below `num_needed_blocks` if the memory does not suffice.

    Args:
        memories: bytes and sizes of parts; empty if they are unknown.
        num_needed_blocks: blocks of one sequence of full length.
        max_blocks: limit of the blocks.
        max_num_seqs: largest number of running sequences.
        max_state_slots: limit of the slots in place of the one by `max_num_seqs`.
    """
    memories = list(memories)
    num_slots = 0
    if any(memory.state_bytes for memory in memories):
        num_slots = max_state_slots or 2 * STATE_SLOTS_PER_SEQ * max_num_seqs
        for memory in memories:
            if memory.state_bytes:
                rest = memory.num_bytes - num_needed_blocks * memory.block_bytes
                fitting = int(min(STATE_SHARE * memory.num_bytes, rest)) // memory.state_bytes
                num_slots = min(num_slots, fitting)
        num_slots = max(num_slots, STATE_SLOTS_PER_SEQ)
    num_blocks = max_blocks
    if memories and not any(memory.block_bytes for memory in memories):
        num_blocks = min(num_blocks, max(num_needed_blocks, MAX_UNSTORED_BLOCKS))
    for memory in memories:
        rest = memory.num_bytes - num_slots * memory.state_bytes
        if rest < 0:
            num_blocks = 0
        elif memory.block_bytes:
            num_blocks = min(num_blocks, rest // memory.block_bytes)
    return KvDivision(num_blocks, num_slots)
