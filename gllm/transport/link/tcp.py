"""Options and measurements of TCP that Python's socket module does not name."""

import socket
import struct
from math import isinf
from typing import NamedTuple

TCP_NOTSENT_LOWAT = 25
SO_MAX_PACING_RATE = 47
_UNPACED = 2**64 - 1
_INFO = struct.Struct("<8B24I4Q6I4Q2I2Q")
"""The kernel's struct tcp_info up to `tcpi_bytes_retrans` (Linux 4.19)."""
_APP_LIMITED_BYTE, _APP_LIMITED_BIT = 7, 1
_SEND_MSS, _UNACKED, _ROUND_TRIP, _WINDOW = 10, 12, 23, 26
_UNSENT, _MIN_ROUND_TRIP, _DELIVERY_RATE, _DELIVERED = 38, 39, 42, 46
_BYTES_SENT, _BYTES_RETRANSMITTED = 48, 49
_MICROSECONDS = 1e-6
_NO_ROUND_TRIP = 2**32 - 1


class TcpInfo(NamedTuple):
    """State of a connection's sending direction."""

    bytes_per_second: float
    """Delivery rate of the latest round trip; 0 before the first one."""
    is_app_limited: bool
    """True if the sender limited the rate, so that it is no measure of the network."""
    round_trip_seconds: float
    """Smoothed."""
    min_round_trip_seconds: float | None
    """Least of the connection; None before the first one."""
    segment_bytes: int
    """Largest segment."""
    window_bytes: int
    """Congestion window."""
    unacknowledged_bytes: int
    """Bytes on their way, in whole segments."""
    unsent_bytes: int
    num_delivered: int
    """Segments that have arrived."""
    num_sent_bytes: int
    """Bytes of all transmissions so far."""
    num_retransmitted_bytes: int


def read_tcp_info(connection: socket.socket) -> TcpInfo | None:
    """Return the state of a connection; None if the system does not report it.

    Raises:
        OSError: the connection is closed.
    """
    data = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO.size)
    if len(data) < _INFO.size:
        return None
    fields = _INFO.unpack(data)
    segment_bytes, min_round_trip = fields[_SEND_MSS], fields[_MIN_ROUND_TRIP]
    return TcpInfo(
        float(fields[_DELIVERY_RATE]),
        bool(fields[_APP_LIMITED_BYTE] & _APP_LIMITED_BIT),
        fields[_ROUND_TRIP] * _MICROSECONDS,
        None if min_round_trip == _NO_ROUND_TRIP else min_round_trip * _MICROSECONDS,
        segment_bytes,
        fields[_WINDOW] * segment_bytes,
        fields[_UNACKED] * segment_bytes,
        fields[_UNSENT],
        fields[_DELIVERED],
        fields[_BYTES_SENT],
        fields[_BYTES_RETRANSMITTED],
    )


def set_pacing(connection: socket.socket, bytes_per_second: float) -> None:
    """Limit the rate at which packets leave; infinite for no limit. Raises OSError."""
    value = _UNPACED if isinf(bytes_per_second) else int(bytes_per_second)
    connection.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, value.to_bytes(8, "little"))


def set_unsent_limit(connection: socket.socket, num_bytes: int) -> None:
    """Let the kernel hold few bytes that are not on their way yet. Raises OSError.

    Args:
        connection: is writable while the kernel holds fewer bytes.
        num_bytes: this number.
    """
    connection.setsockopt(socket.IPPROTO_TCP, TCP_NOTSENT_LOWAT, num_bytes)
