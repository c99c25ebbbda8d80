"""Block pool of the KV cache: free, referenced and cached blocks.

A block is free, referenced by sequences, or cached without a reference. Cached blocks without a
reference are evicted in an order of gllm.scheduler.eviction.
"""

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from typing import NamedTuple

from gllm.scheduler.eviction import EvictionOrder, LruEviction
from gllm.scheduler.state_slots import StateCache

HASH_BYTES = 16
"""Size of a block hash in bytes."""
TOKEN_TYPE = "q"
"""Type code of arrays of token ids."""


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the 128-bit prefix-cache hash of a full KV block and all tokens before it.

    Args:
        parent: hash of the previous block, or `root_hash` for the first block.
        token_ids: tokens of the block.
    """
    return blake2b(parent + array(TOKEN_TYPE, token_ids).tobytes(), digest_size=HASH_BYTES).digest()


def chain_hashes(
    parent: bytes, token_ids: Sequence[int], block_size: int, secret: bytes = b""
) -> list[bytes]:
    """Return the prefix-cache hashes of consecutive full KV blocks, each based on the one before.

    Args:
        parent: hash of the block before the first one.
        token_ids: tokens of the blocks; their number is a multiple of `block_size`.
        block_size: tokens per block.
        secret: key of a keyed hash, which cannot be computed without it; empty for the hashes of
            the prefix cache in memory, which routers compute too.
    """
    # Converting all tokens at once takes half the time of doing so per block.
    data = array(TOKEN_TYPE, token_ids)
    num_bytes = block_size * data.itemsize
    encoded, hashes = data.tobytes(), []
    for begin in range(0, len(encoded), num_bytes):
        parent = blake2b(
            parent + encoded[begin : begin + num_bytes], digest_size=HASH_BYTES, key=secret
        ).digest()
        hashes.append(parent)
    return hashes


def root_hash(cache_salt: str, secret: bytes = b"") -> bytes:
    """Return the hash that serves as parent of a prompt's first KV block.

    It depends on the request's cache salt, so prompts share cached blocks only within one salt.

    Args:
        cache_salt: cache salt of the request.
        secret: as in `chain_hashes`.
    """
    return blake2b(cache_salt.encode(), digest_size=HASH_BYTES, key=secret).digest()


class BlockListener:
    """Base class of objects that are told which blocks enter and leave the prefix cache.

    A block is removed before any step that writes to it is returned by the scheduler.
    """

    def on_added(self, block: int, digest: bytes) -> None:
        """Handle that a block is added with its hash."""

    def on_removed(self, block: int, digest: bytes) -> None:
        """Handle that a block is removed: it may be overwritten from now on."""

    def on_cleared(self) -> None:
        """Handle that all blocks are removed."""


class BlockPoolSnapshot(NamedTuple):
    """Copy of the block pool's state: each block is referenced, cached but evictable, or free."""

    references: dict[int, int]
    """Number of references of each referenced block."""
    evictable: list[int]
    """Cached blocks without a reference; in the order of eviction, if time does not change it."""
    free: list[int]
    """Blocks without a reference and without content; the last one is allocated first."""


