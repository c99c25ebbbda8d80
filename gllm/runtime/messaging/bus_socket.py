"""A ZeroMQ socket on the asyncio event loop, with the monitor of its connections."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable

import zmq
from zmq.utils.monitor import recv_monitor_message

from gllm.messages.codec import AnyMessage
from gllm.runtime.messaging.connections import HANDSHAKE_FAILURES
from gllm.runtime.messaging.session import ANY_EPOCH, MAX_FRAME_BYTES

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


class BusSocket(ABC):
    """A socket on the event loop and the monitor of its connections.

    Both have descriptors that signal changes only, and a send may use up the signal of a message
    that arrived. So a read goes on until nothing is left, and every send schedules one.
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
            context: of the process.
            kind: type of a ZeroMQ socket.
            max_queued_frames: for each peer and direction; 0 for no limit.
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
            event: of ZeroMQ's monitor.
            value: descriptor of the connection in this process, or the cause of the failure.
        """


def is_ipv6(address: str) -> bool:
    """Return True if an address of ZeroMQ has an IPv6 address, such as tcp://[::]:29700."""
    return address.startswith("tcp://[")
