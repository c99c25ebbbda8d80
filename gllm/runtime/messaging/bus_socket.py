"""A ZeroMQ socket on the asyncio event loop, the monitor of its connections, and refused peers."""

import asyncio
import logging
import os
import socket
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from contextlib import suppress

import zmq
from zmq.utils.monitor import recv_monitor_message

from gllm.messages.codec import AnyMessage
from gllm.runtime.messaging.session import ANY_EPOCH, MAX_FRAME_BYTES

log = logging.getLogger(__name__)

MAX_STRANGERS = 64
"""HubConnections without a session; the oldest ones are closed beyond."""
_MAX_ADDRESSES = 256
"""Addresses whose refusals are counted one by one."""
OTHER_ADDRESSES = "other addresses"
UNKNOWN_ADDRESS = "an unknown address"
"""Address of a connection that ended before it could be looked up."""
NO_HANDSHAKE = "the connection ended during the handshake"
NO_HELLO = "the connection ended without a session"

HANDSHAKE_FAILURES = (
    zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_AUTH
)
"""Events of a socket's monitor that precede the end of a connection."""

CLOSED = "the connection was closed"
"""Cause of a session's end if the peer closed it or exited."""
NEW_KEYS = "the hub has a new node secret"
"""Cause of the end of all sessions of a hub whose first node secret is another one."""
MAX_QUEUED_FRAMES = 2**16
"""Frames in one direction between processes of a fleet that may wait until the peer is lost."""
HANDSHAKE_SECONDS = 5.0
"""Time limit of connecting over TCP, and of the handshake."""
Decode = Callable[[bytes], AnyMessage]
"""Decoder of the messages that the peers' role may send."""

_NOBLOCK = int(zmq.NOBLOCK)


def handshake_failure(event: int, value: int) -> str:
    """Return the cause of a failed connection handshake for a ZeroMQ monitor event.

    Args:
        event: type of the monitor's event.
        value: its number, such as a ZeroMQ protocol error.

    Returns:
        The cause in words; empty if the event is not a failed handshake.
    """
    if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
        return "the node secret is not accepted"
    if event == zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL:
        if value == zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC:
            return "the node secrets differ"
        if value == zmq.PROTOCOL_ERROR_ZMTP_MECHANISM_MISMATCH:
            return "only one end uses a node secret"
        return f"invalid handshake (ZeroMQ protocol error {value:#x})"
    return NO_HANDSHAKE if event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL else ""


class RefusedPeers:
    """Counts refused connections by IP address, and logs at most one per minute and address."""

    def __init__(self) -> None:
        self.num_refused = 0
        self.by_address: Counter[str] = Counter()
        """Refusals by IP address; OTHER_ADDRESSES when there are too many."""
        self.causes: dict[str, str] = {}
        """Cause of the last refusal, by the same addresses."""
        self.on_refused: Callable[[str, str], None] | None = None
        """Called with one of these addresses and the cause of each refusal."""

    def add(self, address: str, cause: str) -> None:
        """Count a refused connection and warn, at most once per minute and address."""
        self.count(address, cause)
        # Probes of load balancers and port scans connect and leave.
        level = logging.DEBUG if cause in (NO_HANDSHAKE, NO_HELLO) else logging.WARNING
        message = "a connection from %s was refused: %s"
        log.log(level, message, address, cause, extra={"about": address})

    def count(self, address: str, cause: str) -> None:
        """Count a refused connection."""
        self.num_refused += 1
        if not (address in self.by_address or len(self.by_address) < _MAX_ADDRESSES):
            address = OTHER_ADDRESSES
        self.by_address[address] += 1
        self.causes[address] = cause
        if self.on_refused is not None:
            self.on_refused(address, cause)


class HubConnection:
    """One open connection that a `Hub` has accepted, identified by its file descriptor."""

    def __init__(self, descriptor: int) -> None:
        self.on_closed: Callable[[], None] | None = None
        """Called when the connection has ended; None while it has no session."""
        self._descriptor = descriptor
        self._peer = _peer_of(descriptor)

    @property
    def address(self) -> str:
        """The peer's IP address."""
        return self._peer[0] if self._peer else UNKNOWN_ADDRESS

    def close(self) -> None:
        """Close the connection, if it is one of TCP: ZeroMQ then reports its end."""
        if self._peer is None:
            return
        with suppress(OSError), socket.socket(fileno=os.dup(self._descriptor)) as duplicate:
            # The descriptor may belong to another connection already.
            if duplicate.getpeername()[:2] == self._peer:
                duplicate.shutdown(socket.SHUT_RDWR)


