"""Middleware: checks of Host and Origin, and cross-origin resource sharing (CORS).

Rejects cross-site requests by `Origin` and DNS rebinding by `Host`, on every path. With
--allowed-origins it answers preflight requests and sets the headers of CORS. Cookies and other
credentials that browsers add themselves are never allowed; API keys are headers.
Source: WHATWG Fetch, "Origin header" and "CORS protocol"; W3C Fetch Metadata, "Sec-Fetch-Site".
"""

import re
from collections.abc import Callable
from functools import lru_cache
from urllib.parse import urlsplit

from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.frontend.errors import DROPPED_REASON_HEADER, ApiError, Handler
from gllm.options.addresses import is_loopback, parse_ip_address

DEFAULT_PORTS = {"http": 80, "https": 443}
EXPOSED_HEADERS = ", ".join(
    (
        "X-Request-Id",
        "Retry-After",
        "WWW-Authenticate",
        "Warning",
        DROPPED_REASON_HEADER,
        *(f"x-ratelimit-{what}-requests" for what in ("limit", "remaining", "reset")),
    )
)
"""Headers that pages of other origins may read."""
PREFLIGHT_SECONDS = 600
"""Time for which browsers cache a preflight's answer."""
MAX_CACHED_HOSTS = 64
_HEADERS = re.compile(r"[A-Za-z0-9-]+(?:\s*,\s*[A-Za-z0-9-]+)*", re.ASCII)
"""List of header names in a preflight."""


def install(app: web.Application, config: ServerConfig) -> None:
    """Add middleware that checks the headers Host and Origin, and sets CORS headers.

    Requests of web pages that are not allowed, and of unknown host names, are rejected.
    """
    origins = frozenset(config.allowed_origins)
    is_allowed_host = make_host_check(config)

    @lru_cache(MAX_CACHED_HOSTS)
    def refusal(host: str) -> str:
        """Return why a Host header is refused; empty if it names this server."""
        name = host_name(host)
        if name is not None and is_allowed_host(name):
            return ""
        return (
            f"Host {host!r} is not a name of this server: start it with --allowed-hosts "
            f"{name or 'NAME'} to accept it."
        )

    @web.middleware
    async def check_sender(request: web.Request, handler: Handler) -> web.StreamResponse:
        for host in request.headers.getall("Host", []):
            if message := refusal(host):
                raise ApiError(403, message, code="host_not_allowed")
        if "*" not in origins:
            for origin in request.headers.getall("Origin", []):
                if origin not in origins and not is_same_origin(request, origin):
                    raise ApiError(
                        403,
                        f"Pages of origin {origin!r} may not use this server: start it with "
                        f"--allowed-origins {origin if '://' in origin else 'ORIGIN'} to allow it.",
                        code="origin_not_allowed",
                    )
        if origins and request.method == "OPTIONS" and allowed_origin(request, origins) is not None:
            preflight = preflight_answer(request)
            if preflight is not None:
                return preflight
        return await handler(request)

    async def set_headers(request: web.Request, response: web.StreamResponse) -> None:
        if "*" not in origins:
            response.headers.add("Vary", "Origin")
        if (origin := allowed_origin(request, origins)) is not None:
            response.headers["Access-Control-Allow-Origin"] = origin
            response.headers["Access-Control-Expose-Headers"] = EXPOSED_HEADERS

    app.middlewares.append(check_sender)
    if origins:
        app.on_response_prepare.append(set_headers)


def allowed_origin(request: web.Request, origins: frozenset[str]) -> str | None:
    """Return the value of Access-Control-Allow-Origin, or None if the page's origin is not allowed.

    Args:
        request: The HTTP request.
        origins: Allowed origins; `*` allows all.
    """
    if "*" in origins:
        return "*"
    origin = request.headers.get("Origin")
    return origin if origin in origins else None


def preflight_answer(request: web.Request) -> web.Response | None:
    """Return the response to a CORS preflight request; None if the request is not a preflight.

    The origin is already checked.
    """
    if "Access-Control-Request-Method" not in request.headers:
        return None
    headers = {
        "Access-Control-Allow-Methods": "GET, HEAD, POST, DELETE",
        "Access-Control-Max-Age": str(PREFLIGHT_SECONDS),
    }
    # Allow all headers: clients send their own, which the server ignores.
    named = request.headers.get("Access-Control-Request-Headers", "").strip()
    if _HEADERS.fullmatch(named):
        headers["Access-Control-Allow-Headers"] = named
    return web.Response(status=204, headers=headers)


def make_host_check(config: ServerConfig) -> Callable[[str], bool]:
    """Return a function that returns True for host names that the server accepts in Host headers.

    A server bound to loopback accepts the loopback names and --allowed-hosts. A server bound
    elsewhere accepts every name, or with --allowed-hosts those, the loopback names and IP
    addresses: an address in Host needs no DNS, so it cannot be a rebound name, and probes use it.
    """
    names = frozenset(name.lower().strip("[]") for name in config.allowed_hosts)
    suffixes = tuple(name[1:] for name in names if name.startswith("*."))
    is_local = is_loopback(config.host)
    accepts_all = "*" in names or not (is_local or names)

    def is_allowed(name: str) -> bool:
        return (
            accepts_all
            or name in names
            or is_loopback(name)
            or (bool(suffixes) and name.endswith(suffixes))
            or (not is_local and parse_ip_address(name) is not None)
        )

    return is_allowed


def host_name(host: str) -> str | None:
    """Return the host name in a Host header, or None if the header is malformed.

    The name is in lower case, without port, brackets and a final dot.
    """
    try:
        parts = urlsplit(f"//{host}")
        _ = parts.port
    except ValueError:
        return None
    if parts.netloc != host or "@" in host or not parts.hostname:
        return None
    return parts.hostname.removesuffix(".")


def is_same_origin(request: web.Request, origin: str) -> bool:
    """Return True if a request's Origin header names this server: the request is of its own page.

    Browsers send Sec-Fetch-Site, which pages cannot set. It is also correct behind a proxy that
    rewrites Host. Browsers leave it out for plain http, where Origin is compared with Host.
    """
    if origin == "null":
        return False
    site = request.headers.get("Sec-Fetch-Site")
    if site is not None:
        return site == "same-origin"
    try:
        asked = urlsplit(origin)
        host = urlsplit(f"//{request.headers.get('Host', '')}")
        default = DEFAULT_PORTS[asked.scheme]
        return (asked.hostname, asked.port or default) == (host.hostname, host.port or default)
    except (KeyError, ValueError):
        return False
