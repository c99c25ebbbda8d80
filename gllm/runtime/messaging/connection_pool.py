"""Sessions of a process with its peers: those that dialled its hub, and those that it dials.

Routers and engines use it, so either end may dial the other. A peer that is silent for too long is
lost. `Discovery` resolves the addresses to dial.
"""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Protocol

import zmq

from gllm.config.router import RouterConfig
from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage
from gllm.messages.lifecycle import Hello
from gllm.options.addresses import (
    Resolve,
    format_host_port,
    parse_host_port,
    parse_ip_address,
    resolve_host,
)
from gllm.recovery.backoff import REFUSED_SECONDS, Backoff, FailureLog
from gllm.routing.disaggregation.policy import DecodeChoice
from gllm.runtime.messaging.bus import UNREACHABLE, Hub, Spoke
from gllm.runtime.messaging.bus_socket import Decode
from gllm.runtime.messaging.owned_context import create_context
from gllm.runtime.messaging.security import (
    RELOAD_SECONDS,
    Authenticator,
    SecretFile,
    check_dialed_address,
    check_hub_address,
)

log = logging.getLogger(__name__)

RUN = 0
"""Run in the headers of the frames: greetings and announcements carry the peers' own."""
MAX_SOCKETS = 8192
"""Most sockets of ZeroMQ; its default is enough for about 300 dialled peers."""
MAX_BEAT_SECONDS = 1.0
"""Longest time between two heartbeats."""
BEATS_PER_TIMEOUT = 5
"""Fewest heartbeats in the time after which a silent peer is lost."""

DNS = "dns:"
"""Prefix of a name with one record per peer, such as a headless service of Kubernetes."""

RESOLVE_SECONDS = 5.0
"""Time between two resolutions of a name with several addresses."""


@dataclass(frozen=True)
class FleetLinkConfig:
    """Options of the connections between routers and engines: addresses, node secret, timeouts."""

    hub: str | None = None
    """Address to listen on, PORT or HOST:PORT; None to accept no connections."""
    dial: tuple[str, ...] = ()
    """Addresses to connect to: HOST:PORT, or an entry that `Discovery` resolves to several."""
    node_secret_file: str | None = None
    """File of the secret that all members share; None without encryption, on loopback only."""
    peer_timeout: float = 5.0
    """Seconds of silence after which a peer is lost."""
    max_guests: int = 256
    """Largest number of accepted connections at a time."""
    resolve_seconds: float = RESOLVE_SECONDS
    """Interval at which the names of peers are resolved again."""
    reload_seconds: float = RELOAD_SECONDS
    """Interval at which the secret file is read again."""
    refused_seconds: float = REFUSED_SECONDS
    """Delay before a peer that refused a session is dialled again."""
    needs_first_chunks: bool = False
    """True for a router that has to receive FirstChunkComputed."""


def make_router_links(config: RouterConfig) -> FleetLinkConfig:
    """Return the options of a router's connections to engines, from the router's configuration."""
    return FleetLinkConfig(
        hub=None if config.hub == "off" else config.hub,
        dial=config.engines,
        node_secret_file=config.node_secret_file,
        peer_timeout=config.engine_timeout,
        max_guests=config.max_engines,
        needs_first_chunks=config.decode_choice == DecodeChoice.FIRST_CHUNK.value,
    )


def parse_hub_address(text: str, has_secret: bool) -> str:
    """Return the ZeroMQ address to listen on for PORT or HOST:PORT.

    Args:
        text: PORT or HOST:PORT. A port alone is bound on all interfaces if there is a secret, else
            on loopback. Port 0 picks a free one.
        has_secret: True if connections are encrypted.

    Raises:
        ValueError: the text is neither.
    """
    if text.isascii() and text.isdigit() and int(text) < 2**16:
        return f"tcp://{'*' if has_secret else '127.0.0.1'}:{int(text)}"
    if text.endswith(":0"):
        host, _ = parse_host_port(text[:-1] + "1")
        return f"tcp://{format_host_port(host, 0)}"
    try:
        host, port = parse_host_port(text)
    except ValueError:
        raise ValueError(f"the hub {text!r} is neither a PORT nor HOST:PORT") from None
    return f"tcp://{format_host_port(host, port)}"


MAX_NAME_LENGTH = 200
"""Most characters of the name of an engine or router."""


def new_run() -> int:
    """Return a random number by which peers tell two starts of a process apart."""
    return secrets.randbits(62)


