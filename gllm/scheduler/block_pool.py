"""Blocks of the KV cache: who holds which, and which are worth keeping for others.

Owns the accounting: free, held (reference counted), cached without a holder (evicted least recently
used first). Knows nothing of sequences and of what the blocks contain beyond its hash.
"""

from array import array
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

HASH_BYTES = 16


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """128-bit hash of a full block: of its tokens and, through `parent`, of all before it."""
    return blake2b(parent + array("q", token_ids).tobytes(), digest_size=HASH_BYTES).digest()


def root_hash(cache_salt: str) -> bytes:
    """What the first block of a sequence has for a parent; sequences share within one salt."""
    return blake2b(cache_salt.encode(), digest_size=HASH_BYTES).digest()


class BlockPool:
    """All blocks, by id 0 .. num_blocks - 1."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks - 1, -1, -1))
        self._references = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._by_hash: dict[bytes, int] = {}
        self._evictable: OrderedDict[int, None] = OrderedDict()

    @property
    def available(self) -> int:
        """Blocks that `allocate` can give: free ones and cached ones without a holder."""
        return len(self._free) + len(self._evictable)

    def allocate(self, count: int) -> list[int]:
        """`count` blocks, each with one reference. The caller has checked `available`."""
        return [self._take() for _ in range(count)]

    def share(self, blocks: Sequence[int]) -> None:
        """One more reference to each of these cached or held blocks."""
        for block in blocks:
            self._references[block] += 1
            self._evictable.pop(block, None)

    def release(self, blocks: Sequence[int]) -> None:
        """One reference less to each block of a block table.

        The table's end becomes evictable before its beginning, so that what remains of a cached
        chain can always be reached from its root.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block]:
                continue
            if self._hashes[block] is None:
                self._free.append(block)
            else:
                self._evictable[block] = None

    def publish(self, block: int, digest: bytes) -> None:
        """Offer a held, computed block to others, unless a twin is offered already."""
        if self._hashes[block] is None and digest not in self._by_hash:
            self._hashes[block] = digest
            self._by_hash[digest] = block

    def withdraw(self, blocks: Sequence[int]) -> None:
        """Offer these held blocks to nobody any more; they are free once released."""
        for block in blocks:
            digest = self._hashes[block]
            if digest is not None:
                del self._by_hash[digest]
                self._hashes[block] = None

    def forget(self) -> None:
        """Offer nothing any more; held blocks stay with their holders."""
        self._free += reversed(self._evictable)
        self._evictable.clear()
        self._by_hash.clear()
        self._hashes = [None] * self.num_blocks

    def lookup(self, digests: Sequence[bytes]) -> list[int]:
        """The cached blocks of the longest prefix of a hash chain; `share` them to hold them."""
        found = []
        for digest in digests:
            block = self._by_hash.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def idle(self, blocks: Sequence[int]) -> int:
        """How many of these have no holder, so that sharing them lowers `available`."""
        return sum(block in self._evictable for block in blocks)

    def sole(self, blocks: Sequence[int]) -> int:
        """How many of these would become available if their one holder let go."""
        return sum(self._references[block] == 1 for block in blocks)

    def _take(self) -> int:
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._evictable.popitem(last=False)
            digest = self._hashes[block]
            assert digest is not None
            del self._by_hash[digest]
            self._hashes[block] = None
        self._references[block] = 1
        return block
