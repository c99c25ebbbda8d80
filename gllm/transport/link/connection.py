"""Data connections: sockets, TCP options and measurements, TLS with pinned certificates, frames."""

import select
import socket
import ssl
import struct
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from math import isinf
from typing import NamedTuple

from gllm.transport.link.frames import FRAME, FrameError, FrameHeader, unpack_frame

TCP_NOTSENT_LOWAT = 25
SO_MAX_PACING_RATE = 47
_UNPACED = 2**64 - 1
_INFO = struct.Struct("<8B24I4Q6I4Q2I2Q")
"""The kernel's struct tcp_info up to `tcpi_bytes_retrans` (Linux 4.19)."""
_APP_LIMITED_BYTE, _APP_LIMITED_BIT = 7, 1
_SEND_MSS, _UNACKED, _ROUND_TRIP, _WINDOW = 10, 12, 23, 26
_UNSENT, _DELIVERY_RATE, _DELIVERED = 38, 42, 46
_BUSY, _RECEIVER_LIMITED, _BUFFER_LIMITED = 43, 44, 45
_BYTES_SENT, _BYTES_RETRANSMITTED = 48, 49
_MICROSECONDS = 1e-6


class TcpInfo(NamedTuple):
    """TCP statistics of the sending direction of a connection, read from the kernel's tcp_info."""

    bytes_per_second: float
    """Delivery rate measured by the kernel over the latest round trip; 0 before the first one."""
    is_app_limited: bool
    """True if too little data to send limited the rate, so that it does not measure the network."""
    round_trip_seconds: float
    """Smoothed round-trip time in seconds."""
    segment_bytes: int
    """Largest payload of a TCP segment in bytes."""
    window_bytes: int
    """Congestion window in bytes."""
    unacknowledged_bytes: int
    """Bytes sent but not acknowledged, in whole segments."""
    unsent_bytes: int
    num_delivered: int
    """Number of segments that the receiver has acknowledged."""
    num_sent_bytes: int
    """Bytes sent so far, including retransmissions."""
    num_retransmitted_bytes: int
    busy_seconds: float = 0.0
    """Time for which bytes were unsent or not acknowledged, by the kernel's clock."""
    limited_seconds: float = 0.0
    """Part of it in which the receiver's window or the own send buffer was the limit."""


HANDSHAKE_SECONDS = 5.0
"""Limit until the first frame has arrived."""
CONNECT_SECONDS = 2.0
"""Limit for TCP; a later attempt finds a link that is back sooner than SYNs that are repeated."""
_USER_TIMEOUT_MILLISECONDS = 5000
"""Time after which a connection ends that does not get its bytes through."""
_KEEPALIVE = ((socket.TCP_KEEPIDLE, 2), (socket.TCP_KEEPINTVL, 1), (socket.TCP_KEEPCNT, 3))
"""Seconds without traffic before the first probe, seconds between two, and their number."""
_JOINED_BYTES = 2**16
"""Largest parts that are copied into one write: one TLS record, one packet."""


def split_address(address: str) -> tuple[str, int]:
    """Split HOST:PORT or [IPV6]:PORT into host and port. Raises ValueError."""
    host, separator, port = address.rpartition(":")
    if not separator or not port.isdecimal() or int(port) >= 2**16:
        raise ValueError(f"{address} is not HOST:PORT")
    return host.removeprefix("[").removesuffix("]"), int(port)


def configure_socket(connection: socket.socket, congestion: str | None) -> None:
    """Set TCP_NODELAY, keepalive, timeout and congestion control of a data connection.

    Raises OSError if the kernel does not have the congestion control.
    """
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    timeout = _USER_TIMEOUT_MILLISECONDS
    for option, value in (*_KEEPALIVE, (socket.TCP_USER_TIMEOUT, timeout)):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
    if congestion:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())


