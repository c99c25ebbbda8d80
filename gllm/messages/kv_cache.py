"""Messages about the prefix cache of an engine.

They travel from the driver to the head process, and from there to the routers that watch the cache.
"""

from gllm.messages.base import WireMessage
from gllm.scheduler.cache_events import StoredBlocks
from gllm.scheduler.intact_slots import IntactSlots


class WatchKvCache(WireMessage, frozen=True):
    """Command to an engine: report changes of its prefix cache, beginning with its content."""

    is_on: bool
    """False to end the reports."""
    with_tokens: bool = False
    """True to report the token ids of the blocks, as far as they are known."""


class AdoptKvBlocks(WireMessage, frozen=True):
    """Command to a new driver: begin with the KV blocks of the epoch before.

    It comes before the first request, once all workers have their KV caches.
    """

    intact: IntactSlots
    """Slots that are intact on all workers."""


class KvCacheEvents(WireMessage, frozen=True):
    """KV blocks added to and removed from an engine's prefix cache since the previous message.

    No block is both in `stored` and in `removed`.
    """

    number: int
    """Sequence number: 0 for the first message to a receiver."""
    stored: list[StoredBlocks]
    removed: list[bytes]
    """Hashes that were removed."""
    is_cleared: bool
    """True if `stored` has all hashes of the cache, as in the first message to a watcher."""
