"""Sessions between processes over ZeroMQ on asyncio: a hub that several spokes connect to.

The head process has a hub that every worker connects to, and the driver's process has one for the
other stages. A hub's peers are expected senders. A session begins with `Hello` and ends with its
connection, or with the first frame that is invalid; spokes never connect again, because ZeroMQ
would lose messages between two connections without notice. Nothing that arrives raises an error.
"""

import errno
from collections.abc import Callable, Iterable
from typing import NamedTuple

import zmq

from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage, encode
from gllm.messages.lifecycle import Hello
from gllm.runtime.bus_socket import BusSocket
from gllm.runtime.session import (
    ANY_GENERATION,
    SessionError,
    SessionReceiver,
    SessionSender,
)

CLOSED = "the connection was closed"
"""Cause of a session's end if the peer closed it or exited."""

# Integers, because an operation on the enumeration takes half as long as sending a frame.
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_MAX_MESSAGES = 256
"""Messages handled before the event loop runs other callbacks."""
Decode = Callable[[bytes], AnyMessage]
"""Decoder of the messages that the peers' role may send."""


class _Session:
    """A session of a hub."""

    def __init__(
        self, sender: int, routing_id: bytes, receiver: SessionReceiver, outgoing: SessionSender
    ) -> None:
        self.sender = sender
        self.routing_id = routing_id
        """Name of the connection, given by ZeroMQ."""
        self.receiver = receiver
        self.outgoing = outgoing
        self.is_connected = True
        self.has_ended = False
        """True if nothing is delivered any more, although frames may still arrive."""


