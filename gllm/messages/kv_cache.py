"""Messages about the prefix cache of an engine.

They travel from the driver to the head process, and from there to the routers that watch the cache.
"""

from gllm.messages.base import WireMessage
from gllm.scheduler.cache_events import StoredBlocks


class WatchKvCache(WireMessage, frozen=True):
    """Command to report the changes of the prefix cache from now on, beginning with a snapshot."""

    is_on: bool
    """False to end the reports."""
    with_tokens: bool = False
    """True to report the token ids of the blocks, as far as they are known."""


class KvCacheEvents(WireMessage, frozen=True):
    """Net change of the prefix cache since the message before; no hash is stored and removed."""

    number: int
    """0 for the first message to a watcher; counts up by one."""
    stored: list[StoredBlocks]
    removed: list[bytes]
    """Hashes that were removed."""
    is_cleared: bool
    """True if `stored` has all hashes of the cache, as in the first message to a watcher."""
