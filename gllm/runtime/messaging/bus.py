"""Sessions between processes over ZeroMQ on asyncio: a hub that several spokes connect to.

The head process has a hub that every worker connects to, and the driver's process has one for the
other stages. A hub's peers are expected senders; a hub of a fleet also accepts guests. A session
begins with `Hello` and ends with its connection, or with the first frame that is invalid. Nothing
that arrives raises an error.
"""

import errno
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

import zmq

from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage, encode
from gllm.messages.lifecycle import Hello
from gllm.runtime.messaging.bus_socket import (
    CLOSED,
    HANDSHAKE_SECONDS,
    MAX_QUEUED_FRAMES,
    NEW_KEYS,
    NO_HANDSHAKE,
    UNKNOWN_ADDRESS,
    BusSocket,
    Decode,
    HubConnection,
    HubConnections,
    RefusedPeers,
    handshake_failure,
    is_ipv6,
)
from gllm.runtime.messaging.security import Authenticator, KeyPair
from gllm.runtime.messaging.session import (
    ANY_EPOCH,
    MAX_ENCRYPTED_BYTES,
    SessionError,
    SessionReceiver,
    SessionSender,
)

log = logging.getLogger(__name__)

# Integers, because an operation on the enumeration takes half as long as sending a frame.
_NOBLOCK = int(zmq.NOBLOCK)
_NOBLOCK_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)
_MAX_MESSAGES = 256
"""Messages handled before the event loop runs other callbacks."""
_CLOSE_SECONDS = 0.5
"""Time for the last messages to a guest that is forgotten."""
_BIND_SECONDS = 0.02
"""Interval of attempts to bind the address anew."""

# Integers, because an operation on the enumeration takes half as long as sending a frame.
_NOBLOCK = int(zmq.NOBLOCK)
_MAX_MESSAGES = 256
"""Messages handled before the event loop runs other callbacks."""
UNREACHABLE = "nothing accepts connections at the address"
"""Cause of the end of a session that never began."""


@dataclass(eq=False, slots=True)
class _Session:
    """A session of a hub."""

    sender: int
    routing_id: bytes
    """Name of the connection, given by ZeroMQ."""
    receiver: SessionReceiver
    outgoing: SessionSender
    is_guest: bool
    connection: HubConnection | None = None
    is_connected: bool = True
    has_ended: bool = False
    """True if nothing is delivered any more, although frames may still arrive."""


