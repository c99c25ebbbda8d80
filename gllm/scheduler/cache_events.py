"""Events of the prefix cache: which block hashes were added and removed, for routers.

They are recorded only while somebody watches the cache.
"""

from collections.abc import Iterable
from typing import NamedTuple

from gllm.scheduler.block_pool import BlockListener


class StoredBlocks(NamedTuple):
    """Consecutive KV blocks added to the prefix cache: their hashes and, on request, tokens."""

    parent: bytes
    """Hash of the block before the first one, or the root hash of the salt. Empty if unknown: the
    blocks are then unrelated to each other, without token ids and salt."""
    digests: list[bytes]
    """Hashes of the blocks."""
    token_ids: tuple[int, ...] = ()
    """Tokens of all blocks, if the subscriber of the events has asked for them."""
    cache_salt: str = ""
    """Cache salt of the request; prompts share blocks only within one salt."""


class CacheEvents(NamedTuple):
    """KV blocks added to and removed from the prefix cache since the previous report.

    Reports go to routers. No block is both in `stored` and in `removed`.
    """

    stored: list[StoredBlocks]
    removed: list[bytes]
    """Hashes of the blocks that were removed."""
    is_cleared: bool
    """True if the cache was empty before `stored` was added."""


class _Block(NamedTuple):
    """A stored block that has not been reported."""

    parent: bytes
    token_ids: tuple[int, ...]
    cache_salt: str


_UNKNOWN = _Block(b"", (), "")
"""Marker of a block from before `watch`, with unknown tokens."""


class CacheEventLog(BlockListener):
    """Collects KV blocks added to and removed from the prefix cache, until the next report.

    Reports go to routers. The first one contains the whole cache.
    """

    def __init__(self, with_token_ids: bool, cached: Iterable[bytes]) -> None:
        """Begin to watch the cache.

        Args:
            with_token_ids: True if reports have the token ids of the blocks.
            cached: hashes in the cache now.
        """
        self.with_token_ids = with_token_ids
        self._stored = dict.fromkeys(cached, _UNKNOWN)
        self._removed: dict[bytes, None] = {}
        self._is_cleared = True

    def on_stored(
        self, digest: bytes, parent: bytes, token_ids: tuple[int, ...], cache_salt: str
    ) -> None:
        """Record that a block was added."""
        if digest in self._removed:
            # Its content is the same: nothing has changed since the last report.
            del self._removed[digest]
        else:
            self._stored[digest] = _Block(parent, token_ids, cache_salt)

    def on_removed(self, block: int, digest: bytes) -> None:
        """Record that a block was removed."""
        if self._stored.pop(digest, None) is None:
            self._removed[digest] = None

    def on_cleared(self) -> None:
        """Record that the cache was emptied."""
        self._stored.clear()
        self._removed.clear()
        self._is_cleared = True

    def pop_events(self) -> CacheEvents | None:
        """Return the changes since the last call; None if there are none."""
        if not (self._stored or self._removed or self._is_cleared):
            return None
        events = CacheEvents(join_chains(self._stored), list(self._removed), self._is_cleared)
        self._stored, self._removed, self._is_cleared = {}, {}, False
        return events


def join_chains(blocks: dict[bytes, _Block]) -> list[StoredBlocks]:
    """Group blocks that were added to the prefix cache into runs of consecutive blocks.

    Args:
        blocks: by hash in the order of addition: hash of the previous block, token ids and cache
            salt.
    """
    chains: list[tuple[StoredBlocks, list[int]]] = []
    for digest, (parent, tokens, cache_salt) in blocks.items():
        last = chains[-1][0] if chains else None
        # Blocks with unknown parents are joined with each other alone.
        if last is None or parent != (last.digests[-1] if last.parent else b""):
            chains.append((StoredBlocks(parent, [digest], (), cache_salt), [*tokens]))
        else:
            last.digests.append(digest)
            chains[-1][1].extend(tokens)
    return [chain._replace(token_ids=tuple(token_ids)) for chain, token_ids in chains]
