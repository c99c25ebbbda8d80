"""Copies of the logs by which two workers meet (transport/meeting_log.py)."""

import os
from collections.abc import Collection, Sequence

import msgspec

from gllm.transport.link.connection import FrameConnection
from gllm.transport.link.frames import MAX_BYTES, EdgeName, FrameClass, FrameError
from gllm.transport.meeting_log import MAX_LOG_BYTES, VERDICT_KEY, LogReader, TransportVerdict

_NUM_DESCRIPTORS = 3


class MeetingLogs:
    """Log of this machine's worker, copied to the other machine, and the copy of the other log."""

    def __init__(self, descriptors: Sequence[int]) -> None:
        """Use an edge's descriptors: own log, the other one, and the event of the own log.

        An edge with fewer of them has no logs.
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
        """Length of the copy."""
        return 0 if self._copy is None else os.fstat(self._copy).st_size

    def resume(self, num_bytes: int) -> None:
        """Go on after the bytes that the other machine has. Raises FrameError."""
        if not 0 <= num_bytes <= MAX_LOG_BYTES:
            raise FrameError(f"the other end has {num_bytes} bytes of a log")
        self._num_sent, self._has_news = num_bytes, True

    def clear_events(self, ready: Collection[int]) -> None:
        """Read the event if it is among the descriptors that are readable."""
        for event in self.events:
            if event in ready:
                os.eventfd_read(event)
                self._has_news = True

    def send(self, connection: FrameConnection, name: EdgeName) -> None:
        """Send what was appended to the worker's log."""
        if self._own is None or not self._has_news:
            return
        self._has_news = False
        while data := os.pread(self._own, MAX_BYTES[FrameClass.MEETING], self._num_sent):
            connection.send(name.header(FrameClass.MEETING, data, self._num_sent))
            self._num_sent += len(data)
        for key, value in self._reader.read():
            if key == VERDICT_KEY:
                self.verdict = msgspec.msgpack.decode(value, type=TransportVerdict)

    def receive(self, offset: int, data: bytes) -> None:
        """Append to the copy. Raises FrameError."""
        if self._copy is None:
            raise FrameError("the edge has no log")
        if offset != self.num_received_bytes or offset + len(data) > MAX_LOG_BYTES:
            raise FrameError(f"bytes {offset} to {offset + len(data)} of a log do not fit")
        os.pwrite(self._copy, data, offset)
