"""Typed one-way channels between processes over ZeroMQ: framing, numbering, delivery to asyncio.

Each process has one Inbox; a process that sends to it opens an Outbox. Every message carries its
sender and a number that counts up by one per sender. A gap means that a message was lost, which is
an error.
"""

import asyncio
import struct
from collections.abc import Callable

import msgspec
import zmq

from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage, decode, encode

FRONTEND = 1_000_000
"""The frontend's sender number; a stage's is its index."""

_HEADER = struct.Struct("<IQ")
"""Sender and number of a message."""
_MAX_MESSAGES = 256
"""Messages handled before the event loop runs other callbacks."""


class BusError(Exception):
    """A channel lost a message or received an invalid one; the process cannot continue."""


class Outbox:
    """Sending end of a channel; it never blocks: messages are queued until they are read."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, sender: int) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.sndhwm = 0
        self._socket.linger = 500
        self._socket.connect(address)
        self._sender = sender
        self._next_number = 0

    def send(self, message: WireMessage) -> None:
        """Queue a message."""
        self.send_encoded(encode(message))

    def send_encoded(self, payload: bytes) -> None:
        """Queue an encoded message, for messages with several receivers."""
        frames = [_HEADER.pack(self._sender, self._next_number), payload]
        self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=True)
        self._next_number += 1

    def close(self) -> None:
        """Send queued messages, for at most half a second, and close."""
        self._socket.close()


class Inbox:
    """Receiving end of all channels to this process."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.rcvhwm = 0
        self._socket.bind(address)
        self._next_numbers: dict[int, int] = {}
        """Number of the next message by sender."""
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(
        self,
        on_messages: Callable[[list[AnyMessage]], None],
        on_error: Callable[[BusError], None],
    ) -> None:
        """Start delivery on the running event loop.

        Args:
            on_messages: called with all messages that have arrived.
            on_error: called once with the error that ended delivery.
        """
        self._on_messages = on_messages
        self._on_error = on_error
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._read)
        self._loop.call_soon(self._read)

    def close(self) -> None:
        """Stop delivery and close."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None
        self._socket.close(linger=0)

    def _read(self) -> None:
        """Deliver waiting messages.

        The descriptor signals changes only, so this reads until none is left, or schedules itself.
        """
        if self._loop is None:
            return
        messages: list[AnyMessage] = []
        try:
            while len(messages) < _MAX_MESSAGES:
                messages.append(self._receive())
            self._loop.call_soon(self._read)
        except zmq.Again:
            pass
        except BusError as error:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None
            self._on_error(error)
            return
        if messages:
            self._on_messages(messages)

    def _receive(self) -> AnyMessage:
        frames = self._socket.recv_multipart(flags=zmq.NOBLOCK)
        if len(frames) != 2 or len(frames[0]) != _HEADER.size:
            raise BusError(f"received an invalid message of {len(frames)} frames")
        sender, number = _HEADER.unpack(frames[0])
        expected = self._next_numbers.get(sender, 0)
        if number != expected:
            raise BusError(f"message {expected} from sender {sender} was lost: {number} arrived")
        self._next_numbers[sender] = number + 1
        try:
            return decode(frames[1])
        except msgspec.DecodeError as error:
            raise BusError(f"message {number} from sender {sender}: {error}") from error
