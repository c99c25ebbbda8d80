"""Changes of an engine's prefix cache, as a router applies them to its index."""

from gllm.messages.kv_cache import KvCacheEvents, WatchKvCache
from gllm.routing.prefix_index import PrefixIndex
from gllm.runtime.messaging.engine_link import EngineLink


def apply_kv_events(prefixes: PrefixIndex, link: EngineLink, events: KvCacheEvents) -> None:
    """Apply events to the index; request a snapshot if some are missing."""
    stored = [digest for blocks in events.stored for digest in blocks.digests]
    is_current = prefixes.on_events(
        link.name, events.number, stored, events.removed, events.is_cleared
    )
    if not is_current:
        link.send(WatchKvCache(True))
