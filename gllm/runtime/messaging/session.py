"""Sessions of messages between two processes: numbering, epochs, large messages.

A session is one connection's lifetime. Its frames have a header with the run (a start of the head
process), the epoch (an engine's life is a row of them), a number that counts up by one, and
the number of parts that follow. A gap or a repetition means that the transport failed, which ends
the session. This module has no sockets and no clock.
"""

import struct
from collections.abc import Callable

from gllm.messages.codec import AnyMessage

ANY_EPOCH = 0
"""Epoch of messages about a process, which no epoch filters; others count from 1."""
MAX_FRAME_BYTES = 2**20
"""Size limit of a frame: ZeroMQ closes the connection of a peer that sends a larger one."""
MAX_ENCRYPTED_BYTES = MAX_FRAME_BYTES + 33
"""Size limit of an encrypted frame (CurveZMQ's MESSAGE command)."""
MAX_MESSAGE_BYTES = 2**28
"""Size limit of a message that arrives in parts."""
MAX_KEPT_BYTES = 2**26
"""Size limit of the messages of later epochs that a session keeps back."""

HEADER = struct.Struct("<QIQI")
"""Run, epoch, number, number of parts that follow."""
_MAX_PART_BYTES = MAX_FRAME_BYTES - HEADER.size


class SessionError(Exception):
    """Frames of a message session are lost, repeated or invalid; the session has to end."""


class SessionSender:
    """Splits messages into numbered frames of limited size, so that the receiver detects losses."""

    def __init__(self, run: int, max_part_bytes: int = _MAX_PART_BYTES) -> None:
        self._run = run
        self._max_part_bytes = max_part_bytes
        self._next_number = 0

    def frames(self, payload: bytes, epoch: int) -> list[bytes]:
        """Return the frames of an encoded message, to be sent in this order."""
        # All parts but the last one are full.
        size = self._max_part_bytes
        num_left = (len(payload) - 1) // size if payload else 0
        frames = []
        for start in range(0, (num_left + 1) * size, size):
            header = HEADER.pack(self._run, epoch, self._next_number, num_left)
            frames.append(header + (payload[start : start + size]))
            self._next_number += 1
            num_left -= 1
        return frames


class SessionReceiver:
    """Reassembles messages from numbered frames and delivers those of the current epoch in order.

    An epoch is the time between two starts or recoveries of the pipeline. Messages of earlier
    epochs and of other starts of the peer are dropped and counted; those of later epochs wait for
    `advance`.
    """

    def __init__(
        self,
        run: int,
        decode: Callable[[bytes], AnyMessage],
        epoch: int = ANY_EPOCH,
        max_kept_bytes: int = MAX_KEPT_BYTES,
    ) -> None:
        """Create the receiver.

        Args:
            run: random number of this start of the head process.
            decode: decoder of the messages that the peer's role may send.
            epoch: the current one; ANY_EPOCH before the first.
            max_kept_bytes: size limit of the messages of later epochs.
        """
        self.num_stale = 0
        """Messages of earlier epochs."""
        self.num_foreign = 0
        """Frames of other runs."""
        self._run = run
        self._decode = decode
        self._epoch = epoch
        self._max_kept_bytes = max_kept_bytes
        self._next_number = 0
        self._parts: list[bytes] = []
        """Parts of an incomplete message."""
        self._num_left = 0
        """Number of its parts that have not arrived."""
        self._part_epoch = 0
        self._kept: list[tuple[int, AnyMessage]] = []
        """Epochs and messages kept back."""
        self._num_kept_bytes = 0

    @property
    def num_dropped(self) -> int:
        """Messages of earlier epochs and frames of other runs."""
        return self.num_stale + self.num_foreign

    def receive(self, frame: bytes) -> AnyMessage | None:
        """Return the message that a frame completes, if it is to be delivered now.

        Raises:
            SessionError: frames are missing or repeated, a message is none that the peer may send,
                or more arrived than may be kept.
        """
        try:
            run, epoch, number, num_left = HEADER.unpack_from(frame)
        except struct.error:
            raise SessionError(f"a frame of {len(frame)} bytes has no header") from None
        if run != self._run:
            self.num_foreign += 1
            return None
        if number != self._next_number:
            raise SessionError(f"frame {self._next_number} was expected, {number} arrived")
        self._next_number = number + 1
        payload = frame[HEADER.size :]
        if num_left or self._parts:
            whole = self._assemble(payload, epoch, num_left)
            if whole is None:
                return None
            payload = whole
        is_current = epoch in (self._epoch, ANY_EPOCH)
        if not is_current and epoch < self._epoch:
            self.num_stale += 1
            return None
        if not is_current:
            self._num_kept_bytes += len(payload)
            if self._num_kept_bytes > self._max_kept_bytes:
                raise SessionError("too many messages of a later epoch")
        try:
            message = self._decode(payload)
        # Errors of values nested too deeply, text that is none and numbers out of range are no
        # DecodeErrors.
        except Exception as error:
            raise SessionError(f"no message that this peer may send: {error}") from error
        if is_current:
            return message
        # Decoded already, so that `advance` cannot fail.
        self._kept.append((epoch, message))
        return None

    def advance(self, epoch: int) -> list[AnyMessage]:
        """Begin a later epoch; return the messages of it that have arrived already."""
        assert epoch >= self._epoch
        self._epoch = epoch
        due = [message for kept, message in self._kept if kept == epoch]
        self.num_stale += sum(kept < epoch for kept, _ in self._kept)
        self._kept = [entry for entry in self._kept if entry[0] > epoch]
        if not self._kept:
            self._num_kept_bytes = 0
        return due

    def _assemble(self, part: bytes, epoch: int, num_left: int) -> bytes | None:
        """Add a part; return the message's payload if it is complete."""
        if not self._parts:
            if (num_left + 1) * _MAX_PART_BYTES > MAX_MESSAGE_BYTES:
                raise SessionError(f"a message of {num_left + 1} parts is too large")
        elif (num_left, epoch) != (self._num_left - 1, self._part_epoch):
            raise SessionError("a large message was not continued")
        self._parts.append(part)
        self._num_left, self._part_epoch = num_left, epoch
        if num_left:
            return None
        payload = b"".join(self._parts)
        self._parts.clear()
        return payload
