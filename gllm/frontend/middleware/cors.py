"""Which pages of other origins may read answers: cross-origin resource sharing.

Owns the headers and the answer to preflights; off unless origins are given. Credentials that a
browser adds by itself are never allowed: a key is a header, which a page sets. Knows nothing of
which keys there are.
Source: WHATWG Fetch, "CORS protocol".
"""

import re

from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.frontend.errors import Handler

EXPOSED_HEADERS = "X-Request-Id, Retry-After, WWW-Authenticate, " + ", ".join(
    f"x-ratelimit-{what}-requests" for what in ("limit", "remaining", "reset")
)
"""What a page may read besides what every page may."""
PREFLIGHT_SECONDS = 600
_HEADERS = re.compile(r"[A-Za-z0-9-]+(?:\s*,\s*[A-Za-z0-9-]+)*", re.ASCII)
"""Names of headers, as a preflight lists them."""


def install(app: web.Application, config: ServerConfig) -> None:
    """Put it into an application, if it is asked for."""
    if not config.allowed_origins:
        return
    origins = frozenset(config.allowed_origins)

    def allowed(request: web.Request) -> str | None:
        """The origin that may read the answer."""
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
        # Clients add headers of their own, which do no harm here.
        named = request.headers.get("Access-Control-Request-Headers", "").strip()
        if _HEADERS.fullmatch(named):
            headers["Access-Control-Allow-Headers"] = named
        return web.Response(status=204, headers=headers)

    async def tell(request: web.Request, response: web.StreamResponse) -> None:
        if "*" not in origins:
            response.headers.add("Vary", "Origin")
        if (origin := allowed(request)) is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS

    app.middlewares.append(answer_preflight)
    app.on_response_prepare.append(tell)