def is_valid_name(name: str) -> bool:
    """Return True if the name of an engine or router is safe to show in logs and metrics."""
    return 0 < len(name) <= MAX_NAME_LENGTH and name.isprintable()


def default_engine_name() -> str:
    """Return the name of an engine without a configured one: host name and process id."""
    return f"{socket.gethostname()}-{os.getpid()}"


class Discovery:
    """Resolves an entry of --router or --engines to addresses and reports changes of them.

    The entry is HOST:PORT, or dns:NAME:PORT for all addresses of a name.
    """

    def __init__(
        self, entry: str, resolve: Resolve = resolve_host, resolve_seconds: float = RESOLVE_SECONDS
    ) -> None:
        """Create the discovery of HOST:PORT, or of dns:NAME:PORT for all addresses of a name.

        Args:
            entry: entry of --router or --engines.
            resolve: resolution of host names.
            resolve_seconds: interval at which a name with several addresses is resolved again.

        Raises:
            ValueError: the entry is neither.
        """
        # A host may have the name `dns`.
        self.has_many = entry.startswith(DNS) and ":" in entry.removeprefix(DNS)
        """True for all addresses of a name."""
        self._host, self._port = parse_host_port(entry.removeprefix(DNS * self.has_many))
        self.target = format_host_port(self._host, self._port)
        """HOST:PORT of the entry, before its host is resolved."""
        self.failure = ""
        """Cause for which a name with several addresses is not resolved; empty if it is."""
        self._resolve = resolve
        self._resolve_seconds = resolve_seconds

    async def watch(self, on_change: Callable[[frozenset[str]], None]) -> None:
        """Report the addresses, HOST:PORT, as soon as they are known and when they change.

        Returns at once for a single address, whose name is resolved whenever it is dialled. Else it
        runs until it is cancelled; while the name cannot be resolved, its last addresses stay.
        """
        if not self.has_many:
            on_change(frozenset((self.target,)))
            return
        known: frozenset[str] | None = None
        while True:
            try:
                addresses = frozenset(await self._resolve(self._host, self._port))
            except OSError as error:
                if not self.failure:
                    log.warning("%s cannot be resolved: %s; trying again", self._host, error)
                self.failure = f"it cannot be resolved: {error}"
            else:
                self.failure = ""
                if addresses != known:
                    known = addresses
                    on_change(addresses)
            await asyncio.sleep(self._resolve_seconds)


class PeerConnection:
    """Session with one router or engine, opened by either end; it ends once and is not reopened."""

    def __init__(self, address: str, send: Callable[[WireMessage], None], now: float) -> None:
        """Create a session that has just begun.

        Args:
            address: address of the peer, for logs.
            send: queues a message.
            now: time in seconds.
        """
        self.address = address
        self.last_heard = now
        """Time of the peer's last message; of the beginning before the first one."""
        self.is_open = True
        self.is_established = False
        """Set by the handler once both ends have accepted each other."""
        self.is_dialed = False
        """True if this process dialled, so that `address` is where the peer listens."""
        self._send = send

    def send(self, message: WireMessage) -> None:
        """Queue a message; it is dropped if the session has ended."""
        if self.is_open:
            self._send(message)


class PeerHandler(Protocol):
    """Callbacks of a `ConnectionPool`: start, messages and end of sessions, and heartbeats."""

    def on_connected(self, connection: PeerConnection) -> None:
        """Handle a new session; messages can be sent, although the peer may be unreachable."""

    def on_message(self, connection: PeerConnection, message: AnyMessage) -> None:
        """Handle a message of a peer; an exception ends the session."""

    def on_lost(self, connection: PeerConnection, cause: str) -> None:
        """Handle a session that the peer or the connection has ended."""

    def on_listener_gone(self, address: str) -> None:
        """Handle that nothing listens any more at an address that was dialled with success."""

    def on_tick(self) -> None:
        """Send heartbeats."""


PROBE_SECONDS = 1.0
"""Time limit of the connection that tells a refusal from an unreachable host."""


async def refuses_connections(address: str) -> bool:
    """Return True if a host is reachable and refuses connections to HOST:PORT."""
    host, port = parse_host_port(address)
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            _, writer = await asyncio.open_connection(host, port)
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    writer.close()
    return False


LOG_SECONDS = 60.0
"""Time between two log lines about a peer that cannot be reached for the same cause."""


