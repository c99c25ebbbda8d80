"""Data port: accepts connections, up to their first frame, on one thread.

Until its first frame is valid a connection costs little: few of them are open, for a few seconds,
and no more is read than that frame.
"""

import os
import selectors
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field

from gllm.transport.link.connection import (
    HANDSHAKE_SECONDS,
    configure_socket,
    split_address,
)
from gllm.transport.link.frames import (
    FRAME,
    EdgeHello,
    FrameClass,
    FrameError,
    FrameHeader,
    decode_payload,
    unpack_frame,
)
from gllm.transport.link.settings import CLOSED_EARLY, Refusals

MAX_GUESTS = 64
"""Connections without a first frame; beyond, the oldest one of the address with most is closed."""
_BACKLOG = 256
WRONG_CERTIFICATE = "the certificate is not that of an expected machine"

OnHello = Callable[[socket.socket, str, FrameHeader, EdgeHello], None]
"""Callback that takes ownership of a connection: socket, IP address, first frame's header,
payload."""


@dataclass(eq=False)
class _Guest:
    """Connection whose first frame has not arrived."""

    connection: socket.socket
    address: str
    deadline: float
    has_begun: bool = False
    """True if its bytes are read."""
    needs_handshake: bool = False
    data: bytearray = field(default_factory=bytearray)
    header: FrameHeader | None = None

    def advance(self) -> EdgeHello | None:
        """Read what has arrived; return the first frame's payload once it is complete.

        Raises:
            BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError: more has to arrive.
            OSError: the connection or its handshake has failed.
            FrameError: the first frame is invalid.
        """
        if self.needs_handshake:
            assert isinstance(self.connection, ssl.SSLSocket)
            self.connection.do_handshake()
            self.needs_handshake = False
        while True:
            if self.header is None and len(self.data) == FRAME.size:
                self.header = unpack_frame(self.data)
                if self.header.frame_class not in (FrameClass.HELLO, FrameClass.KV_HELLO):
                    raise FrameError(f"the first frame is {self.header.frame_class.name}")
            size = FRAME.size + (self.header.length if self.header else 0)
            if self.header is not None and len(self.data) == size:
                return decode_payload(bytes(self.data[FRAME.size :]), EdgeHello)
            received = self.connection.recv(size - len(self.data))
            if not received:
                raise ConnectionError(CLOSED_EARLY)
            self.data += received


