"""Server-sent events over one response.

Owns the event format. Knows nothing of what the events say.
"""

import asyncio
from collections.abc import Awaitable, Iterable
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

from gllm.frontend.connection import abort_unread

HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies of the nginx kind would hold events back
}


PIECE_BYTES = 65536


class Event(NamedTuple):
    """One event: its data, and a name where its kind has one."""

    data: dict[str, Any] | str
    """JSON values, or a text that is written as it is."""
    name: str = ""


DONE = Event("[DONE]")
"""How OpenAI's older endpoints end a stream."""


class EventStream:
    """A stream of events; writing waits while the client is slow.

    What is written raises ConnectionError once the client is gone, and also when it has taken
    nothing for `patience` seconds: its connection is ended then.
    """

    def __init__(self, request: web.Request, patience: float) -> None:
        self.response = web.StreamResponse(headers=HEADERS)
        self._request = request
        self._patience = patience
        self._encoder = msgspec.json.Encoder()

    @property
    def is_open(self) -> bool:
        """Whether the headers were sent: what fails from now on has to be told by an event."""
        return self.response.prepared

    async def open(self) -> None:
        """Send the headers, if they were not."""
        await self.response.prepare(self._request)

    async def send(self, events: Iterable[Event]) -> None:
        """Events, in as few writes as there may be."""
        if lines := [self._written(event) for event in events]:
            await self._write(b"".join(lines))

    async def comment(self) -> None:
        """What clients do not see, but proxies do, which cut silent connections."""
        await self.open()
        await self._write(b": keep-alive\n\n")

    async def end(self) -> None:
        """The end of the stream."""
        await self._within_patience(self.response.write_eof())

    async def _write(self, data: bytes) -> None:
        # Piece by piece: a client that takes one within its time is slow, but reads.
        for begin in range(0, len(data), PIECE_BYTES):
            piece = data[begin : begin + PIECE_BYTES]
            await self._within_patience(self.response.write(piece))

    async def _within_patience(self, written: Awaitable[None]) -> None:
        try:
            async with asyncio.timeout(self._patience):
                await written
        except TimeoutError:
            abort_unread(self._request)
            raise ConnectionResetError("the client does not read") from None

    def _written(self, event: Event) -> bytes:
        data, name = event
        text = data.encode() if isinstance(data, str) else self._encoder.encode(data)
        head = b"event: " + name.encode() + b"\n" if name else b""
        return head + b"data: " + text + b"\n\n"