class Hub(BusSocket):
    """The end of all sessions of a process with its peers."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], run: int, decode: Decode) -> None:
        """Create a hub that is bound to no address.

        Args:
            context: with one I/O thread, so that events of connections arrive in order.
            run: number of this start of the head process.
            decode: decoder of the messages that the peers may send.
        """
        super().__init__(context, zmq.ROUTER)
        # A send to a peer that is gone fails instead of being dropped.
        self._socket.router_mandatory = True
        self.num_malformed = 0
        """Frames that could not be read."""
        self.num_refused = 0
        """Sessions of senders that were not expected or had a session."""
        self._run = run
        self._decode = decode
        self._num_stale = 0
        self._expected: dict[int, list[tuple[bytes, int]]] = {}
        """Payloads and generations to send to expected senders once they connect."""
        self._by_sender: dict[int, _Session] = {}
        self._by_routing_id: dict[bytes, _Session] = {}
        """Includes sessions that have ended, until their connections have."""
        self._disconnected: list[_Session] = []
        """Sessions whose connections have ended, which may have messages to be read."""
        self._descriptors: dict[int, _Session | None] = {}
        """Open connections; None for those without a session."""
        self._due: list[tuple[int, AnyMessage]] = []
        """Messages of a generation that has begun, to be delivered at the next read."""

    @property
    def num_stale(self) -> int:
        """Frames of earlier generations, other runs and sessions that have ended."""
        open_sessions = self._by_sender.values()
        return self._num_stale + sum(each.receiver.num_dropped for each in open_sessions)

    def bind(self, address: str) -> str:
        """Bind to an address; return it with the port that was chosen, if any."""
        self._socket.bind(address)
        return bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def expect(self, sender: int) -> None:
        """Accept one session of a sender; messages to it are queued until it connects."""
        if sender not in self._by_sender:
            self._expected.setdefault(sender, [])

    def forget(self, sender: int) -> None:
        """End the session of a sender, or no longer expect it."""
        self._expected.pop(sender, None)
        if session := self._by_sender.get(sender):
            self._end(session)

    def start(
        self,
        on_messages: Callable[[list[tuple[int, AnyMessage]]], None],
        on_lost: Callable[[int, str], None],
    ) -> None:
        """Start delivery on the running event loop.

        Args:
            on_messages: called with all messages that have arrived and their senders. The first
                one of a sender is its Hello.
            on_lost: called with a sender, no longer expected, and the cause when its session ends.
        """
        self._on_messages = on_messages
        self._on_lost = on_lost
        self._start()

    def send(self, sender: int, message: WireMessage) -> None:
        """Queue a message. It is dropped if the sender is neither connected nor expected."""
        generation = self._generation if message.is_fenced else ANY_GENERATION
        self._send(sender, encode(message), generation)

    def send_encoded(self, senders: Iterable[int], payload: bytes) -> None:
        """Queue an encoded message of the current generation for several receivers."""
        for sender in senders:
            self._send(sender, payload, self._generation)

    def advance(self, generation: int) -> None:
        """Begin a generation: frames of earlier ones are dropped from now on."""
        self._generation = generation
        for sender, session in self._by_sender.items():
            self._due += [(sender, each) for each in session.receiver.advance(generation)]
        self._schedule_read()

    def _send(self, sender: int, payload: bytes, generation: int) -> None:
        session = self._by_sender.get(sender)
        if session is None:
            if sender in self._expected:
                self._expected[sender].append((payload, generation))
            return
        try:
            for frame in session.outgoing.frames(payload, generation):
                self._socket.send(session.routing_id, _NOBLOCK_MORE)
                self._socket.send(frame, _NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno != errno.EHOSTUNREACH:
                raise
            self._disconnect(session)
        self._schedule_read()

    def _read(self) -> None:
        messages, self._due = self._due, []
        ended: list[tuple[_Session, str]] = []
        try:
            for _ in range(_MAX_MESSAGES):
                self._receive(messages, ended)
            self._schedule_read()
        except zmq.Again:
            # Only now, because a peer's last messages may be the reason of its exit.
            for session in self._disconnected:
                del self._by_routing_id[session.routing_id]
                ended.append((session, CLOSED))
            self._disconnected.clear()
        try:
            if messages:
                self._on_messages(messages)
        finally:
            for session, cause in ended:
                if not session.has_ended:
                    self._end(session)
                    self._on_lost(session.sender, cause)

    def _receive(
        self, messages: list[tuple[int, AnyMessage]], ended: list[tuple[_Session, str]]
    ) -> None:
        """Receive one frame; append the message that it completes, or the session that it ends.

        Raises:
            zmq.Again: there is none.
        """
        routing_id = self._socket.recv(_NOBLOCK)
        frame, is_whole = self._receive_frame()
        session = self._by_routing_id.get(routing_id)
        if session is None:
            self._begin(routing_id, frame, is_whole, messages)
        elif session.has_ended or any(session is each for each, _ in ended):
            self._num_stale += 1
        else:
            try:
                message = self._decode_frame(session, frame.bytes, is_whole)
            except SessionError as error:
                self.num_malformed += 1
                ended.append((session, str(error)))
            else:
                if message is not None:
                    messages.append((session.sender, message))

    @staticmethod
    def _decode_frame(session: _Session, frame: bytes, is_whole: bool) -> AnyMessage | None:
        if not is_whole:
            raise SessionError("a frame of several parts")
        message = session.receiver.receive(frame)
        if type(message) is Hello:
            raise SessionError("a second Hello")
        return message

    def _begin(
        self,
        routing_id: bytes,
        frame: zmq.Frame,
        is_whole: bool,
        messages: list[tuple[int, AnyMessage]],
    ) -> None:
        """Begin a connection's session, if its first frame is a Hello."""
        receiver = SessionReceiver(self._run, self._decode, self._generation)
        try:
            hello = receiver.receive(frame.bytes) if is_whole else None
        except SessionError:
            hello = None
        if receiver.num_foreign:
            self._num_stale += 1
        elif not isinstance(hello, Hello):
            self.num_malformed += 1
        elif hello.sender not in self._expected:
            self.num_refused += 1
        else:
            session = _Session(hello.sender, routing_id, receiver, SessionSender(self._run))
            self._by_routing_id[routing_id] = self._by_sender[hello.sender] = session
            self._attach(session, int(frame.get(zmq.SRCFD)))
            messages.append((hello.sender, hello))
            for payload, generation in self._expected.pop(hello.sender):
                self._send(hello.sender, payload, generation)

    def _attach(self, session: _Session, descriptor: int) -> None:
        """Find a session's connection among the open ones, to learn of its end."""
        # The event of this connection's beginning may wait, and so may its end and the beginning
        # of another one with the same descriptor.
        self._read_events()
        if descriptor not in self._descriptors:
            self._disconnect(session)
            return
        if previous := self._descriptors[descriptor]:
            self._disconnect(previous)
        self._descriptors[descriptor] = session

    def _disconnect(self, session: _Session) -> None:
        """End a session after the messages that have arrived."""
        if session.is_connected:
            session.is_connected = False
            self._disconnected.append(session)
            self._schedule_read()

    def _on_event(self, event: int, descriptor: int) -> None:
        if event == zmq.EVENT_ACCEPTED:
            self._descriptors[descriptor] = None
        elif (session := self._descriptors.pop(descriptor, None)) is not None:
            self._disconnect(session)

    def close(self) -> None:
        """Stop delivery and close; messages are dropped from now on."""
        for session in list(self._by_sender.values()):
            self._end(session)
        self._expected.clear()
        super().close()

    def _end(self, session: _Session) -> None:
        """Deliver nothing of a session any more; its frames are dropped and counted."""
        session.has_ended = True
        del self._by_sender[session.sender]
        self._num_stale += session.receiver.num_dropped


