"""Stream of server-sent events: format, keep-alive comments and slow clients."""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import NamedTuple

import msgspec
from aiohttp import HttpVersion11, web

from gllm.frontend.connection import abort_unread_answer

STREAM_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # nginx and similar proxies would buffer events
}
"""Headers of an answer that is a stream of events."""

KEEP_ALIVE_SECONDS = 7.0
"""Interval at which a stream is checked; one that was silent for an interval gets a comment."""
MAX_WRITE_BYTES = 65536
"""Bytes of one write to the socket."""


class ServerSentEvent(NamedTuple):
    """One server-sent event of a streamed response."""

    data: msgspec.Struct | bytes
    """`data:` line of the event: a struct to encode as JSON, or encoded bytes."""
    name: str = ""
    """`event:` line of the event; empty for an API whose events have no types."""


DONE = ServerSentEvent(b"[DONE]")
"""Last event of OpenAI's completions and chat completions."""


class EventStream:
    """Streamed response of server-sent events, with keep-alive comments and a write timeout.

    Events are written at once while the client reads. Within `monitored()`, an idle stream gets
    keep-alive comments, and the connection of a client that reads nothing for
    `write_timeout_seconds` is aborted. Writing to a closed connection raises ConnectionError.
    """

    def __init__(self, request: web.Request, write_timeout_seconds: float) -> None:
        self.response = web.StreamResponse(headers=STREAM_HEADERS)
        """Prepared once the headers are sent, so that an error has to be sent as an event."""
        self._request = request
        self._protocol = request.protocol
        self._is_chunked = request.version >= HttpVersion11
        self._write_timeout_seconds = write_timeout_seconds
        self._encoder = msgspec.json.Encoder()
        self._unsent: list[bytes] = []
        self._num_writes = 0
        """Writes so far, by which the monitor recognizes progress."""

    def write_events(self, events: Iterable[ServerSentEvent]) -> None:
        """Write server-sent events to the client, in as few socket writes as possible.

        Events are buffered for `flush` while the headers are not sent or the client reads slowly.
        """
        data = b"".join([self._encode(event) for event in events])
        if not data:
            return
        if len(data) <= MAX_WRITE_BYTES and self.is_caught_up and self.response.prepared:
            self._write(data)
        else:
            self._unsent.append(data)

    @property
    def is_caught_up(self) -> bool:
        """True if no events are buffered and the socket accepts more data."""
        return not (self._unsent or self._protocol.writing_paused)

    async def flush(self) -> None:
        """Send the buffered events and wait until the socket accepts more data."""
        await self.response.prepare(self._request)
        data = b"".join(self._unsent)
        # In pieces, so that the monitor sees the progress of a slow client.
        for begin in range(0, len(data), MAX_WRITE_BYTES):
            await self._request.writer.drain()
            self._write(data[begin : begin + MAX_WRITE_BYTES])
        self._unsent.clear()
        await self._request.writer.drain()

    @contextmanager
    def monitored(self) -> Iterator[None]:
        """Send keep-alive comments and detect clients that do not read, while the block runs.

        A separate task does this, so that writes cost no more.
        """
        monitor = asyncio.create_task(self._monitor())
        try:
            yield
        finally:
            monitor.cancel()

    async def _monitor(self) -> None:
        num_seen_writes = num_stuck_periods = 0
        period = min(KEEP_ALIVE_SECONDS, self._write_timeout_seconds)
        while num_stuck_periods * period < self._write_timeout_seconds:
            await asyncio.sleep(period)
            if self._num_writes != num_seen_writes:
                num_seen_writes, num_stuck_periods = self._num_writes, 0
            elif not self.is_caught_up:
                num_stuck_periods += 1
            else:
                num_stuck_periods = 0
                await self._send_comment()
        abort_unread_answer(self._request)

    async def _send_comment(self) -> None:
        """Send a comment: clients ignore it, and proxies do not close the idle connection."""
        with suppress(ConnectionError):
            await self.response.prepare(self._request)
            self._write(b": keep-alive\n\n")

    def _encode(self, event: ServerSentEvent) -> bytes:
        data, name = event
        text = data if isinstance(data, bytes) else self._encoder.encode(data)
        if name:
            return b"event: %b\ndata: %b\n\n" % (name.encode(), text)
        return b"data: %b\n\n" % text

    def _write(self, data: bytes) -> None:
        """Write to the transport: aiohttp's own `write` is a coroutine, which costs more."""
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ConnectionError("the client has disconnected")
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        self._num_writes += 1
