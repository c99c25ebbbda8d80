"""Frames of a connection between two KV movers.

The receiver of a KV cache sends TICKET and READ. The owner answers with what the backend needs,
and at the end, asked by CONFIRM, with CONFIRMED. It may send REFUSE in place of any answer. A
connection serves one READ after another. The owner stores nothing of a READ before it has found the
ticket. If a READ is per layer, READY precedes its parts, and it may be answered for its first
tokens only: see part_gate.
"""

import os
import socket
import ssl
import struct
import time
from collections.abc import Callable
from enum import IntEnum
from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta
from numpy.typing import NDArray

from gllm.messages.handoff import Ticket
from gllm.messages.kv_layout import BlockId
from gllm.messages.kv_transfer import TokenCount

_MAGIC, _VERSION = b"gK", 2
_HEADER = struct.Struct("!2sBBI")
"""Magic, version, kind, bytes of the payload."""
RUN_HEADER = struct.Struct("!III")
"""Begin of RUN: index of the part in READ, first token, number of tokens."""
MAX_RUN_BYTES = 2**24
_DISCARD_BYTES = 2**16
"""Bytes of a payload that are read at once if the payload is discarded."""
TICK_SECONDS = 0.05
"""Interval at which a wait for bytes checks whether it was cancelled."""

_Index = Annotated[int, Meta(ge=0, lt=2**31)]


class KvFrameError(Exception):
    """A message of another engine's KV transfer process is invalid; the connection is closed."""


class KvTransferError(Exception):
    """A KV transfer failed or was refused; the receiving engine computes the tokens itself."""


class KvFrameKind(IntEnum):
    """Type of a message between the processes that transfer KV blocks for two engines."""

    READ = 1
    GRANT = 2
    """The receiver may read the blocks by itself, from shared memory or by RDMA."""
    RUN = 3
    """Keys and values of consecutive tokens."""
    CONFIRM = 4
    CONFIRMED = 5
    REFUSE = 6
    READY = 7
    """Number of tokens and head ranges that are computed, if the request is layer by layer."""
    TICKET = 8
    """Permission to read the blocks of the READ that follows."""


_MAX_BYTES = {
    KvFrameKind.READ: 2**20,
    KvFrameKind.GRANT: 2**22,
    KvFrameKind.RUN: MAX_RUN_BYTES,
    KvFrameKind.CONFIRM: 0,
    KvFrameKind.CONFIRMED: 16,
    KvFrameKind.REFUSE: 4096,
    KvFrameKind.READY: 8,
    KvFrameKind.TICKET: 32,
}


class ReadPart(msgspec.Struct, frozen=True, array_like=True):
    """A range of KV heads of one layer to read from one worker of a machine."""

    place: _Index
    """Index of the worker in KvMachine.layouts."""
    layer: _Index
    first_head: _Index
    num_heads: Annotated[int, Meta(ge=1, lt=2**31)]

    @property
    def heads(self) -> range:
        """Range of KV heads, by their indices in the model."""
        return range(self.first_head, self.first_head + self.num_heads)


class ReadTicket(msgspec.Struct, frozen=True, array_like=True):
    """Payload of a TICKET message: permits the READ that follows."""

    ticket: Ticket
    reader: Ticket
    """Random number of the fetch; only the first fetch that uses a ticket may read its blocks."""
    num_readers: Annotated[int, Meta(ge=1, lt=2**16)] = 1
    """Machines of the receiving engine that read from this machine, each with a connection of its
    own and the same `reader`. The ticket ends once all of them have confirmed the last token."""


class ReadRequest(msgspec.Struct, frozen=True, array_like=True):
    """Payload of a READ message: asks another engine for the KV of some tokens, layers, heads."""

    first_token: TokenCount
    num_tokens: Annotated[int, Meta(ge=1, lt=2**31)]
    backend: str
    encoding: str
    """Encoding of keys and values on the network: a name of LINK_ENCODINGS."""
    parts: Annotated[list[ReadPart], Meta(min_length=1, max_length=2**14)]
    is_per_layer: bool = False
    """True to read layers while the prefill is still running; READY messages report the computed
    ones. The answer may cover only the first of the tokens."""


class ReadGrant(msgspec.Struct, frozen=True, array_like=True):
    """Payload of a GRANT message: block ids that the receiver reads by shared memory or RDMA."""

    block_ids: list[BlockId]
    """Blocks of the sequence, from its first token on."""
    details: bytes = b""
    """Data for the backend, for example its memory addresses."""


class ReadConfirmed(msgspec.Struct, frozen=True, array_like=True):
    """Payload of a CONFIRMED message: True if the blocks stayed reserved during the transfer."""

    is_held: bool
    """True if the blocks have not been freed, so that the received contents are valid."""


_Payload = TypeVar("_Payload", ReadTicket, ReadRequest, ReadGrant, ReadConfirmed)
_encoder = msgspec.msgpack.Encoder()


