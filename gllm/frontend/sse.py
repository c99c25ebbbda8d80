"""Server-sent events over one response.

Owns the event format and its end. Knows nothing of what the events say.
"""

from collections.abc import Iterable
from typing import Any

import msgspec
from aiohttp import web

HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-cache",
    "X-Accel-Buffering": "no",  # proxies of the nginx kind would hold events back
}


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

    async def send(self, events: Iterable[dict[str, Any]]) -> None:
        """Events, in one write."""
        lines = [b"data: " + self._encoder.encode(event) + b"\n\n" for event in events]
        if lines:
            await self.response.write(b"".join(lines))

    async def done(self) -> None:
        """The end of the stream."""
        await self.response.write(b"data: [DONE]\n\n")
        await self.response.write_eof()
