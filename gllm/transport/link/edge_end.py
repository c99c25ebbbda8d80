"""One end of an edge between two machines: its connection, which is dialed again when it breaks.

The subclasses SendingEnd and ReceivingEnd move the steps. Each end has a thread.
"""

import logging
import os
import random
import select
import ssl
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Collection, Sequence
from contextlib import suppress

import msgspec

from gllm.config.link_encodings import PLAIN
from gllm.messages.nodes import LinkState
from gllm.transport.link.commands import OpenLinkEdge
from gllm.transport.link.connection import FrameConnection, dial, receive_answer
from gllm.transport.link.encodings import make_encoding
from gllm.transport.link.frames import (
    MAX_BYTES,
    EdgeAnswer,
    EdgeHello,
    EdgeName,
    EdgeResume,
    FrameClass,
    FrameError,
    FrameHeader,
    decode_payload,
    encode_payload,
)
from gllm.transport.link.listener import describe_tls_error
from gllm.transport.link.settings import LinkSettings
from gllm.transport.rendezvous_log import MAX_LOG_BYTES, VERDICT_KEY, LogReader, TransportVerdict
from gllm.transport.ring import Ring

_NUM_DESCRIPTORS = 3


class RendezvousLogs:
    """Copies the rendezvous data of NCCL between the workers of two machines.

    Each worker appends keys and values to a log file; its data mover sends them, and the other
    machine's data mover appends them to a copy.
    """

    def __init__(self, descriptors: Sequence[int]) -> None:
        """Use an edge's descriptors: own log, copy of the other log, and eventfd of the own log.

        Edges without these descriptors have no logs.
        """
        self.verdict: TransportVerdict | None = None
        """Transport that the workers have chosen; None as long as they have not."""
        self.events: list[int] = []
        """Event that the worker writes when its log has grown."""
        self._num_sent = 0
        self._has_news = False
        self._own: int | None = None
        self._copy: int | None = None
        if len(descriptors) >= _NUM_DESCRIPTORS:
            self._own, self._copy, event = descriptors[:_NUM_DESCRIPTORS]
            self.events = [event]
            self._reader = LogReader(self._own)

    @property
    def num_received_bytes(self) -> int:
        """Bytes of the other worker's log that have been received."""
        return 0 if self._copy is None else os.fstat(self._copy).st_size

    def resume(self, num_bytes: int) -> None:
        """Continue sending after the bytes that the other machine has. Raises FrameError."""
        if not 0 <= num_bytes <= MAX_LOG_BYTES:
            raise FrameError(f"the other end has {num_bytes} bytes of a log")
        self._num_sent, self._has_news = num_bytes, True

    def clear_events(self, ready: Collection[int]) -> None:
        """Clear the eventfd of the log if it is among the readable descriptors."""
        for event in self.events:
            if event in ready:
                os.eventfd_read(event)
                self._has_news = True

    def send(self, connection: FrameConnection, name: EdgeName) -> None:
        """Send the new entries of the worker's log."""
        if self._own is None or not self._has_news:
            return
        self._has_news = False
        while data := os.pread(self._own, MAX_BYTES[FrameClass.RENDEZVOUS], self._num_sent):
            connection.send(name.header(FrameClass.RENDEZVOUS, data, self._num_sent))
            self._num_sent += len(data)
        for key, value in self._reader.read():
            if key == VERDICT_KEY:
                self.verdict = msgspec.msgpack.decode(value, type=TransportVerdict)

    def receive(self, offset: int, data: bytes) -> None:
        """Append received bytes to the copy of the other worker's log. Raises FrameError."""
        if self._copy is None:
            raise FrameError("the edge has no log")
        if offset != self.num_received_bytes or offset + len(data) > MAX_LOG_BYTES:
            raise FrameError(f"bytes {offset} to {offset + len(data)} of a log do not fit")
        os.pwrite(self._copy, data, offset)


log = logging.getLogger(__name__)

MIN_PAUSE_SECONDS, MAX_PAUSE_SECONDS = 0.05, 1.0
"""First and largest pause between attempts to dial; a random part of it is left out. None comes
before the first attempt, nor after a connection that lasted longer than the next pause."""


class EdgeRefusedError(Exception):
    """The other machine refuses the connection between two stages for good; retries do not help."""


class _SupersededError(Exception):
    """The other end has dialed again, or this end is closed."""


