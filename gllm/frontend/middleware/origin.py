"""Middleware: refuse cross-site requests by `Origin` and DNS rebinding by `Host`, on every path.

`cors.py` sets the headers that let allowed origins read answers.
Source: WHATWG Fetch, "Origin header"; W3C Fetch Metadata, "Sec-Fetch-Site".
"""

from collections.abc import Callable
from urllib.parse import urlsplit

from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.frontend.errors import ApiError, Handler
from gllm.options.addresses import is_loopback, parse_ip_address

DEFAULT_PORTS = {"http": 80, "https": 443}


def install(app: web.Application, config: ServerConfig) -> None:
    """Add the checks to an application."""
    origins = frozenset(config.allowed_origins)
    is_allowed_host = host_check(config)

    @web.middleware
    async def check_sender(request: web.Request, handler: Handler) -> web.StreamResponse:
        for host in request.headers.getall("Host", []):
            name = host_name(host)
            if name is None or not is_allowed_host(name):
                raise ApiError(
                    403,
                    f"Host {host!r} is not a name of this server: start it with --allowed-hosts "
                    f"{name or 'NAME'} to accept it.",
                    code="host_not_allowed",
                )
        if "*" not in origins:
            for origin in request.headers.getall("Origin", []):
                if origin not in origins and not is_same_origin(request, origin):
                    raise ApiError(
                        403,
                        f"Pages of origin {origin!r} may not use this server: start it with "
                        f"--allowed-origins {origin if '://' in origin else 'ORIGIN'} to allow it.",
                        code="origin_not_allowed",
                    )
        return await handler(request)

    app.middlewares.append(check_sender)


def host_check(config: ServerConfig) -> Callable[[str], bool]:
    """Return a function that tells if the server accepts a host name.

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
    """Return the name of a Host header, or None if the header is malformed.

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
    """Return True if an Origin header is that of this server's own page.

    Browsers say so in Sec-Fetch-Site, which pages cannot set. It also holds behind a proxy that
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