class HubConnections:
    """Open connections of a `Hub`, by file descriptor; closes those of refused peers."""

    def __init__(self, refused: RefusedPeers) -> None:
        self.has_strangers = False
        """True if anyone may connect: those without a session are limited and counted."""
        self._refused = refused
        self.open: dict[int, HubConnection] = {}
        self._strangers: dict[HubConnection, None] = {}
        """Those without a session, the oldest one first."""
        self._failure = ""
        """Cause of the handshake failure whose connection ends with the next event."""

    def attach(self, connection: HubConnection, on_closed: Callable[[], None]) -> None:
        """Set the function to call when a connection has ended, which belongs to a session now."""
        connection.on_closed = on_closed
        self._strangers.pop(connection, None)

    def refuse(self, connection: HubConnection | None, cause: str) -> None:
        """Count a connection as refused, and close it.

        One that has ended is counted, and so is one that was refused for an earlier frame. The
        descriptor of one that has ended may belong to a session now, which stays.
        """
        if self.has_strangers and connection is not None and connection.on_closed is None:
            self._refused.add(connection.address, cause)
            self.attach(connection, _ignore)
            connection.close()

    def on_event(self, event: int, value: int) -> None:
        """Handle an event of the socket's monitor."""
        if event == zmq.EVENT_ACCEPTED:
            self._add(value)
        elif event & HANDSHAKE_FAILURES:
            # Events of one I/O thread are in order: the connection's end follows.
            self._failure = handshake_failure(event, value)
        else:
            failure, self._failure = self._failure, ""
            if connection := self.open.pop(value, None):
                self._end(connection, failure or NO_HELLO)

    def end_all(self, cause: str) -> None:
        """End all connections, which ZeroMQ has closed without an event."""
        for connection in self.open.values():
            self._end(connection, cause)
        self.open.clear()

    def _add(self, descriptor: int) -> None:
        if previous := self.open.pop(descriptor, None):
            self._end(previous, NO_HELLO)
        connection = self.open[descriptor] = HubConnection(descriptor)
        if not self.has_strangers:
            return
        self._strangers[connection] = None
        if len(self._strangers) > MAX_STRANGERS:
            # The newest ones may be members in the middle of a handshake.
            oldest = next(iter(self._strangers))
            self.refuse(oldest, f"more than {MAX_STRANGERS} connections have no session")

    def _end(self, connection: HubConnection, cause: str) -> None:
        if connection.on_closed is not None:
            connection.on_closed()
        elif self.has_strangers:
            del self._strangers[connection]
            self._refused.add(connection.address, cause)


def _ignore() -> None:
    """Do nothing."""


def _peer_of(descriptor: int) -> tuple[str, int] | None:
    """Return the IP address and port of a connection's peer; None if it has none."""
    try:
        with socket.socket(fileno=os.dup(descriptor)) as duplicate:
            peer = duplicate.getpeername()
    except OSError:
        return None
    return (str(peer[0]), int(peer[1])) if isinstance(peer, tuple) else None


class BusSocket(ABC):
    """Base class of `Hub` and `Spoke`: a ZeroMQ socket and the monitor of its connections.

    The descriptors of both only signal changes, and a send may use up the signal of a message that
    arrived. So a read goes on until nothing is left, and every send schedules one.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        kind: int,
        max_queued_frames: int = 0,
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        """Create the socket.

        Args:
            context: ZeroMQ context of the process.
            kind: type of a ZeroMQ socket.
            max_queued_frames: maximum of queued frames per peer and direction; 0 for no limit.
            handshake_seconds: time limit of a handshake.
        """
        self._socket = context.socket(kind)
        self._socket.sndhwm = self._socket.rcvhwm = max_queued_frames
        self._socket.linger = 0
        self._socket.maxmsgsize = MAX_FRAME_BYTES
        self._socket.handshake_ivl = int(handshake_seconds * 1000)
        self._monitor = self._socket.get_monitor_socket(
            zmq.EVENT_ACCEPTED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | HANDSHAKE_FAILURES
        )
        self._epoch = ANY_EPOCH
        self._loop: asyncio.AbstractEventLoop | None = None
        self._is_read_scheduled = False

    def close(self) -> None:
        """Stop delivery and close."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop.remove_reader(self._monitor.fileno())
            self._loop = None
        if not self._socket.closed:
            self._socket.disable_monitor()
            self._monitor.close()
            self._socket.close()

    def _start(self) -> None:
        """Start delivery on the running event loop."""
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._on_readable)
        self._loop.add_reader(self._monitor.fileno(), self._read_events)
        self._loop.call_soon(self._read_events)
        self._schedule_read()

    def _schedule_read(self) -> None:
        if not self._is_read_scheduled and self._loop is not None:
            self._is_read_scheduled = True
            self._loop.call_soon(self._on_readable)

    def _on_readable(self) -> None:
        self._is_read_scheduled = False
        if self._loop is not None:
            self._read()

    def _receive_frame(self) -> tuple[zmq.Frame, bool]:
        """Return a frame, and False if it had further parts, which are dropped.

        Raises:
            zmq.Again: there is none.
        """
        # A frame knows whether more follow; asking the socket takes longer than receiving it.
        first = last = self._socket.recv(_NOBLOCK, copy=False)
        while last.more:
            last = self._socket.recv(_NOBLOCK, copy=False)
        return first, first is last

    def _read_events(self) -> None:
        """Handle what happened to connections."""
        while not self._monitor.closed:
            try:
                event = recv_monitor_message(self._monitor, zmq.NOBLOCK)
            except zmq.Again:
                return
            self._on_event(int(event["event"]), int(event["value"]))

    @abstractmethod
    def _read(self) -> None:
        """Deliver waiting messages, or the first ones of them and schedule another read."""

    @abstractmethod
    def _on_event(self, event: int, value: int) -> None:
        """Handle the beginning or end of a connection, or the failure of a handshake before it.

        The messages that arrived before the end may still wait to be read.

        Args:
            event: event of ZeroMQ's monitor.
            value: descriptor of the connection in this process, or the cause of the failure.
        """


def is_ipv6(address: str) -> bool:
    """Return True if a ZeroMQ address has an IPv6 address, such as tcp://[::]:29700."""
    return address.startswith("tcp://[")