class Listener:
    """Listening socket for connections from other machines; reads the first message of each.

    One thread serves all connections that have not sent a valid first message yet.
    """

    def __init__(
        self,
        address: str,
        congestion: str | None,
        accepting_context: Callable[[], ssl.SSLContext | None] | None,
        on_hello: OnHello,
        refusals: Refusals,
    ) -> None:
        """Bind an address.

        Args:
            address: HOST:PORT; port 0 for any.
            congestion: TCP congestion control of the connections.
            accepting_context: returns the TLS context for the known peers, or None while there are
                none; the argument is None without TLS.
            on_hello: called on the thread with each valid first message.
            refusals: counts refused connections.

        Raises:
            OSError, ValueError: the address cannot be bound.
        """
        host, port = split_address(address)
        family, *_, target = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        self._listening = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listening.bind(target)
            self._listening.listen(_BACKLOG)
            self._listening.setblocking(False)
        except BaseException:
            self._listening.close()
            raise
        self.port: int = self._listening.getsockname()[1]
        self._congestion, self._accepting_context = congestion, accepting_context
        self._on_hello, self._refusals = on_hello, refusals
        self._guests: dict[_Guest, None] = {}
        self._selector = selectors.DefaultSelector()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._selector.register(self._listening, selectors.EVENT_READ, self._accept)
        self._selector.register(self._wake, selectors.EVENT_READ, self._begin_waiting_guests)
        threading.Thread(target=self._serve, name="listener", daemon=True).start()

    def on_edge_opened(self) -> None:
        """Serve connections that arrived before any peer was known; called on any thread."""
        os.eventfd_write(self._wake, 1)

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select(self._next_timeout()):
                if isinstance(key.data, _Guest):
                    self._advance(key.data)
                else:
                    key.data()
            self._drop_late_guests()

    def _next_timeout(self) -> float | None:
        if not self._guests:
            return None
        return max(0.0, next(iter(self._guests)).deadline - time.monotonic())

    def _accept(self) -> None:
        try:
            connection, peer = self._listening.accept()
        except OSError:
            # The connection has ended already, or no descriptor is left: the next one is tried.
            return
        guest = _Guest(connection, peer[0], time.monotonic() + HANDSHAKE_SECONDS)
        self._guests[guest] = None
        try:
            configure_socket(connection, self._congestion)
            connection.setblocking(False)
        except OSError as error:
            self._refuse(guest, str(error))
            return
        if len(self._guests) > MAX_GUESTS:
            # The newest ones may be members in the middle of a handshake, and few members share an
            # address.
            counts = Counter(waiting.address for waiting in self._guests)
            address, _ = counts.most_common(1)[0]
            oldest = next(waiting for waiting in self._guests if waiting.address == address)
            self._refuse(oldest, f"more than {MAX_GUESTS} connections have sent no frame")
        self._begin(guest)

    def _begin(self, guest: _Guest) -> None:
        """Read from a guest; before the first edge is opened, guests wait for it instead."""
        if self._accepting_context is not None:
            context = self._accepting_context()
            if context is None:
                return
            guest.needs_handshake = True
            try:
                guest.connection = context.wrap_socket(
                    guest.connection, server_side=True, do_handshake_on_connect=False
                )
            except OSError:
                self._refuse(guest, CLOSED_EARLY)
                return
        guest.has_begun = True
        self._selector.register(guest.connection, selectors.EVENT_READ, guest)
        self._advance(guest)

    def _begin_waiting_guests(self) -> None:
        os.eventfd_read(self._wake)
        for guest in [waiting for waiting in self._guests if not waiting.has_begun]:
            self._begin(guest)

    def _advance(self, guest: _Guest) -> None:
        if guest not in self._guests:
            return
        try:
            hello = guest.advance()
        except (BlockingIOError, ssl.SSLWantReadError):
            return
        except ssl.SSLWantWriteError:
            # A handshake is smaller than the send buffer of a connection.
            self._refuse(guest, "the other end does not read")
        except FrameError as error:
            self._refuse(guest, str(error), is_malformed=True)
        except ssl.SSLError as error:
            cause = describe_tls_error(error)
            self._refuse(guest, cause, is_malformed=cause != WRONG_CERTIFICATE)
        except OSError as error:
            is_cut = guest.needs_handshake or guest.data
            cause = f"{CLOSED_EARLY}: {error}" if is_cut else CLOSED_EARLY
            self._refuse(guest, cause, is_malformed=bool(guest.data))
        else:
            if hello is not None and guest.header is not None:
                self._release(guest)
                self._on_hello(guest.connection, guest.address, guest.header, hello)

    def _drop_late_guests(self) -> None:
        now = time.monotonic()
        for guest in [waiting for waiting in self._guests if waiting.deadline <= now]:
            cause = f"no frame within {HANDSHAKE_SECONDS:g} s"
            self._refuse(guest, cause, is_malformed=bool(guest.data))

    def _release(self, guest: _Guest) -> None:
        del self._guests[guest]
        if guest.has_begun:
            self._selector.unregister(guest.connection)

    def _refuse(self, guest: _Guest, cause: str, is_malformed: bool = False) -> None:
        self._release(guest)
        with suppress(OSError):
            # Reset: what the other end has sent is dropped, and nothing remains of the connection.
            linger = (1).to_bytes(4, "little") + bytes(4)
            guest.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
        guest.connection.close()
        self._refusals.add(guest.address, cause, is_malformed)


def describe_tls_error(error: ssl.SSLError) -> str:
    """Return a readable cause of a failed TLS handshake."""
    if isinstance(error, ssl.SSLCertVerificationError) or "ALERT_UNKNOWN_CA" in str(error):
        return WRONG_CERTIFICATE
    if error.reason in ("WRONG_VERSION_NUMBER", "HTTP_REQUEST", "RECORD_LAYER_FAILURE"):
        return "the connection does not use TLS"
    return f"TLS failed: {error.reason or error}"
