"""Typed one-way channels between processes over ZeroMQ.

Owns framing, numbering and delivery into an asyncio loop. Knows nothing of what messages mean.

Each process has one Inbox; whoever sends to it opens an Outbox. Every message carries its sender
and a number counting up by one per sender: a gap means that something was lost, and is a fault.
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
_BATCH = 256
"""Messages handled before the loop gets a turn."""


class BusFault(Exception):
    """A channel lost a message or carried something that is none; the process cannot go on."""


class Outbox:
    """Sends to one inbox. Never blocks: what the other side has not taken yet is queued."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str, sender: int) -> None:
        self._socket = context.socket(zmq.PUSH)
        self._socket.sndhwm = 0
        self._socket.linger = 500
        self._socket.connect(address)
        self._sender = sender
        self._number = 0

    def send(self, message: WireMessage) -> None:
        """Queue a message."""
        self.send_encoded(encode(message))

    def send_encoded(self, payload: bytes) -> None:
        """Queue a message that was encoded before, once for several receivers."""
        frames = [_HEADER.pack(self._sender, self._number), payload]
        self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=True)
        self._number += 1

    def close(self) -> None:
        """Send what is queued, for half a second at most, and close."""
        self._socket.close()


class Inbox:
    """Receives from any number of outboxes; each drain hands all that came to one call."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.PULL)
        self._socket.rcvhwm = 0
        self._socket.bind(address)
        self._numbers: dict[int, int] = {}
        self._loop: asyncio.AbstractEventLoop | None = None

    def start(
        self, handle: Callable[[list[AnyMessage]], None], fault: Callable[[BusFault], None]
    ) -> None:
        """Deliver to `handle` on the running loop; `fault` hears why delivery has ended."""
        self._handle = handle
        self._fault = fault
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket.fileno(), self._drain)
        self._loop.call_soon(self._drain)

    def close(self) -> None:
        """Deliver nothing more."""
        if self._loop is not None:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None
        self._socket.close(linger=0)

    def _drain(self) -> None:
        """Take what is there. The descriptor signals changes only, so read until nothing is left
        or come back by ourselves."""
        if self._loop is None:
            return
        messages: list[AnyMessage] = []
        try:
            while len(messages) < _BATCH:
                messages.append(self._receive())
            self._loop.call_soon(self._drain)
        except zmq.Again:
            pass
        except BusFault as fault:
            self._loop.remove_reader(self._socket.fileno())
            self._loop = None
            self._fault(fault)
            return
        if messages:
            self._handle(messages)

    def _receive(self) -> AnyMessage:
        frames = self._socket.recv_multipart(flags=zmq.NOBLOCK)
        if len(frames) != 2 or len(frames[0]) != _HEADER.size:
            raise BusFault(f"a message of {len(frames)} frames is none of ours")
        sender, number = _HEADER.unpack(frames[0])
        expected = self._numbers.get(sender, 0)
        if number != expected:
            raise BusFault(f"message {expected} from sender {sender} was lost: {number} came")
        self._numbers[sender] = number + 1
        try:
            return decode(frames[1])
        except msgspec.DecodeError as error:
            raise BusFault(f"message {number} from sender {sender}: {error}") from error