class KvConnection:
    """Connection between the processes that transfer KV blocks for two engines.

    Sends and receives typed messages. Used by one thread, except `shut_down`.
    """

    def __init__(
        self,
        connection: socket.socket,
        check: Callable[[], None] | None = None,
        idle_seconds: float = float("inf"),
    ) -> None:
        """Use a connected socket.

        Args:
            connection: TCP, TLS or a Unix socket.
            check: Called while nothing arrives; raises an error to end the wait.
            idle_seconds: Longest wait for the next message to begin.
        """
        self.socket = connection
        self._check = check or (lambda: None)
        self._idle_seconds = idle_seconds
        self._timeout = 30.0
        """Longest wait for the rest of a frame, and for the other end to read."""
        connection.settimeout(TICK_SECONDS)

    def send(self, kind: KvFrameKind, *parts: bytes | memoryview) -> None:
        """Send a frame. Raises OSError."""
        size = sum(len(part) for part in parts)
        self._send_all(_HEADER.pack(_MAGIC, _VERSION, kind, size))
        for part in parts:
            self._send_all(part)

    def send_struct(
        self, kind: KvFrameKind, payload: ReadTicket | ReadRequest | ReadGrant | ReadConfirmed
    ) -> None:
        """Send a frame with a struct. Raises OSError."""
        self.send(kind, _encoder.encode(payload))

    def receive(self, *expected: KvFrameKind) -> tuple[KvFrameKind, bytearray]:
        """Wait for a frame; return its kind and payload.

        Raises:
            KvFrameError: The frame is invalid or of another kind.
            KvTransferError: The other end refuses.
            OSError: The connection has ended.
        """
        kind, size = self._receive_header(*expected)
        payload = self._receive_all(size, is_first=False)
        if kind == KvFrameKind.REFUSE and kind not in expected:
            raise KvTransferError(f"the other engine refuses: {payload.decode(errors='replace')}")
        return kind, payload

    def discard(self, expected: KvFrameKind) -> None:
        """Wait for a frame and drop its payload, of which little is stored; errors as `receive`."""
        _, size = self._receive_header(expected)
        while size:
            size -= len(self._receive_all(min(size, _DISCARD_BYTES), is_first=False))

    def receive_struct(self, kind: KvFrameKind, payload: type[_Payload]) -> _Payload:
        """Wait for a frame with a struct; errors as in `receive`."""
        data = self.receive(kind)[1]
        try:
            return msgspec.msgpack.decode(data, type=payload)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise KvFrameError(f"the payload of a frame is invalid: {error}") from error

    def receive_run(self) -> tuple[int, int, int, NDArray[np.uint8]]:
        """Wait for keys and values; return part index, first token, number of tokens and bytes."""
        _, payload = self.receive(KvFrameKind.RUN)
        if len(payload) < RUN_HEADER.size:
            raise KvFrameError(f"a run of {len(payload)} bytes")
        part, first, count = RUN_HEADER.unpack_from(payload)
        return part, first, count, np.frombuffer(payload, np.uint8, offset=RUN_HEADER.size)

    def receive_descriptors(self, num_descriptors: int) -> list[int]:
        """Wait for the file descriptors that follow a frame on a Unix socket.

        Raises:
            KvFrameError: Another number of descriptors has arrived.
            OSError: The connection has ended.
        """
        if self.socket.family != socket.AF_UNIX:
            raise KvFrameError("shared memory needs a Unix socket")
        end = time.monotonic() + self._timeout
        while True:
            try:
                data, descriptors, _, _ = socket.recv_fds(self.socket, 1, num_descriptors)
                break
            except TimeoutError:
                self._wait(end)
        if len(data) != 1 or len(descriptors) != num_descriptors:
            for descriptor in descriptors:
                os.close(descriptor)
            raise KvFrameError(f"{len(descriptors)} descriptors of {num_descriptors} have arrived")
        return descriptors

    def refuse(self, cause: str) -> None:
        """Send REFUSE with a cause. Raises OSError."""
        self.send(KvFrameKind.REFUSE, cause.encode()[:1024])

    def shut_down(self) -> None:
        """End the connection; callable on any thread."""
        try:
            # Not the method of SSLSocket, which would go on without encryption.
            socket.socket.shutdown(self.socket, socket.SHUT_RDWR)
        except OSError:
            return

    def close(self) -> None:
        """Close the socket."""
        self.socket.close()

    def _receive_header(self, *expected: KvFrameKind) -> tuple[KvFrameKind, int]:
        """Wait for the header of a frame; return its kind and the size of its payload in bytes."""
        header = self._receive_all(_HEADER.size, is_first=True)
        magic, version, number, size = _HEADER.unpack(header)
        if magic != _MAGIC or version != _VERSION:
            raise KvFrameError("the bytes are no frame of a KV mover of this version")
        try:
            kind = KvFrameKind(number)
        except ValueError:
            raise KvFrameError(f"the frame has the unknown kind {number}") from None
        if size > _MAX_BYTES[kind]:
            raise KvFrameError(f"a frame {kind.name} has {size} bytes")
        if kind not in (*expected, KvFrameKind.REFUSE):
            raise KvFrameError(f"{kind.name} at the wrong time")
        return kind, size

    def _send_all(self, data: bytes | memoryview) -> None:
        view, end = memoryview(data).cast("B"), time.monotonic() + self._timeout
        while view:
            try:
                view = view[self.socket.send(view) :]
                end = time.monotonic() + self._timeout
            except (TimeoutError, ssl.SSLWantWriteError):
                self._wait(end)

    def _receive_all(self, size: int, is_first: bool) -> bytearray:
        data = bytearray(size)
        begin = time.monotonic()
        view, end = memoryview(data), begin + self._timeout
        while view:
            try:
                received = self.socket.recv_into(view)
            except (TimeoutError, ssl.SSLWantReadError):
                # A connection may be idle between two frames, but not in the middle of one.
                is_idle = is_first and len(view) == size
                self._wait(begin + self._idle_seconds if is_idle else end)
                continue
            if not received:
                raise ConnectionError("the other end has closed the connection")
            view = view[received:]
        return data

    def _wait(self, end: float) -> None:
        """Check for the end of a wait. Raises TimeoutError or the error of `check`."""
        self._check()
        if time.monotonic() > end:
            raise TimeoutError("the other end does not go on")
