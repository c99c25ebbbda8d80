"""Server-sent events over one response.

Owns the event format. Knows nothing of what the events say.
"""

from collections.abc import Iterable
from typing import Any, NamedTuple

import msgspec
from aiohttp import web

HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies of the nginx kind would hold events back
}


class Event(NamedTuple):
    """One event: its data, and a name where its kind has one."""

    data: dict[str, Any] | bytes
    """JSON values, or what is written as it is."""
    name: str = ""


DONE = Event(b"[DONE]")
"""How OpenAI's older endpoints end a stream."""


class EventStream:
    """An open stream of events; writing waits while the client is slow."""

    def __init__(self, response: web.StreamResponse) -> None:
        self.response = response
        self._encoder = msgspec.json.Encoder()

    @classmethod
    async def open(cls, request: web.Request) -> "EventStream":
        """Send the headers."""
        response = web.StreamResponse(headers=HEADERS)
        await response.prepare(request)
        return cls(response)

    async def send(self, events: Iterable[Event]) -> None:
        """Events, in one write."""
        if lines := [self._written(event) for event in events]:
            await self.response.write(b"".join(lines))

    async def end(self) -> None:
        """The end of the stream."""
        await self.response.write_eof()

    def _written(self, event: Event) -> bytes:
        data, name = event
        text = data if isinstance(data, bytes) else self._encoder.encode(data)
        head = b"event: %b\ndata: " % name.encode() if name else b"data: "
        return b"%b%b\n\n" % (head, text)
