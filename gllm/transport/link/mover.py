"""Data mover: the edges of a machine, its data port, and the reports to the parent."""

import logging
import os
import socket
import ssl
import threading
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

import msgspec

from gllm.observability.logs import LogConfig, configure_logging
from gllm.transport.descriptors import DescriptorChannel, DescriptorError
from gllm.transport.link.commands import (
    CheckLink,
    CloseKvCaches,
    CloseLinkEdges,
    ConfigureLink,
    LinkAlive,
    LinkEdgeLost,
    LinkEdgeOpened,
    LinkListening,
    LinkMessage,
    LinkReport,
    OpenKvCaches,
    OpenLinkEdge,
    decode_link_command,
    encode_link_message,
)
from gllm.transport.link.connection import FrameConnection, TlsIdentity, peer_certificate
from gllm.transport.link.edge_end import EdgeEnd
from gllm.transport.link.frames import (
    EdgeAnswer,
    EdgeHello,
    EdgeName,
    EdgeResume,
    FrameClass,
    FrameError,
    FrameHeader,
    RingLayout,
    decode_payload,
    encode_payload,
)
from gllm.transport.link.kv_service import KvService
from gllm.transport.link.listener import Listener
from gllm.transport.link.sender import SendingEnd
from gllm.transport.link.settings import LinkSettings, Refusals
from gllm.transport.link.slots import SlotWriter

_SCRATCH_BYTES = 2**16


class ReceivingEnd(EdgeEnd):
    """Receiving end of a connection between stages: writes activations to the worker's ring.

    Steps that were already received over an earlier connection are skipped.
    """

    _writers: list[SlotWriter | None]
    """Writer of each lane's steps on this connection; None before the lane's LAYOUT."""

    def _resume(self, connection: FrameConnection, resume: EdgeResume) -> None:
        # Steps that were not complete are sent again from their beginning.
        self._writers = [None] * len(self._rings)
        if resume.signalled:
            raise FrameError("RESUME of a sending end names steps")

    def _signalled_steps(self) -> list[list[int | None]]:
        rings = [self._attach(lane) for lane in range(len(self._rings))]
        return [[] if ring is None else ring.signalled_steps for ring in rings]

    def _on_frame(self, connection: FrameConnection, header: FrameHeader) -> None:
        if header.lane >= len(self._rings):
            raise FrameError(f"lane {header.lane} of {len(self._rings)}")
        if header.frame_class == FrameClass.ACTIVATIONS:
            self._receive_activations(connection, header)
        elif header.frame_class == FrameClass.LAYOUT:
            self._check_layout(connection, header.lane, connection.receive(header.length))
        elif header.frame_class == FrameClass.PROBE:
            connection.send(self.name.header(FrameClass.ECHO, b""))
        else:
            raise FrameError(f"{header.frame_class.name} on an open edge")

    def _check_layout(self, connection: FrameConnection, lane: int, payload: bytes) -> None:
        """Compare the rings of both machines. Raises FrameError, EdgeRefusedError."""
        ring, peer = self._attach(lane), decode_payload(payload, RingLayout)
        if ring is None:
            raise FrameError("a step before the worker is ready")
        own = RingLayout.of(ring.shape)
        if own != peer:
            self._refuse(connection, f"the rings differ: {peer} is sent, {own} is expected")
        self._writers[lane] = SlotWriter(ring, self._encoding)

    def _receive_activations(self, connection: FrameConnection, header: FrameHeader) -> None:
        writer = self._writers[header.lane]
        if writer is None:
            raise FrameError("activations before LAYOUT")
        place = writer.place(header)
        if place is not None:
            connection.receive_into(place)
            writer.finish(header)
            return
        left = header.length
        while left:
            left -= len(connection.receive(min(left, _SCRATCH_BYTES)))


log = logging.getLogger(__name__)

REPORT_SECONDS, MIN_REPORT_SECONDS = 1.0, 0.1
"""Interval at which counters are reported, and the least one between two LinkReports."""
LOST_TIMEOUTS = 2
"""Node timeouts without a connection after which an edge is lost."""
MAX_YIELD_SECONDS, _YIELD_PAUSE_SECONDS = 1.0, 1e-3
"""Longest wait of a chunk of KV cache for activations, and interval between two checks, in
seconds."""