class Peer(NamedTuple):
    """One sender of a hub, as the receiver of messages."""

    hub: Hub
    sender: int

    def send(self, message: WireMessage) -> None:
        """Queue a message."""
        self.hub.send(self.sender, message)

    def send_encoded(self, payload: bytes) -> None:
        """Queue an encoded message of the current generation."""
        self.hub.send_encoded((self.sender,), payload)


class Spoke(BusSocket):
    """The end of a process's session with a hub."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        run: int,
        sender: int,
        address: str,
        decode: Decode,
    ) -> None:
        """Connect to a hub and send Hello.

        Args:
            context: of the process.
            run: number of this start of the head process.
            sender: id of this process.
            address: of a hub that is bound already: there is no second attempt.
            decode: decoder of the messages that the hub may send.
        """
        super().__init__(context, zmq.DEALER)
        # In milliseconds: time to send what is queued at the end, such as the report of a failure.
        self._socket.linger = 500
        self._socket.reconnect_ivl = -1
        self._receiver = SessionReceiver(run, decode)
        self._outgoing = SessionSender(run)
        self._due: list[AnyMessage] = []
        self._is_connected = True
        self._socket.connect(address)
        self.send(Hello(sender))

    @property
    def num_stale(self) -> int:
        """Frames of earlier generations and other runs."""
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
        generation = self._generation if message.is_fenced else ANY_GENERATION
        self._send(encode(message), generation)

    def send_encoded(self, payload: bytes) -> None:
        """Queue an encoded message of the current generation."""
        self._send(payload, self._generation)

    def advance(self, generation: int) -> None:
        """Begin a generation: frames of earlier ones are dropped from now on."""
        self._generation = generation
        self._due += self._receiver.advance(generation)
        self._schedule_read()

    def close(self) -> None:
        """Send queued messages, for at most half a second, and close."""
        self._is_connected = False
        super().close()

    def _send(self, payload: bytes, generation: int) -> None:
        if not self._is_connected:
            return
        try:
            for frame in self._outgoing.frames(payload, generation):
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
            cause = "" if self._is_connected else CLOSED
        except SessionError as error:
            cause = str(error)
        if messages:
            self._on_messages(messages)
        if cause and self._loop is not None:
            self.close()
            self._on_lost(cause)

    def _on_event(self, event: int, descriptor: int) -> None:
        if event != zmq.EVENT_ACCEPTED:
            self._is_connected = False
            self._schedule_read()
