"""Messages with open file descriptors between the parent and a worker.

Each worker has a pair of connected sockets to its parent, which keep the boundaries of messages
(SOCK_SEQPACKET). The receiver of a message gets descriptors of its own for the same open files; the
sender may close its ones at once. This module imports no torch.
"""

import os
import socket
import struct
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress

MAX_PART_BYTES = 2**16
"""Bytes of one part of a message; the kernel sends a part as a whole or not at all."""
MAX_DESCRIPTORS = 253
"""Descriptors per message; the kernel permits no more."""

_HEADER = struct.Struct("<I")
"""Number of parts that follow."""


class DescriptorError(Exception):
    """A message with file descriptors could not be sent to or received from another process."""


class DescriptorChannel:
    """One end of a Unix socket pair; sends and receives messages with open file descriptors."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    @classmethod
    def from_descriptor(cls, descriptor: int) -> "DescriptorChannel":
        """Return the channel for a socket descriptor that this process has inherited.

        The descriptor is made non-inheritable, so child processes of this one do not get it.
        """
        connection = socket.socket(fileno=descriptor)
        connection.set_inheritable(False)
        return cls(connection)

    def fileno(self) -> int:
        """Return the descriptor of this end; it becomes readable when a message arrives."""
        return self._socket.fileno()

    def send(
        self, payload: bytes, descriptors: Sequence[int] = (), should_wait: bool = False
    ) -> None:
        """Send a message with file descriptors.

        Args:
            payload: bytes of the message.
            descriptors: file descriptors to send; they remain open in this process.
            should_wait: True to wait while the other end does not read; False to fail.

        Raises:
            DescriptorError: the other end is closed or has not read for long.
        """
        if len(descriptors) > MAX_DESCRIPTORS:
            raise DescriptorError(f"{len(descriptors)} descriptors are too many for a message")
        parts = [
            payload[begin : begin + MAX_PART_BYTES]
            for begin in range(0, len(payload), MAX_PART_BYTES)
        ] or [b""]
        try:
            for number, part in enumerate(parts, start=1):
                data = [_HEADER.pack(len(parts) - number), part]
                sent = array("i", descriptors if number == len(parts) else ())
                rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, sent)] if sent else []
                # Not `socket.send_fds`, which ignores the flags.
                self._socket.sendmsg(data, rights, 0 if should_wait else socket.MSG_DONTWAIT)
        except OSError as error:
            raise DescriptorError(f"a message to a process cannot be sent: {error}") from error

    def receive(self) -> tuple[bytes, list[int]]:
        """Wait for a message; return its bytes and its file descriptors.

        The caller closes the descriptors; child processes do not inherit them.

        Raises:
            DescriptorError: the other end is closed.
        """
        payload, num_left = b"", 1
        received = array("i")
        space = socket.CMSG_LEN(MAX_DESCRIPTORS * received.itemsize)
        while num_left:
            data, rights, flags, _ = self._socket.recvmsg(
                _HEADER.size + MAX_PART_BYTES, space, socket.MSG_CMSG_CLOEXEC
            )
            for _, _, sent in rights:
                received.frombytes(sent)
            if not data:
                raise DescriptorError("the process at the other end has closed its socket")
            if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
                raise DescriptorError("a message was truncated: no descriptors are left")
            (num_left,) = _HEADER.unpack_from(data)
            payload += data[_HEADER.size :]
        return payload, received.tolist()

    def shut_down(self) -> None:
        """End the connection in both directions; waiting reads return. Called on any thread."""
        with suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end."""
        self._socket.close()


def create_channels() -> tuple[DescriptorChannel, DescriptorChannel]:
    """Create a Unix socket pair (SOCK_SEQPACKET) and return its two ends, not inheritable."""
    ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return DescriptorChannel(ends[0]), DescriptorChannel(ends[1])


def create_descriptors(*create: Callable[[], int]) -> list[int]:
    """Call functions that create file descriptors; return all descriptors, or none on an error.

    Raises:
        OSError: A function failed; the descriptors created before it are closed.
    """
    descriptors: list[int] = []
    try:
        for function in create:
            descriptors.append(function())
    except OSError:
        for descriptor in descriptors:
            os.close(descriptor)
        raise
    return descriptors