class TlsIdentity:
    """Certificate and key of this machine; creates TLS contexts that pin peer certificates."""

    def __init__(self, descriptor: int) -> None:
        """Use the certificate file of a NodeCertificate."""
        self._descriptor = descriptor
        self._open_context: ssl.SSLContext | None = None
        """Context that accepts clients without a certificate; made once, since anyone may dial."""

    def accepting(self, certificates: Iterable[bytes]) -> ssl.SSLContext:
        """Return a server TLS context that accepts clients with one of the certificates, in DER.

        Invalid certificates are ignored: machines that announce them cannot connect.
        """
        context = self._make_accepting()
        # Certificates carry no host names: they are compared as a whole.
        context.verify_mode = ssl.CERT_REQUIRED
        for certificate in certificates:
            with suppress(ssl.SSLError, ValueError):
                context.load_verify_locations(cadata=certificate)
        return context

    def accepting_anyone(self) -> ssl.SSLContext:
        """Return a server TLS context that accepts clients without a certificate."""
        if self._open_context is None:
            self._open_context = self._make_accepting()
        return self._open_context

    def _make_accepting(self) -> ssl.SSLContext:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        # Tickets would arrive beside the frames, and no session is ever resumed.
        context.num_tickets = 0
        context.load_cert_chain(f"/proc/self/fd/{self._descriptor}")
        return context

    def dialing(self, certificate: bytes) -> ssl.SSLContext:
        """Return a client TLS context that accepts one server certificate and sends this machine's.

        Raises:
            ssl.SSLError, ValueError: the certificate is invalid.
        """
        context = create_dialing_context(certificate)
        context.load_cert_chain(f"/proc/self/fd/{self._descriptor}")
        return context


