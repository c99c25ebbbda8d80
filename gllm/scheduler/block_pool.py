"""Block pool of the KV cache: free, referenced and cached blocks.

A block is free, referenced by sequences, or cached without a reference. Cached blocks without a
reference are evicted in an order of gllm.scheduler.eviction.
"""

from array import array
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from hashlib import blake2b
from itertools import chain
from types import MappingProxyType
from typing import NamedTuple

from gllm.scheduler.eviction import EvictionOrder, LruEviction
from gllm.scheduler.state_slots import StateCache

HASH_BYTES = 16
"""Size of a block hash in bytes."""
TOKEN_TYPE = "q"
"""Type code of arrays of token ids."""
NO_TAILS: Mapping[int, bytes] = MappingProxyType({})


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Return the 128-bit prefix-cache hash of tokens of a KV block and all tokens before it.

    Args:
        parent: hash of the previous block, or `root_hash` for the first block.
        token_ids: tokens of the block, or its first ones.
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
    """Base class of objects that are notified which blocks enter and leave the prefix cache.

    A block is removed before any step that writes to it is returned by the scheduler.
    """

    def on_added(self, block: int, digest: bytes) -> None:
        """Handle that a block is added with its hash."""

    def on_removed(self, block: int, digest: bytes) -> None:
        """Handle that a block is removed: it may be overwritten from now on."""

    def on_tail(self, block: int, digest: bytes) -> None:
        """Handle that the first slots of a block have a hash; a later one covers more of them."""

    def on_tail_removed(self, block: int) -> None:
        """Handle that the first slots of a block have no hash any more: they may be overwritten."""

    def on_cleared(self) -> None:
        """Handle that all blocks are removed, and all hashes of first slots."""


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
        """Objects that are notified which blocks enter and leave the prefix cache."""
        self._tails: set[int] = set()
        """Blocks without a hash whose first slots have one, for the recovery from a death."""
        self._adopted_tails: dict[bytes, int] = {}
        """Free blocks whose first slots an earlier pool has named, by their hashes."""

    @property
    def digests(self) -> Collection[bytes]:
        """Hashes in the prefix cache."""
        return self._by_hash

    def describe(self) -> BlockPoolSnapshot:
        """Return the present state of all blocks."""
        references = {block: number for block, number in enumerate(self._references) if number}
        free = [*self._adopted_tails.values(), *self._free]
        return BlockPoolSnapshot(references, list(self._evictable), free)

    def adopt(self, digests: Mapping[int, bytes], tails: Mapping[int, bytes] = NO_TAILS) -> None:
        """Fill the prefix cache of a new pool with blocks that an earlier pool has published.

        Nothing is known of their order of use: the ones with the smallest numbers are evicted
        first, unless `refresh` is called for them.

        Args:
            digests: hash by block; the memory of the block has the keys and values of its tokens.
            tails: hash of the first slots of other blocks; see `pop_tail`.

        Raises:
            ValueError: the pool is in use, a block does not exist or is listed twice, or two have
                the same hash.
        """
        if self.num_free_blocks != self.num_blocks or self._by_hash:
            raise ValueError("only a pool without blocks in use can adopt others")
        named = digests.keys() | tails.keys()
        if named and not 0 <= min(named) <= max(named) < self.num_blocks:
            raise ValueError(f"a block is not one of the {self.num_blocks} of the pool")
        by_hash = {digest: block for block, digest in digests.items()}
        self._adopted_tails = {digest: block for block, digest in tails.items()}
        if len(by_hash) + len(self._adopted_tails) != len(digests) + len(tails):
            raise ValueError("two blocks have the same hash")
        if len(named) != len(digests) + len(tails):
            raise ValueError("a block is listed twice")
        self._by_hash = by_hash
        for block, digest in sorted(digests.items()):
            self._hashes[block] = digest
            self._evictable.on_published(block, digest, None, 0)
            self._evictable.add(block, None)
            for listener in self.listeners:
                listener.on_added(block, digest)
        for block, digest in tails.items():
            self.name_tail(block, digest)
        self._free = [block for block in self._free if block not in named]

    def pop_tail(self, digest: bytes) -> int | None:
        """Allocate the adopted block whose first slots have a hash; None if there is none.

        The block is the caller's alone, who goes on to write behind these slots.
        """
        block = self._adopted_tails.pop(digest, None)
        if block is not None:
            self.num_free_blocks -= 1
            self._references[block] = 1
        return block

    def name_tail(self, block: int, digest: bytes) -> None:
        """Name the first slots of a block that its sequence alone has, for a later pool.

        Args:
            block: without a hash of its own.
            digest: hash of the tokens of these slots, and of all before them.
        """
        if self._hashes[block] is None:
            self._tails.add(block)
            for listener in self.listeners:
                listener.on_tail(block, digest)

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
        self._tails.discard(block)
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
            elif block in self._tails:
                self._remove_tail(block)

    def reset_prefix_cache(self) -> None:
        """Remove all blocks from the prefix cache; referenced blocks keep their references."""
        self._free += reversed(list(self._evictable))
        self._evictable.clear()
        self._by_hash.clear()
        self._hashes = [None] * self.num_blocks
        self._free += self._adopted_tails.values()
        self._adopted_tails.clear()
        self._tails.clear()
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
        elif self._adopted_tails:
            _, block = self._adopted_tails.popitem()
        else:
            block = self._evictable.pop(self.now)
            digest = self._hashes[block]
            assert digest is not None
            self._hashes[block] = None
            self._remove_digest(block, digest)
        if block in self._tails:
            self._remove_tail(block)
        self._references[block] = 1
        return block

    def _remove_tail(self, block: int) -> None:
        """Remove the hash of a block's first slots."""
        self._tails.discard(block)
        for listener in self.listeners:
            listener.on_tail_removed(block)

    def _remove_digest(self, block: int, digest: bytes) -> None:
        del self._by_hash[digest]
        self._evictable.on_removed(block)
        if self._states is not None:
            self._states.remove(digest)
        for listener in self.listeners:
            listener.on_removed(block, digest)
