"""How often one client may ask: a token bucket for each key, or each address without keys.

Owns the buckets and the headers that tell of them. Knows nothing of keys and of load: how many
requests may be inside is admission's (context.py).
"""

import ipaddress
import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple

from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.frontend.context import CLIENT_ID
from gllm.frontend.endpoint import find_endpoint
from gllm.frontend.errors import ApiError, Handler

MAX_CLIENTS = 16384
RATE_LIMIT_HEADERS = web.RequestKey("rate_limit_headers", dict[str, str])


class BucketLevel(NamedTuple):
    """A client's bucket after a request."""

    is_granted: bool
    num_remaining: int
    """Requests that would be granted now."""
    wait_seconds: float
    """Seconds until the next one is."""
    reset_seconds: float
    """Seconds until the bucket is full."""


class TokenBuckets:
    """Token buckets of `per_minute` requests that fill within a minute; all may be used at once.

    Remembers `MAX_CLIENTS` clients, the last ones to ask: whoever is forgotten has a full bucket.
    """

    def __init__(self, per_minute: int, clock: Callable[[], float] = time.monotonic) -> None:
        self._size = per_minute
        self._clock = clock
        self._table: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Tokens, and when there were so many."""

    def __len__(self) -> int:
        return len(self._table)

    def consume(self, client: str) -> BucketLevel:
        """Ask for one request."""
        now, rate = self._clock(), self._size / 60
        tokens, then = self._table.pop(client, (float(self._size), now))
        tokens = min(self._size, tokens + (now - then) * rate)
        granted = tokens >= 1
        tokens -= granted
        self._table[client] = (tokens, now)
        if len(self._table) > MAX_CLIENTS:
            self._table.popitem(last=False)
        wait = max(0.0, 1 - tokens) / rate
        return BucketLevel(granted, int(tokens), wait, (self._size - tokens) / rate)


def install(app: web.Application, config: ServerConfig) -> None:
    """Put it into an application, if it is asked for."""
    if config.rate_limit is None:
        return
    most, buckets = config.rate_limit, TokenBuckets(config.rate_limit)

    @web.middleware
    async def limit(request: web.Request, handler: Handler) -> web.StreamResponse:
        endpoint = find_endpoint(request)
        if endpoint is None or not endpoint.is_rate_limited:
            return await handler(request)
        level = buckets.consume(request.get(CLIENT_ID) or rate_limit_key(request.remote))
        request[RATE_LIMIT_HEADERS] = {
            "x-ratelimit-limit-requests": str(most),
            "x-ratelimit-remaining-requests": str(level.num_remaining),
            "x-ratelimit-reset-requests": f"{level.reset_seconds:.3f}s",
        }
        if not level.is_granted:
            why = f"More than {most} requests a minute: try again in {level.wait_seconds:.1f} s."
            error = ApiError(429, why, code="rate_limit_exceeded")
            error.headers["Retry-After"] = str(math.ceil(level.wait_seconds))
            raise error
        return await handler(request)

    async def tell(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(request.get(RATE_LIMIT_HEADERS, {}))

    app.middlewares.append(limit)
    app.on_response_prepare.append(tell)


def rate_limit_key(address: str | None) -> str:
    """Whom an address stands for: itself, or its /64 network, which IPv6 gives to one client."""
    try:
        parsed = ipaddress.ip_address(address or "")
    except ValueError:
        return address or ""
    if parsed.version == 4 or parsed.ipv4_mapped is not None:
        return str(parsed)
    return str(ipaddress.ip_network((parsed.packed[:8] + bytes(8), 64)))
