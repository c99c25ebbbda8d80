"""Changes of the prefix cache: subscriptions in the head process, and their publication.

The head process stores the hashes of the cached blocks while a subscriber exists, so that each
further subscriber gets a snapshot without another message of the driver. `KvEventPublisher` sends
the events over ZeroMQ in the format of vLLM, for routers of other projects.
"""

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any, cast

import msgspec
import zmq
import zmq.asyncio

from gllm.config.kv_events import KvEventsConfig, is_bound
from gllm.messages.kv_cache import KvCacheEvents, WatchKvCache
from gllm.runtime.messaging.owned_context import create_context
from gllm.scheduler.block_pool import root_hash
from gllm.scheduler.cache_events import StoredBlocks

log = logging.getLogger(__name__)

OnKvCacheEvents = Callable[[KvCacheEvents], None]
"""Function that receives the changes."""

MEDIUM = "GPU"
"""vLLM's name of the cache that the engine computes with; other values are tiers behind it."""
DATA_PARALLEL_RANK = 0
"""An engine has one cache."""
NUMBER_BYTES = 8
"""Size of a batch's number."""
REPLAY_END = (-1).to_bytes(NUMBER_BYTES, "big", signed=True)
"""Number after the last batch of a replay."""
MAX_REQUEST_BYTES = 1024
"""Longest frame of a request for a replay."""
REPLAY_CHUNK = 64
"""Batches of a replay that are sent without a pause."""


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
    """Reports added and removed prefix-cache blocks to subscribers, starting with a snapshot.

    The scheduler's process records changes only while there is a subscriber.
    """

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
        """Number of blocks in the prefix cache; 0 without subscribers."""
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


class BlockStored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """KV-cache event as vLLM publishes it: consecutive blocks of a prompt were cached."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """None if the chain is the beginning of a prompt."""
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str
    lora_name: str | None
    extra_keys: list[list[str] | None]
    """For each block, what its hash covers besides tokens: the salt, in a prompt's first block."""


