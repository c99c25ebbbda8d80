"""Middleware: token bucket per API key, or per address without keys, and its headers.

context.py limits the number of concurrent requests.
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
"""Maximum number of buckets."""
RATE_LIMIT_HEADERS = web.RequestKey("rate_limit_headers", dict[str, str])


class BucketLevel(NamedTuple):
    """State of a client's token bucket after a request, for the rate-limit headers."""

    is_granted: bool
    num_remaining: int
    """Number of further requests that would be accepted now."""
    wait_seconds: float
    """Time until the next request is accepted."""
    reset_seconds: float
    """Time until the bucket is full."""


class TokenBuckets:
    """Rate limiter with a token bucket per client; a bucket refills completely within a minute.

    Keeps the buckets of the most recent clients; all others have full buckets.

    Args:
        per_minute: Size of a bucket: requests per minute.
        clock: Returns the time in seconds.
        max_clients: Number of stored buckets.
    """

    def __init__(
        self,
        per_minute: int,
        clock: Callable[[], float] = time.monotonic,
        max_clients: int = MAX_CLIENTS,
    ) -> None:
        self._size = per_minute
        self._max_clients = max_clients
        self._clock = clock
        self._table: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Number of tokens and the time of that number, by client."""

    def __len__(self) -> int:
        return len(self._table)

    def consume(self, client: str) -> BucketLevel:
        """Count a request of a client, if its bucket is not empty; return the bucket's state."""
        now, rate = self._clock(), self._size / 60
        tokens, then = self._table.pop(client, (float(self._size), now))
        tokens = min(self._size, tokens + (now - then) * rate)
        granted = tokens >= 1
        tokens -= granted
        self._table[client] = (tokens, now)
        if len(self._table) > self._max_clients:
            self._table.popitem(last=False)
        wait = max(0.0, 1 - tokens) / rate
        return BucketLevel(granted, int(tokens), wait, (self._size - tokens) / rate)


def install(app: web.Application, config: ServerConfig) -> None:
    """Add middleware that limits the requests per minute of each client, if its flag is set.

    Requests above the limit are rejected (429).
    """
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
            headers = {"Retry-After": str(math.ceil(level.wait_seconds))}
            raise ApiError(429, why, code="rate_limit_exceeded", headers=headers)
        return await handler(request)

    async def set_headers(request: web.Request, response: web.StreamResponse) -> None:
        response.headers.update(request.get(RATE_LIMIT_HEADERS, {}))

    app.middlewares.append(limit)
    app.on_response_prepare.append(set_headers)


def rate_limit_key(address: str | None) -> str:
    """Return a client's key for the rate limit: its IPv4 address or its IPv6 /64 network."""
    try:
        parsed = ipaddress.ip_address(address or "")
    except ValueError:
        return address or ""
    if parsed.version == 4 or parsed.ipv4_mapped is not None:
        return str(parsed)
    return str(ipaddress.ip_network((parsed.packed[:8] + bytes(8), 64)))
