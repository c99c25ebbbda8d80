"""A server that streams what a test tells it to.

Owns the scripted answers. Knows nothing of models.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from aiohttp.test_utils import TestServer

DONE = b"data: [DONE]\n\n"


def event(**fields: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(fields).encode() + b"\n\n"


def piece(text: str, reason: str | None = None, **more: Any) -> bytes:
    """A chunk of a completion."""
    return event(choices=[{"index": 0, "text": text, "finish_reason": reason, **more}])


def usage(prompt: int, output: int) -> bytes:
    """The chunk with the server's own count."""
    return event(choices=[], usage={"prompt_tokens": prompt, "completion_tokens": output})


@dataclass
class FakeServer:
    """Answers every request with `writes`, one after the other."""

    writes: Sequence[bytes] = (piece("a"), piece("b", "length"), usage(5, 2), DONE)
    pause: float = 0.0
    """Seconds before each write."""
    cut: bool = False
    """Drop the connection after the writes."""
    status: int = 200
    content_type: str = "text/event-stream"
    refusals: list[int] = field(default_factory=list)
    """Status of the first answers of /health."""
    models: Any = field(default_factory=lambda: {"data": [{"id": "fake", "vocab_size": 50}]})
    models_status: int = 200
    bodies: list[Any] = field(default_factory=list)
    headers: list[Any] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """POST of either endpoint."""
        self.bodies.append(await request.json())
        self.headers.append(request.headers)
        if self.status != 200:
            error = {"error": {"message": "the fake refuses"}}
            return web.json_response(error, status=self.status)
        response = web.StreamResponse(headers={"Content-Type": self.content_type})
        await response.prepare(request)
        for data in self.writes:
            await asyncio.sleep(self.pause)
            await response.write(data)
        if self.cut:
            assert request.transport is not None
            request.transport.close()
        return response

    async def health(self, request: web.Request) -> web.Response:
        """GET /health."""
        return web.Response(status=self.refusals.pop(0) if self.refusals else 200)

    async def list_models(self, request: web.Request) -> web.Response:
        """GET /v1/models."""
        return web.json_response(self.models, status=self.models_status)


@asynccontextmanager
async def running(server: FakeServer) -> AsyncIterator[str]:
    """The URL of a fake server that listens."""
    app = web.Application()
    routes: dict[str, Callable[[web.Request], Awaitable[web.StreamResponse]]] = {
        "/v1/completions": server.answer,
        "/v1/chat/completions": server.answer,
    }
    for path, handler in routes.items():
        app.router.add_post(path, handler)
    app.router.add_get("/health", server.health)
    app.router.add_get("/v1/models", server.list_models)
    async with TestServer(app) as listening:
        yield str(listening.make_url("")).rstrip("/")
