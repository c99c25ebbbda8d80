"""Changes of the prefix cache in the head process: from the driver to all who watch.

The source keeps the hashes of the cache while somebody watches, so that each further watcher gets a
snapshot without another message of the driver.
"""

import logging
from collections.abc import Callable

from gllm.messages.kv_cache import KvCacheEvents, WatchKvCache
from gllm.scheduler.cache_events import StoredBlocks

log = logging.getLogger(__name__)

OnKvCacheEvents = Callable[[KvCacheEvents], None]
"""Function that receives the changes."""


class _Watcher:
    """One subscriber and the number of its next message."""

    def __init__(self, on_events: OnKvCacheEvents, with_tokens: bool) -> None:
        self.with_tokens = with_tokens
        self._on_events = on_events
        self._number = 0

    def notify(self, stored: list[StoredBlocks], removed: list[bytes], is_cleared: bool) -> None:
        """Pass a change on, unless a snapshot has to come first.

        Errors of the subscriber are logged, so that the others get the change too.
        """
        if not (self._number or is_cleared):
            return
        message = KvCacheEvents(self._number, stored, removed, is_cleared)
        self._number += 1
        try:
            self._on_events(message)
        except Exception:
            log.exception("a subscriber of KV cache events failed")


class KvEventSource:
    """Subscriptions to the changes of the prefix cache. The driver records none without them."""

    def __init__(self) -> None:
        self._send: Callable[[WatchKvCache], None] | None = None
        """Sends to the driver; None while there is none."""
        self._watchers: dict[_Watcher, None] = {}
        self._digests: dict[bytes, None] = {}
        """Hashes in the cache, if `_is_synced`."""
        self._is_synced = False
        """True once the driver has sent its snapshot."""

    @property
    def num_cached_blocks(self) -> int:
        """Blocks in the prefix cache as far as known: 0 while nobody watches."""
        return len(self._digests)

    def subscribe(
        self, on_events: OnKvCacheEvents, with_tokens: bool = False
    ) -> Callable[[], None]:
        """Watch the prefix cache.

        Args:
            on_events: called with each change. The first one is a snapshot, which may come within
                this call. At the end of an epoch the cache is reported as empty.
            with_tokens: True if changes have the token ids of stored blocks. Those that were stored
                before the first such subscription have none.

        Returns:
            A function that ends the subscription; further calls of it do nothing.
        """
        watcher = _Watcher(on_events, with_tokens)
        is_first = not self._watchers
        lacks_tokens = with_tokens and not any(watcher.with_tokens for watcher in self._watchers)
        if self._is_synced and not lacks_tokens:
            watcher.notify(self._snapshot(), [], True)
        self._watchers[watcher] = None
        if is_first or lacks_tokens:
            self._watch()
        return lambda: self._unsubscribe(watcher)

    def attach(self, send: Callable[[WatchKvCache], None]) -> None:
        """Watch the cache of a new driver, which is empty."""
        self._send = send
        if self._watchers:
            self._watch()

    def detach(self) -> None:
        """Report the cache as empty, because its driver has ended."""
        self._send = None
        if self._is_synced:
            self._forget()
            for watcher in list(self._watchers):
                watcher.notify([], [], True)

    def on_events(self, message: KvCacheEvents) -> None:
        """Pass a report of the driver on; reports before its snapshot are dropped."""
        if not self._watchers or self._send is None or not (self._is_synced or message.is_cleared):
            return
        self._is_synced = True
        if message.is_cleared:
            self._digests.clear()
        for digest in message.removed:
            self._digests.pop(digest, None)
        for blocks in message.stored:
            self._digests.update(dict.fromkeys(blocks.digests))
        bare = [blocks._replace(token_ids=()) for blocks in message.stored]
        for watcher in list(self._watchers):
            stored = message.stored if watcher.with_tokens else bare
            watcher.notify(stored, message.removed, message.is_cleared)

    def _unsubscribe(self, watcher: _Watcher) -> None:
        if watcher not in self._watchers:
            return
        del self._watchers[watcher]
        if not self._watchers:
            self._forget()
            if self._send is not None:
                self._send(WatchKvCache(False))

    def _watch(self) -> None:
        """Let the driver send a snapshot and all later changes."""
        if self._send is not None:
            with_tokens = any(watcher.with_tokens for watcher in self._watchers)
            self._send(WatchKvCache(True, with_tokens))

    def _forget(self) -> None:
        self._digests.clear()
        self._is_synced = False

    def _snapshot(self) -> list[StoredBlocks]:
        return [StoredBlocks(b"", list(self._digests))] if self._digests else []
