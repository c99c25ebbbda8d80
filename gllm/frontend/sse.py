"""Server-sent events over one response.

Owns the event format. Knows nothing of what the events say.
"""

import asyncio
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

import msgspec
from aiohttp import HttpVersion11, web

from gllm.frontend.connection import abort_unread_answer

STREAM_HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies of the nginx kind would hold events back
}

KEEP_ALIVE_SECONDS = 7.0
"""A stream that has had nothing to say for so long, at most twice, says that it lives."""
MAX_WRITE_BYTES = 65536


class ServerSentEvent(NamedTuple):
    """One event: its data, and a name where its kind has one."""

    data: dict[str, Any] | bytes
    """JSON values, or what is written as it is."""
    name: str = ""


DONE = ServerSentEvent(b"[DONE]")
"""How OpenAI's older endpoints end a stream."""


class EventStream:
    """A stream of events, written at once while the client keeps up.

    While it is watched, silence is filled with comments, and a client that takes nothing for
    `patience` seconds loses its connection. What is written to one that is gone raises
    ConnectionError.
    """

    def __init__(self, request: web.Request, patience: float) -> None:
        self.response = web.StreamResponse(headers=STREAM_HEADERS)
        self._request = request
        self._protocol = request.protocol
        self._is_chunked = request.version >= HttpVersion11
        self._patience = patience
        self._encoder = msgspec.json.Encoder()
        self._unsent: list[bytes] = []
        self._pieces = 0
        """That were written: what tells that something goes on."""

    @property
    def is_open(self) -> bool:
        """Whether the headers were sent: what fails from now on has to be told by an event."""
        return self.response.prepared

    async def open(self) -> None:
        """Send the headers, if they were not."""
        await self.response.prepare(self._request)

    def put(self, events: Iterable[ServerSentEvent]) -> None:
        """Events, in as few writes as there may be. What cannot be sent at once, the headers not
        being sent or the client being slow, is kept for `flush`."""
        data = b"".join([self._written(event) for event in events])
        if not data:
            return
        if len(data) <= MAX_WRITE_BYTES and self.is_fluent and self.is_open:
            self._write(data)
        else:
            self._unsent.append(data)

    @property
    def is_fluent(self) -> bool:
        """Whether all was sent and the client took it."""
        return not (self._unsent or self._protocol.writing_paused)

    async def flush(self) -> None:
        """Send what was kept and wait until the client has taken it."""
        await self.open()
        data = b"".join(self._unsent)
        # Piece by piece: a client that takes one is slow, but reads.
        for begin in range(0, len(data), MAX_WRITE_BYTES):
            await self._request.writer.drain()
            self._write(data[begin : begin + MAX_WRITE_BYTES])
        self._unsent.clear()
        await self._request.writer.drain()

    async def end(self) -> None:
        """The end of the stream."""
        await self.flush()
        await self.response.write_eof()

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Look after the stream as long as the context lasts.

        A task beside the writer, so that writing costs nothing more.
        """
        watch = asyncio.create_task(self._watch())
        try:
            yield
        finally:
            watch.cancel()

    async def _watch(self) -> None:
        seen = stuck = 0
        period = min(KEEP_ALIVE_SECONDS, self._patience)
        while stuck * period < self._patience:
            await asyncio.sleep(period)
            if self._pieces != seen:
                seen, stuck = self._pieces, 0
            elif not self.is_fluent:
                stuck += 1
            else:
                stuck = 0
                await self._comment()
        abort_unread_answer(self._request)

    async def _comment(self) -> None:
        """What clients do not see, but proxies do, which cut silent connections."""
        with suppress(ConnectionError):
            await self.open()
            self._write(b": keep-alive\n\n")

    def _written(self, event: ServerSentEvent) -> bytes:
        data, name = event
        text = data if isinstance(data, bytes) else self._encoder.encode(data)
        if name:
            return b"event: %b\ndata: %b\n\n" % (name.encode(), text)
        return b"data: %b\n\n" % text

    def _write(self, data: bytes) -> None:
        """Past aiohttp's own writing, which has to be waited for."""
        transport = self._protocol.transport
        if transport is None or transport.is_closing():
            raise ConnectionError("the client is gone")
        transport.write(b"%x\r\n%b\r\n" % (len(data), data) if self._is_chunked else data)
        self._pieces += 1