class Hub(BusSocket):
    """Server end (ZeroMQ ROUTER) of message sessions with several peers, such as the workers.

    A peer connects with a `Spoke`. Messages from before the last recovery are dropped.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        run: int,
        decode: Decode,
        authenticator: Authenticator | None = None,
        max_guests: int = 0,
        handshake_seconds: float = HANDSHAKE_SECONDS,
    ) -> None:
        """Create a hub that is bound to no address.

        Args:
            context: ZeroMQ context with one I/O thread, which keeps events of connections in order.
            run: number of this start of the head process; 0 for hubs of a fleet.
            decode: decoder of the messages that the peers may send.
            authenticator: authenticator of the same context; None if peers need no node secret.
            max_guests: maximum sessions of senders that are not expected.
            handshake_seconds: time limit of the handshake of a peer.
        """
        num_frames = MAX_QUEUED_FRAMES if max_guests else 0
        super().__init__(context, zmq.ROUTER, num_frames, handshake_seconds)
        # A send to a peer that is gone fails instead of being dropped.
        self._socket.router_mandatory = True
        self.refused = RefusedPeers()
        """Connections over TCP that were refused, by address."""
        self.num_malformed = 0
        """Frames that could not be read."""
        self.num_refused = 0
        """Sessions of senders that were not expected or had a session."""
        self._run = run
        self._decode = decode
        self._authenticator = authenticator
        self._max_guests = max_guests
        self._num_guests = 0
        self._address = ""
        """Address that is bound."""
        self._num_stale = 0
        self._expected: dict[int, list[tuple[bytes, int]]] = {}
        """Payloads and epochs to send to expected senders once they connect."""
        self._by_sender: dict[int, _Session] = {}
        self._by_routing_id: dict[bytes, _Session] = {}
        """Includes sessions that have ended, until their connections have."""
        self._disconnected: list[_Session] = []
        """Sessions whose connections have ended, which may have messages to be read."""
        self._close_cause = CLOSED
        """Cause of the end of connections that have ended since the last read."""
        self._connections = HubConnections(self.refused)
        self._due: list[tuple[int, AnyMessage]] = []
        """Messages of an epoch that has begun, to be delivered at the next read."""

    @property
    def num_stale(self) -> int:
        """Frames of earlier epochs, other runs and sessions that have ended."""
        sessions = self._by_sender.values()
        return self._num_stale + sum(session.receiver.num_dropped for session in sessions)

    @property
    def num_connections(self) -> int:
        """Open connections, with and without a session."""
        return len(self._connections.open)

    def bind(self, address: str) -> str:
        """Bind to an address; return it with the port that was chosen, if any."""
        self._socket.ipv6 = is_ipv6(address)
        self._connections.has_strangers = address.startswith("tcp:")
        if self._authenticator is not None:
            self._authenticator.require_secret_on_bind(self._socket)
        self._socket.bind(address)
        self._address = bytes(self._socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()
        return self._address

    def expect(self, sender: int) -> None:
        """Accept one session of a sender; messages are queued until the sender connects."""
        if sender not in self._by_sender:
            self._expected.setdefault(sender, [])

    def forget(self, sender: int) -> None:
        """End the session of a peer, or no longer expect it.

        The connection of a peer that was not expected by its number stays open until its queued
        messages had time to leave.
        """
        self._expected.pop(sender, None)
        if session := self._by_sender.get(sender):
            self._end(session)
            if session.is_guest and session.connection is not None and self._loop is not None:
                self._loop.call_later(_CLOSE_SECONDS, session.connection.close)

    def address_of(self, sender: int) -> str:
        """Return the IP address of a sender that has a session; UNKNOWN_ADDRESS over ipc."""
        session = self._by_sender.get(sender)
        if session is None or session.connection is None:
            return UNKNOWN_ADDRESS
        return session.connection.address

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
        if self._authenticator is not None:
            self._authenticator.start(self._bind_anew)

    def send(self, sender: int, message: WireMessage) -> None:
        """Queue a message. It is dropped if the sender is neither connected nor expected."""
        epoch = self._epoch if message.is_fenced else ANY_EPOCH
        self._send(sender, encode(message), epoch)

    def send_encoded(
        self, senders: Iterable[int], payload: bytes, epoch: int | None = None
    ) -> None:
        """Queue an encoded message for several receivers, by default of the current epoch."""
        for sender in senders:
            self._send(sender, payload, self._epoch if epoch is None else epoch)

    def advance(self, epoch: int) -> None:
        """Begin an epoch: frames of earlier epochs are dropped."""
        self._epoch = epoch
        for sender, session in self._by_sender.items():
            self._due += [(sender, message) for message in session.receiver.advance(epoch)]
        self._schedule_read()

    def _send(self, sender: int, payload: bytes, epoch: int) -> None:
        session = self._by_sender.get(sender)
        if session is None:
            if sender in self._expected:
                self._expected[sender].append((payload, epoch))
            return
        try:
            for frame in session.outgoing.frames(payload, epoch):
                self._socket.send(session.routing_id, _NOBLOCK_MORE)
                self._socket.send(frame, _NOBLOCK)
        except zmq.Again:
            # The peer receives nothing.
            self._disconnect(session)
            if session.connection is not None:
                session.connection.close()
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
                ended.append((session, self._close_cause))
            self._disconnected.clear()
            self._close_cause = CLOSED
        try:
            if messages:
                self._on_messages(messages)
        finally:
            for session, cause in ended:
                if not session.has_ended:
                    self._end(session)
                    if session.connection is not None:
                        session.connection.close()
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
        elif session.has_ended or any(session is other for other, _ in ended):
            self._num_stale += 1
        else:
            try:
                if not is_whole:
                    raise SessionError("a frame of several parts")
                message = session.receiver.receive(frame.bytes)
                if type(message) is Hello:
                    raise SessionError("a second Hello")
            except SessionError as error:
                self.num_malformed += 1
                ended.append((session, str(error)))
            else:
                if message is not None:
                    messages.append((session.sender, message))

    def _begin(
        self,
        routing_id: bytes,
        frame: zmq.Frame,
        is_whole: bool,
        messages: list[tuple[int, AnyMessage]],
    ) -> None:
        """Begin a connection's session, if its first frame is a Hello."""
        receiver = SessionReceiver(self._run, self._decode, self._epoch)
        try:
            hello = receiver.receive(frame.bytes) if is_whole else None
        except SessionError:
            hello = None
        descriptor = int(frame.get(zmq.SRCFD))
        if receiver.num_foreign:
            self._num_stale += 1
            self._refuse(descriptor, "another run")
        elif not isinstance(hello, Hello):
            self.num_malformed += 1
            self._refuse(descriptor, "its first message is no Hello")
        elif hello.sender not in self._expected and (
            cause := self._cause_to_refuse_guest(hello.sender)
        ):
            self.num_refused += 1
            self._refuse(descriptor, cause)
        else:
            is_guest = hello.sender not in self._expected
            session = _Session(
                hello.sender, routing_id, receiver, SessionSender(self._run), is_guest
            )
            self._num_guests += is_guest
            self._by_routing_id[routing_id] = self._by_sender[hello.sender] = session
            self._attach(session, descriptor)
            messages.append((hello.sender, hello))
            for payload, epoch in self._expected.pop(hello.sender, ()):
                self._send(hello.sender, payload, epoch)

    def _cause_to_refuse_guest(self, sender: int) -> str:
        """Return the cause for which a guest may not begin a session; empty if it may."""
        if sender in self._by_sender:
            return "the sender has a session"
        if not self._max_guests:
            return "the sender is not expected"
        is_full = self._num_guests >= self._max_guests
        return f"{self._max_guests} peers are connected, the maximum" if is_full else ""

    def _refuse(self, descriptor: int, cause: str) -> None:
        self._read_events()
        self._connections.refuse(self._connections.open.get(descriptor), cause)

    def _attach(self, session: _Session, descriptor: int) -> None:
        """Find a session's connection among the open ones, to learn of its end."""
        # The event of this connection's beginning may wait, and so may its end and the beginning
        # of another one with the same descriptor.
        self._read_events()
        connection = self._connections.open.get(descriptor)
        if connection is None:
            self._disconnect(session)
            return
        if connection.on_closed is not None:
            connection.on_closed()
        session.connection = connection
        self._connections.attach(connection, partial(self._disconnect, session))

    def _disconnect(self, session: _Session) -> None:
        """End a session after the messages that have arrived."""
        if session.is_connected:
            session.is_connected = False
            self._disconnected.append(session)
            self._schedule_read()

    def _on_event(self, event: int, value: int) -> None:
        self._connections.on_event(event, value)

    def _bind_anew(self) -> None:
        """Require the new node secret, which ends all connections."""
        if self._address:
            log.info("the hub at %s begins to use the new node secret", self._address)
            self._read_events()
            self._socket.unbind(self._address)
            self._connections.end_all(NEW_KEYS)
            self._close_cause = NEW_KEYS
            self._bind_again()

    def _bind_again(self) -> None:
        if self._loop is None or self._authenticator is None:
            return
        self._authenticator.require_secret_on_bind(self._socket)
        try:
            self._socket.bind(self._address)
        except zmq.ZMQError as error:
            # The end of the last use takes a moment.
            log.debug("the hub could not bind %s: %s", self._address, error)
            self._loop.call_later(_BIND_SECONDS, self._bind_again)
        self._schedule_read()

    def close(self) -> None:
        """Stop delivery and close; messages are dropped from now on."""
        for session in list(self._by_sender.values()):
            self._end(session)
        self._expected.clear()
        if self._authenticator is not None:
            self._authenticator.close()
        super().close()

    def _end(self, session: _Session) -> None:
        """Deliver nothing of a session any more; its frames are dropped and counted."""
        session.has_ended = True
        self._num_guests -= session.is_guest
        del self._by_sender[session.sender]
        self._num_stale += session.receiver.num_dropped


class Spoke(BusSocket):
    """Client end (ZeroMQ DEALER) of one message session with a `Hub`, the server end."""

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
            context: ZeroMQ context of the process.
            run: number of this start of the head process; 0 for hubs of a fleet.
            sender: id of this process.
            address: address of a hub that is bound already: there is no second attempt.
            decode: decoder of the messages that the hub may send.
            keys: keys derived from the hub's node secret; None if the hub needs none.
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
        """Begin an epoch: frames of earlier epochs are dropped."""
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