class BlockPool:
    """Allocator of the KV blocks 0 .. num_blocks - 1, with reference counts and prefix cache.

    Cached blocks without a reference stay in the prefix cache until they are evicted.
    """

    def __init__(
        self,
        num_blocks: int,
        states: StateCache | None = None,
        eviction: EvictionOrder | None = None,
    ) -> None:
        """Create the pool.

        Args:
            num_blocks: number of blocks.
            states: checkpoints that are removed together with cached blocks; None for a model
                without recurrent layers.
            eviction: order of eviction; None: least recently used first.
        """
        self.now = 0.0
        """Time in seconds, by which blocks are evicted; set by the owner."""
        self.num_blocks = num_blocks
        self.num_free_blocks = num_blocks
        """Number of blocks that can be allocated: free ones and unreferenced cached ones."""
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._evictable = LruEviction() if eviction is None else eviction
        self._states = states
        self.listeners: list[BlockListener] = []
        """Are told which blocks enter and leave the prefix cache."""

    @property
    def digests(self) -> Collection[bytes]:
        """Hashes in the prefix cache."""
        return self._by_hash

    def describe(self) -> BlockPoolSnapshot:
        """Return the present state of all blocks."""
        references = {block: number for block, number in enumerate(self._references) if number}
        return BlockPoolSnapshot(references, list(self._evictable), list(self._free))

    def adopt(self, digests: Mapping[int, bytes]) -> None:
        """Fill the prefix cache of a new pool with blocks that an earlier pool has published.

        Nothing is known of their order of use: the ones with the smallest numbers are evicted
        first, unless `refresh` is called for them.

        Args:
            digests: hash by block; the memory of the block has the keys and values of its tokens.

        Raises:
            ValueError: the pool is in use, a block does not exist, or two have the same hash.
        """
        if self.num_free_blocks != self.num_blocks or self._by_hash:
            raise ValueError("only a pool without blocks in use can adopt others")
        if digests and not 0 <= min(digests) <= max(digests) < self.num_blocks:
            raise ValueError(f"a block is not one of the {self.num_blocks} of the pool")
        by_hash = {digest: block for block, digest in digests.items()}
        if len(by_hash) != len(digests):
            raise ValueError("two blocks have the same hash")
        self._by_hash = by_hash
        for block, digest in sorted(digests.items()):
            self._hashes[block] = digest
            self._evictable.on_published(block, digest, None, 0)
            self._evictable.add(block, None)
            for listener in self.listeners:
                listener.on_added(block, digest)
        self._free = [block for block in self._free if block not in digests]

    def refresh(self, blocks: Sequence[int]) -> None:
        """Make unreferenced blocks of a chain the last ones to be evicted, its first block last."""
        for block in reversed(blocks):
            if block in self._evictable:
                self._evictable.discard(block)
                self._evictable.add(block, None)

    def allocate(self, num_blocks: int) -> list[int]:
        """Allocate blocks, each with one reference; the caller has checked `num_free_blocks`."""
        self.num_free_blocks -= num_blocks
        if num_blocks == 1:
            return [self._allocate_block()]
        return [self._allocate_block() for _ in range(num_blocks)]

    def add_references(self, blocks: Sequence[int]) -> None:
        """Add one reference to each of these cached or referenced blocks."""
        for block in blocks:
            if not self._references[block]:
                self._evictable.discard(block)
                self.num_free_blocks -= 1
            self._references[block] += 1

    def release(self, blocks: Sequence[int], owner: int | None = None) -> None:
        """Remove one reference from each block of a block table.

        The table's last blocks become evictable before its first, so that the rest of a cached
        chain always stays reachable from its root.

        Args:
            blocks: the block table.
            owner: id of its sequence; None if unknown.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            self.num_free_blocks += 1
            if self._hashes[block] is None:
                self._free.append(block)
            else:
                self._evictable.add(block, owner)

    def publish(
        self, block: int, digest: bytes, parent: bytes | None = None, position: int = 0
    ) -> bool:
        """Add a computed, referenced block to the prefix cache unless its hash is there already.

        Args:
            block: the block.
            digest: its hash.
            parent: hash of the block before it; None for the first one of a prompt.
            position: tokens before it.

        Returns:
            True if the block was added.
        """
        if self._hashes[block] is not None or digest in self._by_hash:
            return False
        self._hashes[block] = digest
        self._by_hash[digest] = block
        self._evictable.on_published(block, digest, parent, position)
        for listener in self.listeners:
            listener.on_added(block, digest)
        return True

    def unpublish(self, blocks: Sequence[int]) -> None:
        """Remove referenced blocks from the prefix cache; they are free once released."""
        for block in blocks:
            digest = self._hashes[block]
            if digest is not None:
                self._hashes[block] = None
                self._remove_digest(block, digest)

    def reset_prefix_cache(self) -> None:
        """Remove all blocks from the prefix cache; referenced blocks keep their references."""
        self._free += reversed(list(self._evictable))
        self._evictable.clear()
        self._by_hash.clear()
        self._hashes = [None] * self.num_blocks
        if self._states is not None:
            self._states.clear()
        for listener in self.listeners:
            listener.on_cleared()

    def find_cached_blocks(self, digests: Sequence[bytes]) -> list[int]:
        """Return the cached blocks of the longest prefix of a hash chain, without references."""
        blocks = []
        for digest in digests:
            block = self._by_hash.get(digest)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def count_unreferenced(self, blocks: Sequence[int]) -> int:
        """Count the blocks without a reference; referencing them lowers `num_free_blocks`."""
        return sum(block in self._evictable for block in blocks)

    def count_exclusive(self, blocks: Sequence[int]) -> int:
        """Count the blocks with exactly one reference; releasing them makes them allocatable."""
        return sum(self._references[block] == 1 for block in blocks)

    def count_released(self, tables: Iterable[Sequence[int]]) -> int:
        """Count the blocks that become allocatable once all of these block tables are released."""
        counts = Counter(chain.from_iterable(tables))
        return sum(self._references[block] == count for block, count in counts.items())

    def _allocate_block(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block = self._evictable.pop(self.now)
            digest = self._hashes[block]
            assert digest is not None
            self._hashes[block] = None
            self._remove_digest(block, digest)
        self._references[block] = 1
        return block

    def _remove_digest(self, block: int, digest: bytes) -> None:
        del self._by_hash[digest]
        self._evictable.on_removed(block)
        if self._states is not None:
            self._states.remove(digest)
        for listener in self.listeners:
            listener.on_removed(block, digest)
