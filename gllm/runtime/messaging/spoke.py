"""The end of a process's session with a hub (`gllm.runtime.messaging.bus`).

A spoke never connects again, because ZeroMQ would lose messages between two connections without
notice. Another session needs another spoke.
"""

from collections.abc import Callable

import zmq

from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage, encode
from gllm.messages.lifecycle import Hello
from gllm.runtime.messaging.bus_socket import (
    CLOSED,
    HANDSHAKE_SECONDS,
    MAX_QUEUED_FRAMES,
    BusSocket,
    Decode,
    is_ipv6,
)
from gllm.runtime.messaging.connections import NO_HANDSHAKE, handshake_failure
from gllm.runtime.messaging.security import KeyPair
from gllm.runtime.messaging.session import (
    ANY_EPOCH,
    MAX_ENCRYPTED_BYTES,
    SessionError,
    SessionReceiver,
    SessionSender,
)

# Integers, because an operation on the enumeration takes half as long as sending a frame.
_NOBLOCK = int(zmq.NOBLOCK)
_MAX_MESSAGES = 256
"""Messages handled before the event loop runs other callbacks."""
UNREACHABLE = "nothing accepts connections at the address"
"""Cause of the end of a session that never began."""


class Spoke(BusSocket):
    """The end of a process's session with a hub."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        run: int,
        sender: int,
        address: str,
        decode: Decode,
        keys: KeyPair | None = None,
    ) -> None:
        """Connect to a hub and send Hello.

        Args:
            context: of the process.
            run: number of this start of the head process; 0 for hubs of a fleet.
            sender: id of this process.
            address: of a hub that is bound already: there is no second attempt.
            decode: decoder of the messages that the hub may send.
            keys: of the hub's node secret; None if the hub needs none.
        """
        is_remote = address.startswith("tcp:")
        super().__init__(context, zmq.DEALER, MAX_QUEUED_FRAMES if is_remote else 0)
        # In milliseconds: time to send what is queued at the end, such as the report of a failure.
        self._socket.linger = 500
        self._socket.reconnect_ivl = -1
        self._receiver = SessionReceiver(run, decode)
        self._outgoing = SessionSender(run)
        self._due: list[AnyMessage] = []
        self._is_connected = True
        self._failure = ""
        """Cause for which there is no connection."""
        self._socket.ipv6 = is_ipv6(address)
        self._hint = ""
        """Likely reason of a handshake that the hub ends."""
        if is_remote:
            self._hint = ", so the hub probably needs a node secret"
            self._socket.connect_timeout = int(HANDSHAKE_SECONDS * 1000)
        if keys is not None:
            # A fleet has one key pair for each of its node secrets, which all members use.
            self._socket.curve_serverkey = keys.public
            self._socket.curve_publickey, self._socket.curve_secretkey = keys.public, keys.secret
            self._socket.maxmsgsize = MAX_ENCRYPTED_BYTES
            self._hint = ", so the hub probably has another node secret"
        try:
            self._socket.connect(address)
        except zmq.ZMQError:
            self._socket.linger = 0
            super().close()
            raise
        self.send(Hello(sender))

    @property
    def num_stale(self) -> int:
        """Frames of earlier epochs and other runs."""
        return self._receiver.num_dropped

    def start(
        self,
        on_messages: Callable[[list[AnyMessage]], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """Start delivery on the running event loop.

        Args:
            on_messages: called with all messages that have arrived.
            on_lost: called once with the cause when the session ends.
        """
        self._on_messages = on_messages
        self._on_lost = on_lost
        self._start()

    def send(self, message: WireMessage) -> None:
        """Queue a message; it is dropped if the session has ended."""
        epoch = self._epoch if message.is_fenced else ANY_EPOCH
        self._send(encode(message), epoch)

    def send_encoded(self, payload: bytes) -> None:
        """Queue an encoded message of the current epoch."""
        self._send(payload, self._epoch)

    def advance(self, epoch: int) -> None:
        """Begin an epoch: frames of earlier ones are dropped from now on."""
        self._epoch = epoch
        self._due += self._receiver.advance(epoch)
        self._schedule_read()

    def close(self) -> None:
        """Send queued messages, for at most half a second, and close."""
        self._is_connected = False
        super().close()

    def _send(self, payload: bytes, epoch: int) -> None:
        if not self._is_connected:
            return
        try:
            for frame in self._outgoing.frames(payload, epoch):
                self._socket.send(frame, _NOBLOCK)
        except zmq.Again:
            # Without limits on its queue, a socket that would block has no connection left.
            self._is_connected = False
        self._schedule_read()

    def _read(self) -> None:
        messages, self._due = self._due, []
        cause = ""
        try:
            for _ in range(_MAX_MESSAGES):
                frame, _ = self._receive_frame()
                message = self._receiver.receive(frame.bytes)
                if message is not None:
                    messages.append(message)
            self._schedule_read()
        except zmq.Again:
            if not self._is_connected:
                self._read_events()
                cause = self._failure or CLOSED
        except SessionError as error:
            cause = str(error)
        if messages:
            self._on_messages(messages)
        if cause and self._loop is not None:
            # Nothing that is queued can be sent.
            self._socket.linger = 0
            self.close()
            self._on_lost(cause)

    def _on_event(self, event: int, value: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            return
        if failure := handshake_failure(event, value):
            self._failure = failure + self._hint if failure == NO_HANDSHAKE else failure
        elif event == zmq.EVENT_CLOSED:
            self._failure = UNREACHABLE
        self._is_connected = False
        self._schedule_read()