class EdgeEnd(ABC):
    """Base class of one end of a connection between stages on two machines.

    Runs a thread that connects, reconnects after failures and moves the activations of each step.
    """

    def __init__(
        self,
        name: EdgeName,
        command: OpenLinkEdge,
        descriptors: Sequence[int],
        settings: LinkSettings,
    ) -> None:
        """Prepare an end; `start` connects it.

        Args:
            name: identity of the connection.
            command: command that opens it.
            descriptors: file descriptors of the worker's Edge; this end closes them.
            settings: settings of this data mover.
        """
        self.name, self.command = name, command
        self.refusal = ""
        """Reason for which the edge cannot work; empty for none."""
        self._settings = settings
        self._encoding = None if settings.encoding == PLAIN else make_encoding(settings.encoding)
        """Encoding of activations; None for none."""
        self._descriptors = list(descriptors)
        num_first = len(descriptors) - 2 * (command.num_lanes - 1)
        files = [*descriptors[:2], *descriptors[num_first:]]
        self._ring_files = list(zip(files[::2], files[1::2], strict=True))
        """Memory and event of each lane's ring."""
        self._rings: list[Ring | None] = [None] * command.num_lanes
        """The worker's ring of each lane, once the worker has laid it out."""
        self._rendezvous = RendezvousLogs(descriptors[2:num_first])
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._lock = threading.Lock()
        """Protects the three fields that other threads change."""
        self._offered: FrameConnection | None = None
        """Connection that the other end has dialed."""
        self._connection: FrameConnection | None = None
        """Connection in use."""
        self._is_closed = False
        self._num_earlier_bytes = self._num_failures = 0
        self._is_open = self._was_opened = self._is_lost = False
        self._cause = "not connected yet"
        self._disconnected_since = time.monotonic()
        self._pause = 0.0
        """Seconds before the next attempt to dial."""

    @property
    def state(self) -> LinkState:
        """State of the connection for status pages and logs."""
        connection = self._connection
        num_bytes = self._num_earlier_bytes + (connection.num_bytes if connection else 0)
        peer, plain = self.command.peer.node, "tcp" if self._settings.tls is None else "tcp+tls"
        verdict = self._rendezvous.verdict
        transport = verdict.transport if verdict and verdict.transport == "nccl" else plain
        cause = (verdict.cause if verdict else "") if self._is_open else self._cause
        return LinkState(
            self.name.edge,
            peer,
            transport,
            self._is_open,
            num_bytes,
            cause,
            self._num_failures,
            self.command.is_sender,
            encoding=self._settings.encoding,
        )

    def start(self) -> None:
        """Start a thread that connects and moves activations until `close`."""
        threading.Thread(target=self._run, name=f"edge-{self.name.edge}", daemon=True).start()

    def find_refusal(self, certificate: bytes, hello: EdgeHello) -> str:
        """Return why to refuse a connection from another machine; empty to accept it."""
        peer = self.command.peer
        if self.refusal:
            return self.refusal
        if certificate != peer.certificate:
            return f"the certificate is not that of {peer.node}"
        if (hello.node, hello.peer) != (peer.node, self._settings.node):
            return (
                f"{hello.node} expects {hello.peer}, but this is {self._settings.node}, "
                f"which expects {peer.node}"
            )
        if hello.is_sender == self.command.is_sender or self.command.dials:
            return "both ends have the same part"
        if hello.encoding != self._settings.encoding:
            # Trying again does not help: the edge is refused for good.
            self.refusal = (
                f"{hello.node} has --link-encoding {hello.encoding}, {self._settings.node} has "
                f"{self._settings.encoding}: give all machines the same"
            )
        return self.refusal

    def offer(self, connection: FrameConnection) -> None:
        """Use a connection that the other end has opened, instead of an earlier one."""
        with self._lock:
            if self._is_closed:
                connection.close()
                return
            if self._offered is not None:
                self._offered.close()
            self._offered = connection
            if self._connection is not None:
                self._connection.shut_down()
            os.eventfd_write(self._wake, 1)

    def close(self) -> None:
        """End the connection and the thread, which then closes the descriptors."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            if self._connection is not None:
                self._connection.shut_down()
            os.eventfd_write(self._wake, 1)

    @abstractmethod
    def _resume(self, connection: FrameConnection, resume: EdgeResume) -> None:
        """Begin to use a connection on which nothing else has been sent yet."""

    @abstractmethod
    def _signalled_steps(self) -> list[list[int | None]]:
        """Return the steps that each ring has signalled, if this end receives; else nothing."""

    def _attach(self, lane: int) -> Ring | None:
        """Return the worker's ring of a lane; None as long as the worker has not laid it out."""
        ring = self._rings[lane]
        if ring is None:
            ring = self._rings[lane] = Ring.attach(*self._ring_files[lane])
            if ring is not None and not self.command.is_sender:
                ring.begin_relay()
        return ring

    @abstractmethod
    def _on_frame(self, connection: FrameConnection, header: FrameHeader) -> None:
        """Receive the payload of a frame."""

    def _on_events(self, connection: FrameConnection) -> None:
        """Handle the steps that were signalled; called after events of a ring that is sent."""
        raise NotImplementedError("a receiving end has no events")

    def _has_more(self) -> bool:
        """Return whether `_on_writable` has to be called."""
        return False

    def _on_writable(self, connection: FrameConnection) -> None:
        """Send as much as has to be decided at once; called while `_has_more`."""
        raise NotImplementedError("a receiving end has nothing to send")

    def _on_pass(self, connection: FrameConnection) -> float | None:
        """Do what is due; return the seconds until the next call, None for no limit."""
        return None

    def _run(self) -> None:
        try:
            while not self._is_closed:
                self._use_one_connection()
        except Exception as error:
            # The edge cannot work: it is lost, until the parent closes it.
            if not isinstance(error, EdgeRefusedError):
                log.exception("edge %d ends", self.name.edge)
            self.refusal = str(error) or type(error).__name__
            self._report_loss(self.refusal)
            self._wait_until_closed()
        finally:
            with self._lock:
                self._is_closed = True
                if self._offered is not None:
                    self._offered.close()
                for descriptor in (*self._descriptors, self._wake):
                    os.close(descriptor)
                self._descriptors.clear()

    def _use_one_connection(self) -> None:
        connection = self._dial() if self.command.dials else self._await_offer()
        if connection is None:
            return
        begin = time.monotonic()
        try:
            self._serve(connection)
        except _SupersededError:
            self._cause = "the other end connects again"
        except FrameError as error:
            self._cause = str(error)
            self._settings.refusals.add(connection.address, str(error), is_malformed=True)
        except OSError as error:
            self._cause = str(error) or type(error).__name__
        finally:
            with self._lock:
                self._connection = None
                self._num_earlier_bytes += connection.num_bytes
                connection.close()
            if self._is_open:
                self._num_failures += not self._is_closed
                self._is_open, self._is_lost = False, False
                self._disconnected_since = time.monotonic()
            if time.monotonic() - begin > self._pause:
                self._pause = 0.0

    def _serve(self, connection: FrameConnection) -> None:
        """Use a connection until it ends. Raises OSError, FrameError, EdgeRefusedError."""
        if not self.command.dials:
            answer = encode_payload(EdgeAnswer())
            connection.send(self.name.header(FrameClass.ANSWER, answer))
        resume = EdgeResume(self._signalled_steps(), self._rendezvous.num_received_bytes)
        connection.send(self.name.header(FrameClass.RESUME, encode_payload(resume)))
        header, payload = receive_answer(connection)
        self._check_name(header)
        if header.frame_class != FrameClass.RESUME:
            raise FrameError(f"{header.frame_class.name} in place of RESUME")
        peer_resume = decode_payload(payload, EdgeResume)
        self._rendezvous.resume(peer_resume.rendezvous_bytes)
        connection.payload_timeout = None
        self._is_open, self._is_lost, self._cause = True, False, ""
        if not self._was_opened:
            self._was_opened = True
            self._settings.on_opened(self.name)
        self._resume(connection, peer_resume)
        self._pump(connection)

    def _pump(self, connection: FrameConnection) -> None:
        """Send and receive until the connection ends."""
        waiting = select.poll()
        own, events = connection.fileno(), [event for _, event in self._ring_files]
        sources = [own, self._wake, *self._rendezvous.events]
        sources += events if self.command.is_sender else []
        for source in sources:
            waiting.register(source, select.POLLIN)
        is_writing = False
        self._receive_frames(connection)
        while True:
            self._rendezvous.send(connection, self.name)
            seconds = self._on_pass(connection)
            if is_writing != self._has_more():
                is_writing = not is_writing
                waiting.modify(own, select.POLLIN | (select.POLLOUT if is_writing else 0))
            ready = dict(waiting.poll(None if seconds is None else 1e3 * seconds))
            if self._wake in ready:
                os.eventfd_read(self._wake)
                with self._lock:
                    if self._is_closed or self._offered is not None:
                        raise _SupersededError
            if self.command.is_sender and not ready.keys().isdisjoint(events):
                for event in ready.keys() & events:
                    os.eventfd_read(event)
                self._on_events(connection)
            self._rendezvous.clear_events(ready)
            if ready.get(own, 0) & ~select.POLLOUT:
                self._receive_frames(connection)
            if ready.get(own, 0) & select.POLLOUT:
                self._on_writable(connection)

    def _receive_frames(self, connection: FrameConnection) -> None:
        """Handle the frames that have arrived."""
        while True:
            header = connection.try_receive_header()
            if header is None:
                return
            self._check_name(header)
            if header.frame_class == FrameClass.RENDEZVOUS:
                self._rendezvous.receive(header.offset, connection.receive(header.length))
            elif header.frame_class == FrameClass.ANSWER:
                answer = decode_payload(connection.receive(header.length), EdgeAnswer)
                raise EdgeRefusedError(f"{self.command.peer.node} refuses: {answer.cause}")
            else:
                self._on_frame(connection, header)

    def _refuse(self, connection: FrameConnection, cause: str) -> None:
        """Tell the other end that the edge cannot work. Raises EdgeRefusedError."""
        answer = encode_payload(EdgeAnswer(cause, is_final=True))
        connection.send(self.name.header(FrameClass.ANSWER, answer))
        raise EdgeRefusedError(cause)

    def _check_name(self, header: FrameHeader) -> None:
        if difference := self.name.find_difference(header):
            raise FrameError(difference)

    def _dial(self) -> FrameConnection | None:
        """Return a connection that the other end has accepted; None once this end is closed."""
        while not self._is_closed:
            self._check_loss()
            self._sleep(self._pause * random.uniform(0.5, 1))
            self._pause = min(max(2 * self._pause, MIN_PAUSE_SECONDS), MAX_PAUSE_SECONDS)
            try:
                return self._dial_once()
            except ssl.SSLError as error:
                self._cause = describe_tls_error(error)
            except (OSError, ValueError, FrameError) as error:
                self._cause = str(error) or type(error).__name__
        return None

    def _dial_once(self) -> FrameConnection | None:
        peer, settings = self.command.peer, self._settings
        connection = FrameConnection(
            dial(peer.address, settings.congestion, settings.tls, peer.certificate)
        )
        try:
            if not self._adopt(connection):
                return None
            hello = EdgeHello(settings.node, peer.node, self.command.is_sender, settings.encoding)
            with suppress(OSError):
                # A machine that refuses the certificate may have gone; its alert says so.
                connection.send(self.name.header(FrameClass.HELLO, encode_payload(hello)))
            header, payload = receive_answer(connection)
            if header.frame_class != FrameClass.ANSWER:
                raise FrameError(f"{header.frame_class.name} in place of ANSWER")
            answer = decode_payload(payload, EdgeAnswer)
            if answer.is_final:
                raise EdgeRefusedError(f"{peer.node} refuses: {answer.cause}")
            if answer.cause:
                raise ConnectionRefusedError(f"{peer.node}: {answer.cause}")
        except BaseException:
            with self._lock:
                self._connection = None
                connection.close()
            raise
        return connection

    def _await_offer(self) -> FrameConnection | None:
        """Return a connection that the other end has dialed; None once this end is closed."""
        while not self._is_closed:
            with self._lock:
                connection, self._offered = self._offered, None
            if connection is not None and self._adopt(connection):
                return connection
            self._check_loss()
            self._sleep(MAX_PAUSE_SECONDS if not self._is_lost else None)
        return None

    def _adopt(self, connection: FrameConnection) -> bool:
        """Make a connection the one that `close` ends; return False once this end is closed."""
        with self._lock:
            if self._is_closed:
                connection.close()
            else:
                self._connection = connection
            return not self._is_closed

    def _sleep(self, seconds: float | None) -> None:
        """Wait, at most until `close` or `offer`."""
        waiting = select.poll()
        waiting.register(self._wake, select.POLLIN)
        if waiting.poll(None if seconds is None else seconds * 1000) and not self._is_closed:
            os.eventfd_read(self._wake)

    def _wait_until_closed(self) -> None:
        while not self._is_closed:
            self._sleep(None)

    def _check_loss(self) -> None:
        seconds = time.monotonic() - self._disconnected_since
        if seconds > self._settings.lost_seconds and not self._is_lost:
            self._report_loss(f"no connection for {seconds:.0f} s: {self._cause}")

    def _report_loss(self, cause: str) -> None:
        self._is_lost, self._cause = True, cause
        log.warning("edge %d to %s: %s", self.name.edge, self.command.peer.node, cause)
        self._settings.on_lost(self.name, cause)