def create_dialing_context(certificate: bytes) -> ssl.SSLContext:
    """Return a client TLS context that accepts one server certificate and sends none itself.

    Raises:
        ssl.SSLError, ValueError: the certificate is invalid.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    # Certificates carry no host names: they are compared as a whole.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.load_verify_locations(cadata=certificate)
    return context


def peer_certificate(connection: socket.socket) -> bytes:
    """Return the certificate of the other end in DER; empty without TLS."""
    if isinstance(connection, ssl.SSLSocket):
        return connection.getpeercert(binary_form=True) or b""
    return b""


def dial(
    address: str, congestion: str | None, tls: TlsIdentity | None, certificate: bytes
) -> socket.socket:
    """Open a TCP connection to another machine, with TLS if certificates are used.

    Args:
        address: HOST:PORT of the other machine's data port.
        congestion: TCP congestion control; None for the system's default.
        tls: certificate and key of this machine; None to send no certificate.
        certificate: expected certificate of the other machine in DER; empty without TLS.

    Raises:
        OSError: the connection failed, or the other end has another certificate.
        ValueError: the address is invalid.
    """
    connection = socket.create_connection(split_address(address), CONNECT_SECONDS)
    try:
        configure_socket(connection, congestion)
        connection.settimeout(HANDSHAKE_SECONDS)
        if tls is None and not certificate:
            return connection
        context = create_dialing_context(certificate) if tls is None else tls.dialing(certificate)
        secured = context.wrap_socket(connection)
    except BaseException:
        connection.close()
        raise
    if peer_certificate(secured) != certificate:
        secured.close()
        raise OSError("the other end has another certificate")
    return secured


class FrameConnection:
    """TCP or TLS connection that sends and receives messages with a header (frames).

    Used by one thread, except `shut_down`.
    """

    def __init__(self, connection: socket.socket) -> None:
        """Use a connected socket."""
        self._socket = connection
        self._header = bytearray(FRAME.size)
        self._timeout = connection.gettimeout()
        self.payload_timeout: float | None = HANDSHAKE_SECONDS
        """Limit of a wait for the rest of a frame; None once the edge is open."""
        self.num_bytes = 0
        """Bytes sent and received."""
        self.address = "an unknown address"
        """IP address of the other end."""
        with suppress(OSError):
            self.address = connection.getpeername()[0]

    def fileno(self) -> int:
        """Return the descriptor, to wait for readable bytes."""
        return self._socket.fileno()

    def send(self, *parts: bytes | memoryview) -> None:
        """Send bytes; waits as long as the other end does not read. Raises OSError."""
        self._set_timeout(None)
        size = sum(len(part) for part in parts)
        for part in [b"".join(parts)] if size <= _JOINED_BYTES else parts:
            self._socket.sendall(part)
        self.num_bytes += size

    def send_watched(self, on_resumed: Callable[[], None], *parts: bytes | memoryview) -> None:
        """Send bytes as `send`; call a function each time before the kernel gets more of them.

        A thread that waits within one system call cannot know whether the kernel ran out of bytes.
        Raises OSError.
        """
        self._set_timeout(0)
        size = sum(len(part) for part in parts)
        for part in [b"".join(parts)] if size <= _JOINED_BYTES else parts:
            view = memoryview(part).cast("B")
            while view:
                on_resumed()
                try:
                    view = view[self._socket.send(view) :]
                    continue
                except (BlockingIOError, ssl.SSLWantWriteError):
                    pass
                waiting = select.poll()
                waiting.register(self._socket, select.POLLOUT)
                waiting.poll()
        self.num_bytes += size

    def read_tcp_info(self) -> TcpInfo | None:
        """Return TCP's measurements; None if the system has none. Raises OSError."""
        data = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
        if len(data) < _INFO.size:
            return None
        fields = _INFO.unpack(data)
        segment_bytes = fields[_SEND_MSS]
        return TcpInfo(
            float(fields[_DELIVERY_RATE]),
            bool(fields[_APP_LIMITED_BYTE] & _APP_LIMITED_BIT),
            fields[_ROUND_TRIP] * _MICROSECONDS,
            segment_bytes,
            fields[_WINDOW] * segment_bytes,
            fields[_UNACKED] * segment_bytes,
            fields[_UNSENT],
            fields[_DELIVERED],
            fields[_BYTES_SENT],
            fields[_BYTES_RETRANSMITTED],
            fields[_BUSY] * _MICROSECONDS,
            (fields[_RECEIVER_LIMITED] + fields[_BUFFER_LIMITED]) * _MICROSECONDS,
        )

    def set_pacing(self, bytes_per_second: float) -> None:
        """Limit the rate at which packets leave; infinite for no limit. Raises OSError."""
        value = _UNPACED if isinf(bytes_per_second) else int(bytes_per_second)
        self._socket.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, value.to_bytes(8, "little"))

    def set_unsent_limit(self, num_bytes: int) -> None:
        """Limit the unsent bytes in the kernel's buffer (TCP_NOTSENT_LOWAT). Raises OSError.

        The connection is writable while the kernel has fewer bytes.
        """
        self._socket.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, num_bytes)

    def try_receive_header(self) -> FrameHeader | None:
        """Return the header of a frame that has begun to arrive; None if none has.

        Raises:
            OSError: the connection has ended.
            FrameError: the header is invalid.
        """
        view = memoryview(self._header)
        self._set_timeout(0)
        try:
            size = self._socket.recv_into(view)
        except (BlockingIOError, ssl.SSLWantReadError):
            return None
        self._check_end(size)
        self._receive_rest(view[size:])
        self.num_bytes += len(view)
        return unpack_frame(view)

    def receive_header(self, timeout: float) -> FrameHeader:
        """Wait for the header of a frame. Raises OSError, FrameError."""
        end = time.monotonic() + timeout
        while (header := self.try_receive_header()) is None:
            left = end - time.monotonic()
            if left <= 0:
                raise TimeoutError("the other end does not answer")
            waiting = select.poll()
            waiting.register(self._socket, select.POLLIN)
            waiting.poll(left * 1000)
        return header

    def receive_into(self, view: memoryview) -> None:
        """Fill the buffer with received bytes. Raises OSError."""
        self._receive_rest(view)
        self.num_bytes += len(view)

    def receive(self, length: int) -> bytes:
        """Return exactly `length` bytes. Raises OSError."""
        data = bytearray(length)
        self.receive_into(memoryview(data))
        return bytes(data)

    def shut_down(self) -> None:
        """End the connection; waiting threads raise an error. Called on any thread."""
        with suppress(OSError):
            # Not the method of SSLSocket, which would go on without encryption.
            socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()

    def _receive_rest(self, view: memoryview) -> None:
        while view:
            try:
                size = self._socket.recv_into(view)
            except (BlockingIOError, ssl.SSLWantReadError):
                self._set_timeout(self.payload_timeout)
                continue
            self._check_end(size)
            view = view[size:]

    def _set_timeout(self, seconds: float | None) -> None:
        # Each call is a system call, and most small frames need none.
        if seconds != self._timeout:
            self._timeout = seconds
            self._socket.settimeout(seconds)

    def _check_end(self, size: int) -> None:
        if size == 0:
            raise ConnectionError("the other end has closed the connection")


def receive_answer(connection: FrameConnection) -> tuple[FrameHeader, bytes]:
    """Wait for a handshake message; return header and payload. Raises OSError, FrameError."""
    header = connection.receive_header(HANDSHAKE_SECONDS)
    if not header.frame_class:
        raise FrameError("activations before the edge is open")
    return header, connection.receive(header.length)
