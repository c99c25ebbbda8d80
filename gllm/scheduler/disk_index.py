"""Index of the prefix cache's disk tier: which KV blocks are kept, and which of them are evicted.

Pure: no I/O, no clock.

A block deep in a prompt costs more to compute than the first one, because its tokens attend to all
tokens before it; but without the blocks before it it is useless. Only blocks that no kept block
follows are therefore evicted, the one with the least priority first. The priority is that of
GreedyDual ("The k-server dual and loose competitiveness for paging", N. Young, 1994): the cost of
computing the block, plus the priority of the block that was evicted last before its latest use. All
blocks have the same size, so the cost per byte is the cost.
"""

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

DEFAULT_ATTENTION_SHARE = 1e-4
"""Cost of attending to one token, divided by that of the rest of a token, until it is measured."""


def recompute_cost(position: int, attention_share: float = DEFAULT_ATTENTION_SHARE) -> float:
    """Return the cost of recomputing a KV block; the unit is that of the first block of a prompt.

    Args:
        position: tokens before the block, to which its tokens attend.
        attention_share: cost of attending to one token, divided by that of the rest of a token.
    """
    return 1.0 + attention_share * position


class DiskBlock(NamedTuple):
    """Key of a KV block on disk, and what decides how long it is kept."""

    key: bytes
    """Keyed 128-bit digest of the block's tokens and all tokens before them."""
    parent: bytes
    """Key of the block before it."""
    position: int
    """Tokens before the block."""
    priority: float
    """Priority of GreedyDual; the unit is the cost of the first block of a prompt."""


class DiskPrefixIndex:
    """KV blocks on the disks of all stages and ranks, with the choice of those to evict."""

    def __init__(self, blocks: Iterable[DiskBlock] = ()) -> None:
        """Create the index of blocks that are kept already, in any order."""
        self.attention_share = DEFAULT_ATTENTION_SHARE
        """Cost of attending to one token, divided by that of the rest of a token."""
        self._blocks = {block.key: block for block in blocks}
        self._num_children = Counter(block.parent for block in self._blocks.values())
        """Kept blocks by the key of the block before them, which may be missing."""
        self._leaves = [
            (block.priority, block.key)
            for block in self._blocks.values()
            if not self._num_children[block.key]
        ]
        """Heap of blocks that no kept block follows; outdated entries are removed lazily."""
        heapify(self._leaves)
        self._floor = min((priority for priority, _ in self._leaves), default=0.0)
        """Priority of the last evicted block."""

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, key: bytes) -> bool:
        return key in self._blocks

    @property
    def keys(self) -> Collection[bytes]:
        """Keys of all blocks."""
        return self._blocks.keys()

    def count_prefix(self, keys: Sequence[bytes], start: int) -> int:
        """Return how many consecutive keys from index `start` on are kept."""
        end = start
        while end < len(keys) and keys[end] in self._blocks:
            end += 1
        return end - start

    def priority_of(self, position: int) -> float:
        """Return the priority of a block that is used now and has `position` tokens before it."""
        return self._floor + recompute_cost(position, self.attention_share)

    def add(self, block: DiskBlock) -> None:
        """Add a block; one that is there already is replaced."""
        self.remove(block.key)
        self._blocks[block.key] = block
        self._num_children[block.parent] += 1
        self._push(block)

    def touch(self, keys: Iterable[bytes]) -> None:
        """Note the use of blocks; unknown keys are ignored."""
        for key in keys:
            block = self._blocks.get(key)
            if block is not None:
                block = block._replace(priority=self.priority_of(block.position))
                self._blocks[key] = block
                self._push(block)

    def remove(self, key: bytes) -> None:
        """Remove a block; an unknown key is ignored. Blocks behind it stay until evicted."""
        block = self._blocks.pop(key, None)
        if block is None:
            return
        self._num_children[block.parent] -= 1
        if not self._num_children[block.parent]:
            del self._num_children[block.parent]
            if (parent := self._blocks.get(block.parent)) is not None:
                self._push(parent)

    def evict(self, num_blocks: int, protected: Collection[bytes] = ()) -> list[bytes]:
        """Remove blocks to make space; return their keys, at most `num_blocks`.

        Args:
            num_blocks: number of blocks to remove.
            protected: keys that stay: those before new blocks, or that are being read.
        """
        evicted: list[bytes] = []
        kept = []
        while len(evicted) < num_blocks and self._leaves:
            priority, key = entry = heappop(self._leaves)
            block = self._blocks.get(key)
            if block is None or block.priority != priority or self._num_children[key]:
                continue
            if key in protected:
                kept.append(entry)
                continue
            self._floor = max(self._floor, priority)
            evicted.append(key)
            self.remove(key)
        for entry in kept:
            heappush(self._leaves, entry)
        return evicted

    def _push(self, block: DiskBlock) -> None:
        """Add a block to the heap if no kept block follows it."""
        if not self._num_children[block.key]:
            heappush(self._leaves, (block.priority, block.key))
        if len(self._leaves) > 4 * len(self._blocks) + 64:
            self._leaves = [
                (kept.priority, key)
                for key, kept in self._blocks.items()
                if not self._num_children[key]
            ]
            heapify(self._leaves)