Dial = Callable[[str, int, Callable[[str, bool], None]], PeerConnection]
"""Begins a session with a numeric HOST:PORT after a number of failures in a row; calls the function
when it ends, with the cause and whether one end refused it."""


class Dialer:
    """Keeps a connection to one address open: reconnects after each loss, with growing delays."""

    def __init__(
        self,
        address: str,
        dial: Dial,
        resolve: Resolve,
        backoff: Backoff,
        on_listener_gone: Callable[[str], None],
    ) -> None:
        """Create a dialer that has not started.

        Args:
            address: HOST:PORT; the host is resolved before each attempt.
            dial: begins a session.
            resolve: resolution of host names.
            backoff: delays between the attempts.
            on_listener_gone: called with an address at which a peer has listened and none does now.
        """
        self._address = address
        self._on_listener_gone = on_listener_gone
        self._peer = ""
        """Numeric address of the latest established session; empty once it has refused another."""
        self._host, self._port = parse_host_port(address)
        self._dial = dial
        self._resolve = resolve
        self._backoff = backoff
        self.should_dial = True
        """False to dial no more once the session has ended."""
        self.failure = ""
        """Cause of the end of the latest session or attempt."""
        self._num_failures = 0
        """Attempts since the last session that was established."""
        self._failures = FailureLog(LOG_SECONDS)
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begin to dial, on the running event loop."""
        self._task = asyncio.create_task(self._run())

    @property
    def has_ended(self) -> bool:
        """True if this dialer does not dial any more."""
        return self._task is None or self._task.done()

    async def stop(self) -> None:
        """Stop dialing; an open session continues."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        while self.should_dial:
            connection, cause, has_refused = await self._attempt()
            self.failure = cause
            if connection is not None and connection.is_established:
                self._backoff.reset()
                self._num_failures = 0
                self._failures.reset()
                self._peer = connection.address
            else:
                self._num_failures += 1
                if not has_refused:
                    self._log_failure(cause)
                is_unreachable = cause == UNREACHABLE and self._peer != ""
                if is_unreachable and await refuses_connections(self._peer):
                    self._on_listener_gone(self._peer)
                    self._peer = ""
            if self.should_dial:
                backoff = self._backoff
                delay = backoff.refused_delay() if has_refused else backoff.next_delay()
                await asyncio.sleep(delay)

    async def _attempt(self) -> tuple[PeerConnection | None, str, bool]:
        """Dial once and wait until the session ends; return it, the cause, whether it was refused.

        There is none if the address cannot be used.
        """
        ended: asyncio.Future[tuple[str, bool]] = asyncio.get_running_loop().create_future()

        def on_end(cause: str, is_refused: bool) -> None:
            if not ended.done():
                ended.set_result((cause, is_refused))

        try:
            addresses = await self._resolve(self._host, self._port)
            # A host with several addresses may listen on one of them only.
            address = addresses[self._num_failures % len(addresses)]
            connection = self._dial(address, self._num_failures // len(addresses), on_end)
        except (OSError, ValueError) as error:
            return None, str(error), False
        cause, is_refused = await ended
        return connection, cause, is_refused

    def _log_failure(self, cause: str) -> None:
        """Log that there is no session: another cause at once, the same one now and then."""
        is_due = self._failures.is_due(cause, time.monotonic())
        level = logging.WARNING if is_due else logging.DEBUG
        log.log(level, "no session with %s: %s; trying again", self._address, cause)


class ConnectionPool:
    """All sessions of a router with engines, or of an engine with routers.

    It accepts connections and opens those to configured addresses, sends heartbeats, and ends
    sessions that are silent for too long.
    """

    def __init__(
        self,
        config: FleetLinkConfig,
        decode: Decode,
        handler: PeerHandler,
        resolve: Resolve = resolve_host,
    ) -> None:
        """Create a pool that has not started.

        Args:
            config: addresses and limits.
            decode: decoder of the messages that the peers may send.
            handler: owner of the sessions.
            resolve: resolution of host names.

        Raises:
            ValueError: an address or the secret cannot be used; the message says what to do.
        """
        self._config = config
        self._decode = decode
        self._handler = handler
        self._resolve = resolve
        path = config.node_secret_file
        self._secret = None if path is None else SecretFile(path)
        self._bind_address = ""
        """Address that the hub binds; empty for no hub."""
        if config.hub is not None:
            self._bind_address = parse_hub_address(config.hub, self._secret is not None)
            check_hub_address(self._bind_address, self._secret is not None)
        self._discoveries = [
            Discovery(entry, resolve, config.resolve_seconds) for entry in config.dial
        ]
        for discovery in self._discoveries:
            # Each address is checked again once it is known.
            check_dialed_address(f"tcp://{discovery.target}", self._secret is not None)
        self._rng = Random(secrets.randbits(64))
        self._beat_seconds = min(MAX_BEAT_SECONDS, config.peer_timeout / BEATS_PER_TIMEOUT)
        self.hub_address = ""
        """Address that the hub is bound to, once the pool has started."""
        self._context: zmq.Context[zmq.Socket[bytes]] | None = None
        self._hub: Hub | None = None
        self._guests: dict[int, PeerConnection] = {}
        """Sessions of the hub by sender."""
        self._closers: dict[PeerConnection, Callable[[str, bool], None]] = {}
        """Functions that end the open sessions, given the cause and whether a peer refused."""
        self._found: list[frozenset[str]] = [frozenset()] * len(self._discoveries)
        """Addresses to dial, by discovery."""
        self._dialers: dict[str, Dialer] = {}
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def dialed_addresses(self) -> list[str]:
        """Addresses that are dialled; a removed address counts until its session has ended."""
        return [address for address, dialer in self._dialers.items() if not dialer.has_ended]

    @property
    def failures(self) -> dict[str, str]:
        """Causes of the latest ends of sessions by address, and of names without addresses."""
        failures = {each.target: each.failure for each in self._discoveries if each.failure}
        dialers = self._dialers.items()
        return failures | {address: each.failure for address, each in dialers if each.failure}

    @property
    def num_refused(self) -> int:
        """Number of refused sessions: without the node secret, or above the limit."""
        return 0 if self._hub is None else self._hub.refused.num_refused

    async def start(self) -> None:
        """Bind the hub and begin to dial.

        Raises:
            OSError: the hub's address cannot be bound.
        """
        self._context = create_context(self)
        # A session has three: its own and two for the events of its connection.
        self._context.set(zmq.MAX_SOCKETS, MAX_SOCKETS)
        if self._bind_address:
            authenticator = None
            if self._secret is not None:
                authenticator = Authenticator(
                    self._context, self._secret, self._config.reload_seconds
                )
            hub = Hub(self._context, RUN, self._decode, authenticator, self._config.max_guests)
            self._hub = hub
            try:
                self.hub_address = hub.bind(await self._resolve_hub())
            except (zmq.ZMQError, OSError) as error:
                await self.stop()
                text = f"the hub cannot listen on {self._bind_address}: {error.strerror}"
                raise OSError(error.errno, text) from error
            hub.start(self._on_hub_messages, self._on_guest_lost)
        self._tasks.append(asyncio.create_task(self._tick()))
        for index, discovery in enumerate(self._discoveries):
            watch = discovery.watch(partial(self._on_found, index))
            self._tasks.append(asyncio.create_task(watch))

    async def _resolve_hub(self) -> str:
        """Return the hub's address with a numeric host, because ZeroMQ binds no other.

        Raises:
            OSError: the host name cannot be resolved; the text names it.
        """
        host, _, port = self._bind_address.removeprefix("tcp://").rpartition(":")
        if host == "*" or parse_ip_address(host.strip("[]")) is not None:
            return self._bind_address
        try:
            # Any port does for the look-up; 0 is bound to a free one.
            found = await self._resolve(host, int(port) or 1)
        except OSError as error:
            cause = f"the host name {host!r} cannot be resolved: {error.strerror or error}"
            raise OSError(error.errno, cause) from error
        return f"tcp://{found[0].rpartition(':')[0]}:{port}"

    async def stop(self) -> None:
        """End all sessions, without calls of the handler."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await asyncio.gather(*(dialer.stop() for dialer in self._dialers.values()))
        self._tasks.clear()
        self._dialers.clear()
        for connection in list(self._closers):
            self.close(connection, "this process ends")
        if self._hub is not None:
            self._hub.close()
            self._hub = None
        if self._context is not None:
            # Closed sockets may still send what is queued, for half a second.
            await asyncio.to_thread(self._context.term)
            self._context = None

    def close(self, connection: PeerConnection, cause: str, is_refused: bool = False) -> None:
        """End a session, after the messages that are queued.

        Args:
            connection: the session.
            cause: cause, for logs.
            is_refused: an end refused the session, so that the next attempt may wait.
        """
        if close := self._closers.pop(connection, None):
            connection.is_open = False
            close(cause, is_refused)

    def _lose(self, connection: PeerConnection, cause: str) -> None:
        """End a session and notify the handler."""
        if connection in self._closers:
            self.close(connection, cause)
            self._handler.on_lost(connection, cause)

    def _begin(self, connection: PeerConnection, close: Callable[[str, bool], None]) -> None:
        self._closers[connection] = close
        self._handler.on_connected(connection)

    def _deliver(self, connection: PeerConnection, messages: Iterable[AnyMessage]) -> None:
        """Pass messages to the handler, as long as the session has not ended."""
        for message in messages:
            if not connection.is_open:
                return
            connection.last_heard = time.monotonic()
            try:
                self._handler.on_message(connection, message)
            except Exception as error:
                log.exception("a message of %s could not be handled", connection.address)
                self._lose(connection, f"a message could not be handled: {error}")

    def _on_hub_messages(self, messages: list[tuple[int, AnyMessage]]) -> None:
        for sender, message in messages:
            if isinstance(message, Hello):
                self._begin_guest(sender)
            elif connection := self._guests.get(sender):
                self._deliver(connection, (message,))

    def _begin_guest(self, sender: int) -> None:
        hub = self._hub
        assert hub is not None

        def close(cause: str, is_refused: bool) -> None:
            del self._guests[sender]
            hub.forget(sender)

        send = partial(hub.send, sender)
        connection = PeerConnection(hub.address_of(sender), send, time.monotonic())
        self._guests[sender] = connection
        self._begin(connection, close)

    def _on_guest_lost(self, sender: int, cause: str) -> None:
        if connection := self._guests.get(sender):
            self._lose(connection, cause)

    def _on_found(self, index: int, found: frozenset[str]) -> None:
        """Dial addresses that are new, and no longer redial those that are gone."""
        self._found[index] = found
        addresses = frozenset().union(*self._found)
        # A session of an address that is gone goes on: heartbeats decide who is lost, not names.
        for address, dialer in list(self._dialers.items()):
            dialer.should_dial = address in addresses
            if dialer.has_ended:
                del self._dialers[address]
        for address in addresses:
            if address not in self._dialers:
                backoff = Backoff(self._rng, self._config.refused_seconds)
                dialer = Dialer(
                    address, self._dial, self._resolve, backoff, self._handler.on_listener_gone
                )
                self._dialers[address] = dialer
                dialer.start()

    def _dial(
        self, address: str, num_failures: int, on_end: Callable[[str, bool], None]
    ) -> PeerConnection:
        """Begin a session with a numeric address.

        Args:
            address: HOST:PORT.
            num_failures: attempts in a row that failed.
            on_end: called when it ends, with the cause and whether an end refused it.

        Raises:
            ValueError: the address or the secret cannot be used.
            OSError: there is no socket for it.
        """
        assert self._context is not None
        target = f"tcp://{address}"
        check_dialed_address(target, self._secret is not None)
        keys = None if self._secret is None else self._secret.dial_keys(num_failures)
        try:
            spoke = Spoke(self._context, RUN, secrets.randbits(62), target, self._decode, keys)
        except zmq.ZMQError as error:
            # Such as too many open files, which is no reason to dial no more.
            raise OSError(error.errno, error.strerror) from error

        def close(cause: str, is_refused: bool) -> None:
            spoke.close()
            on_end(cause, is_refused)

        connection = PeerConnection(address, spoke.send, time.monotonic())
        connection.is_dialed = True
        spoke.start(partial(self._deliver, connection), partial(self._lose, connection))
        self._begin(connection, close)
        return connection

    async def _tick(self) -> None:
        """Send heartbeats, and lose the peers that send none."""
        while True:
            before = time.monotonic()
            await asyncio.sleep(self._beat_seconds)
            now = time.monotonic()
            late = now - before - self._beat_seconds
            if late > self._beat_seconds:
                # This process was stopped or busy, and messages of its peers may wait.
                for connection in self._closers:
                    connection.last_heard += late
            try:
                self._handler.on_tick()
            except Exception:
                log.exception("the heartbeats could not be sent")
            for connection in list(self._closers):
                silent = now - connection.last_heard
                if silent > self._config.peer_timeout:
                    self._lose(connection, f"no message for {silent:.1f} seconds")