class Outbox:
    """Queue of reports to the parent process, which sends them in order from any thread."""

    def __init__(self, channel: DescriptorChannel) -> None:
        self._channel = channel
        self._lock = threading.Lock()
        self._unsent: deque[bytes] = deque()

    def send(self, message: LinkMessage) -> None:
        """Send a message after the queued ones."""
        with self._lock:
            self._unsent.append(encode_link_message(message))
        self.flush()

    def flush(self) -> bool:
        """Send queued messages until the parent does not read any more.

        Returns:
            True if no message is left.
        """
        with self._lock, suppress(DescriptorError):
            while self._unsent:
                self._channel.send(self._unsent[0])
                self._unsent.popleft()
        return not self._unsent


class DataMover:
    """Data mover process (`gllm-link`): transfers activations and KV blocks between machines.

    Its main thread executes the parent's commands.
    """

    def __init__(self, channel: DescriptorChannel) -> None:
        """Serve the parent at the other end of a channel."""
        self._channel, self._outbox = channel, Outbox(channel)
        self._refusals = Refusals()
        self._lock = threading.Lock()
        """Protects the edges."""
        self._edges: dict[tuple[int, int], EdgeEnd] = {}
        """By epoch and number."""
        self._certificates: dict[str, bytes] = {}
        """Certificates of other machines by name. That of a machine without an edge is kept: it may
        dial for the next epoch before this machine has heard of that."""
        self._listener: Listener | None = None
        self._epoch = 0
        """Latest epoch with an edge."""
        self._run = 0
        self._settings: LinkSettings | None = None
        self._accepting: tuple[frozenset[bytes], ssl.SSLContext] | None = None
        """Certificates that are accepted, and the context for them."""
        self._last_report: LinkReport | None = None
        self._is_changed = threading.Event()
        self._kv = KvService(self._outbox.send, lambda: self._settings, self._yield_to_activations)

    def run(self) -> None:
        """Handle the parent's commands until it closes the channel."""
        threading.Thread(target=self._report_changes, name="reports", daemon=True).start()
        with suppress(DescriptorError, OSError):
            while True:
                payload, descriptors = self._channel.receive()
                try:
                    self._handle(payload, descriptors)
                except (msgspec.DecodeError, ValueError) as error:
                    log.error("a command of the parent is invalid: %s", error)
                    for descriptor in descriptors:
                        os.close(descriptor)

    def _handle(self, payload: bytes, descriptors: Sequence[int]) -> None:
        match decode_link_command(payload, descriptors):
            case ConfigureLink() as identity if self._settings is None:
                self._begin(identity, descriptors)
            case ConfigureLink() as identity:
                for descriptor in descriptors:
                    os.close(descriptor)
                self._close_edges(self._epoch)
                with self._lock:
                    self._certificates.clear()
                self._run, self._epoch = identity.run, 0
            case OpenLinkEdge() as command:
                self._open_edge(command, descriptors)
            case CloseLinkEdges(epoch):
                self._close_edges(epoch)
            case OpenKvCaches() | CloseKvCaches() as command:
                self._kv.handle(command, descriptors)
            case CheckLink():
                self._outbox.send(LinkAlive())

    def _begin(self, identity: ConfigureLink, descriptors: Sequence[int]) -> None:
        """Bind the data port and answer."""
        configure_logging(LogConfig(identity.log_level, identity.log_format), "link")
        self._run = identity.run
        tls = TlsIdentity(descriptors[0]) if identity.has_tls else None
        self._settings = LinkSettings(
            identity.node,
            tls,
            identity.congestion,
            identity.policy,
            identity.encoding,
            LOST_TIMEOUTS * identity.node_timeout,
            self._refusals,
            self._on_opened,
            self._on_lost,
            identity.min_bytes_per_second,
        )
        port = 0
        if identity.listen:
            try:
                context = self._accepting_context if tls else None
                if tls is not None and identity.accepts_engines:
                    context = tls.accepting_anyone
                self._listener = Listener(
                    identity.listen, identity.congestion, context, self._on_hello, self._refusals
                )
                port = self._listener.port
            except (OSError, ValueError) as error:
                self._outbox.send(LinkListening(0, f"{identity.listen}: {error}"))
                return
        self._outbox.send(LinkListening(port))

    def _open_edge(self, command: OpenLinkEdge, descriptors: Sequence[int]) -> None:
        if self._settings is None:
            raise ValueError("an edge before the identity")
        key = command.epoch, command.edge
        name = EdgeName(self._run, *key)
        kind = SendingEnd if command.is_sender else ReceivingEnd
        end = kind(name, command, descriptors, self._settings)
        with self._lock:
            previous = self._edges.get(key)
            self._edges[key] = end
            self._certificates[command.peer.node] = command.peer.certificate
            self._epoch = max(self._epoch, command.epoch)
        if previous is not None:
            previous.close()
        end.start()
        if self._listener is not None:
            self._listener.on_edge_opened()
        self._is_changed.set()

    def _close_edges(self, epoch: int) -> None:
        with self._lock:
            keys = [key for key in self._edges if key[0] <= epoch]
            closed = [self._edges.pop(key) for key in keys]
        for end in closed:
            end.close()
        self._is_changed.set()

    def _accepting_context(self) -> ssl.SSLContext | None:
        """Return the context for connections of the machines so far; None for no machine."""
        with self._lock:
            certificates = frozenset(self._certificates.values())
        if not certificates or self._settings is None or self._settings.tls is None:
            return None
        if self._accepting is None or self._accepting[0] != certificates:
            self._accepting = certificates, self._settings.tls.accepting(sorted(certificates))
        return self._accepting[1]

    def _on_hello(
        self, connection: socket.socket, address: str, header: FrameHeader, hello: EdgeHello
    ) -> None:
        """Pass a connection on to its edge, or refuse it; called on the listener's thread."""
        if header.frame_class == FrameClass.KV_HELLO:
            self._kv.adopt(connection, address)
            return
        with self._lock:
            end = self._edges.get((header.epoch, header.edge))
            is_early = end is None and header.epoch >= self._epoch
        if header.run != self._run:
            cause, is_early = f"its run is {header.run}, here is run {self._run}", False
        elif end is None:
            cause = f"edge {header.edge} of epoch {header.epoch} is not open here"
        else:
            cause = end.find_refusal(peer_certificate(connection), hello)
        frames = FrameConnection(connection)
        if end is not None and not cause:
            end.offer(frames)
            return
        if not is_early:
            self._refusals.add(address, cause)
        is_final = end is not None and end.refusal != ""
        answer = encode_payload(EdgeAnswer(cause, is_final))
        name = EdgeName(header.run, header.epoch, header.edge)
        with suppress(OSError):
            frames.send(name.header(FrameClass.ANSWER, answer))
        frames.close()

    def _yield_to_activations(self) -> None:
        """Wait while steps wait for a connection: a KV cache is less urgent than all of them."""
        deadline = time.monotonic() + MAX_YIELD_SECONDS
        while time.monotonic() < deadline:
            with self._lock:
                ends = list(self._edges.values())
            if not any(end.state.num_queued_bytes for end in ends):
                return
            time.sleep(_YIELD_PAUSE_SECONDS)

    def _on_opened(self, name: EdgeName) -> None:
        self._outbox.send(LinkEdgeOpened(name.epoch, name.edge))
        self._is_changed.set()

    def _on_lost(self, name: EdgeName, cause: str) -> None:
        self._outbox.send(LinkEdgeLost(name.epoch, name.edge, cause))
        self._is_changed.set()

    def _report_changes(self) -> None:
        """Send a report soon after each change, and each second in which a counter has changed."""
        pause = threading.Event()
        while True:
            self._is_changed.wait(REPORT_SECONDS if self._settings else None)
            self._is_changed.clear()
            with self._lock:
                ends = list(self._edges.values())
            report = LinkReport([end.state for end in ends], *self._refusals.snapshot())
            # A parent that does not read gets the last report alone, once it does.
            if self._outbox.flush() and report != self._last_report:
                self._last_report = report
                self._outbox.send(report)
            pause.wait(MIN_REPORT_SECONDS)
