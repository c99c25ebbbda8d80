"""Middleware: cross-origin resource sharing (CORS), enabled by --allowed-origins.

Cookies and other credentials that browsers add themselves are never allowed; API keys are headers.
Source: WHATWG Fetch, "CORS protocol".
"""

import re

from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.frontend.errors import DROPPED_REASON_HEADER, Handler

EXPOSED_HEADERS = ", ".join(
    (
        "X-Request-Id",
        "Retry-After",
        "WWW-Authenticate",
        DROPPED_REASON_HEADER,
        *(f"x-ratelimit-{what}-requests" for what in ("limit", "remaining", "reset")),
    )
)
"""Headers that pages of other origins may read."""
PREFLIGHT_SECONDS = 600
"""Time for which browsers cache a preflight's answer."""
_HEADERS = re.compile(r"[A-Za-z0-9-]+(?:\s*,\s*[A-Za-z0-9-]+)*", re.ASCII)
"""List of header names in a preflight."""


def install(app: web.Application, config: ServerConfig) -> None:
    """Add the middleware to an application if its flag is set."""
    if not config.allowed_origins:
        return
    origins = frozenset(config.allowed_origins)

    def allowed(request: web.Request) -> str | None:
        """Return the value of Access-Control-Allow-Origin, or None."""
        if "*" in origins:
            return "*"
        origin = request.headers.get("Origin")
        return origin if origin in origins else None

    @web.middleware
    async def answer_preflight(request: web.Request, handler: Handler) -> web.StreamResponse:
        asks = request.method == "OPTIONS" and "Access-Control-Request-Method" in request.headers
        if not asks or allowed(request) is None:
            return await handler(request)
        headers = {
            "Access-Control-Allow-Methods": "GET, HEAD, POST",
            "Access-Control-Max-Age": str(PREFLIGHT_SECONDS),
        }
        # Allow all headers: clients send their own, which the server ignores.
        named = request.headers.get("Access-Control-Request-Headers", "").strip()
        if _HEADERS.fullmatch(named):
            headers["Access-Control-Allow-Headers"] = named
        return web.Response(status=204, headers=headers)

    async def set_headers(request: web.Request, response: web.StreamResponse) -> None:
        if "*" not in origins:
            response.headers.add("Vary", "Origin")
        if (origin := allowed(request)) is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS

    app.middlewares.append(answer_preflight)
    app.on_response_prepare.append(set_headers)