class BlockRemoved(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """KV-cache event as vLLM publishes it: blocks were evicted from the prefix cache."""

    block_hashes: list[int]
    medium: str


class AllBlocksCleared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """KV-cache event as vLLM publishes it: the prefix cache was emptied."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


def short_hash(digest: bytes) -> int:
    """Return the last 64 bits of a block hash: some subscribers cannot read longer integers."""
    return int.from_bytes(digest[-8:], "big")


def convert_events(message: KvCacheEvents, block_size: int) -> list[KvEvent]:
    """Convert a change of the prefix cache to KV-cache events in vLLM's format.

    Blocks whose token ids are unknown are left out.

    Args:
        message: added and removed blocks, as the driver reports them.
        block_size: tokens per block.
    """
    events: list[KvEvent] = [AllBlocksCleared()] if message.is_cleared else []
    if message.removed:
        events.append(
            BlockRemoved([short_hash(block_hash) for block_hash in message.removed], MEDIUM)
        )
    events += [_convert_stored(blocks, block_size) for blocks in message.stored if blocks.token_ids]
    return events


def _convert_stored(blocks: StoredBlocks, block_size: int) -> BlockStored:
    is_root = blocks.parent == root_hash(blocks.cache_salt)
    extra_keys: list[list[str] | None] = [None] * len(blocks.digests)
    if is_root and blocks.cache_salt:
        extra_keys[0] = [blocks.cache_salt]
    return BlockStored(
        [short_hash(digest) for digest in blocks.digests],
        None if is_root else short_hash(blocks.parent),
        list(blocks.token_ids),
        block_size,
        None,
        MEDIUM,
        None,
        extra_keys,
    )


class KvEventPublisher:
    """Publishes changes of the prefix cache over ZeroMQ, in vLLM's format of KV-cache events.

    Events go out on a PUB socket; a ROUTER socket answers requests for past events.
    """

    def __init__(self, config: KvEventsConfig, block_size: int, source: KvEventSource) -> None:
        """Create a publisher; `start` opens its sockets.

        Args:
            config: configuration with events enabled.
            block_size: tokens per block.
            source: source of the changes.
        """
        self.endpoint = ""
        """Address of the PUB socket, with the port that it is bound to."""
        self.replay_endpoint = ""
        """The same of the ROUTER socket; empty if there is none."""
        self._config = config
        self._block_size = block_size
        self._source = source
        self._topic = config.topic.encode()
        self.num_batches = 0
        """Batches published; the number of the next one."""
        self._buffer: deque[tuple[int, bytes]] = deque(maxlen=config.buffer_steps)
        """Numbers and payloads of the latest batches."""
        self._context = create_context(self)
        self._publisher = self._context.socket(zmq.PUB)
        self._serving: asyncio.Task[None] | None = None
        """Answers requests for replays."""

    def start(self) -> None:
        """Open the sockets and publish all changes from now on, on the running event loop.

        Raises:
            ValueError: an address cannot be used.
        """
        config = self._config
        self._publisher.sndhwm = config.hwm
        # A stranger may send a "subscription" of any size.
        self._publisher.maxmsgsize = MAX_REQUEST_BYTES
        try:
            if is_bound(config.endpoint):
                self.endpoint = _bind(self._publisher, "endpoint", config.endpoint)
            else:
                self.endpoint = config.endpoint
                self._publisher.connect(config.endpoint)
            if config.replay_endpoint is not None:
                replays = self._open_replays(config.replay_endpoint)
                self._serving = asyncio.create_task(self._serve_replays(replays))
        except BaseException:
            self._close()
            raise
        self._source.subscribe(self._publish, with_tokens=True)
        log.info("KV cache events are published on %s", self.endpoint)

    async def stop(self) -> None:
        """Close the sockets; later changes are dropped."""
        if self._serving is not None:
            self._serving.cancel()
            with suppress(asyncio.CancelledError, zmq.ZMQError):
                await self._serving
        self._close()

    def _close(self) -> None:
        self._context.destroy(linger=0)

    def _publish(self, message: KvCacheEvents) -> None:
        """Send a batch with the events of a change, unless it has none."""
        events = convert_events(message, self._block_size)
        if not events or self._context.closed:
            return
        payload = msgspec.msgpack.encode((time.time(), events, DATA_PARALLEL_RANK))
        number = self.num_batches
        self.num_batches += 1
        self._buffer.append((number, payload))
        # A PUB socket never blocks: it drops what a slow subscriber has no room for.
        self._publisher.send_multipart((self._topic, _encode_number(number), payload))

    def _open_replays(self, address: str) -> zmq.asyncio.Socket:
        create_socket: Any = zmq.asyncio.Socket
        socket = cast(zmq.asyncio.Socket, self._context.socket(zmq.ROUTER, create_socket))
        # A client's queue has space for one replay; what exceeds it is dropped.
        socket.sndhwm = self._config.buffer_steps + 1
        socket.maxmsgsize = MAX_REQUEST_BYTES
        self.replay_endpoint = _bind(socket, "replay_endpoint", address)
        return socket

    async def _serve_replays(self, socket: zmq.asyncio.Socket) -> None:
        """Answer requests for replays, one after the other."""
        while True:
            client, *frames = await socket.recv_multipart()
            # A REQ socket sends an empty frame before its number.
            if len(frames) == 2 and not frames[0] and len(frames[1]) == NUMBER_BYTES:
                await self._replay(socket, client, int.from_bytes(frames[1], "big"))
            else:
                log.debug("a request for a replay could not be read")

    async def _replay(self, socket: zmq.asyncio.Socket, client: bytes, first: int) -> None:
        """Send the batches from a number on, as far as they are kept, and the end."""
        batches = [batch for batch in self._buffer if batch[0] >= first]
        for index, (number, payload) in enumerate(batches, 1):
            await socket.send_multipart((client, b"", _encode_number(number), payload))
            if index % REPLAY_CHUNK == 0:
                await asyncio.sleep(0)
        await socket.send_multipart((client, b"", REPLAY_END, b""))


def _encode_number(number: int) -> bytes:
    return number.to_bytes(NUMBER_BYTES, "big")


def _bind(socket: "zmq.Socket[bytes] | zmq.asyncio.Socket", field: str, address: str) -> str:
    """Bind a socket and return its address. Raises ValueError that names the field."""
    # libzmq resolves no names in addresses to bind to.
    resolved = address.replace("//localhost:", "//127.0.0.1:")
    socket.ipv6 = "[" in resolved
    try:
        socket.bind(resolved)
    except zmq.ZMQError as error:
        raise ValueError(
            f"{field} of --kv-events-config: {address} cannot be bound: {error.strerror}"
        ) from error
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)
