"""What the load generator has to know of a server before it loads it.

Owns waiting until it is ready and reading /v1/models. Knows nothing of requests.
"""

import asyncio
import time
from typing import NamedTuple

import aiohttp

FALLBACK_VOCABULARY = 256
"""Ids that every vocabulary has."""
POLL_SECONDS = 0.5


class ServerError(Exception):
    """The server is not ready, or not one that can be loaded; the message says why."""


class Served(NamedTuple):
    """A model as its server describes it."""

    name: str
    vocab_size: int


async def wait_until_ready(
    session: aiohttp.ClientSession, base_url: str, model: str | None, seconds: float
) -> Served:
    """The model of that name, or the first that is served, once the server says that it is well.

    Raises ServerError when the time is over, or where waiting does not help.
    """
    deadline = time.monotonic() + seconds
    why = "no answer"
    while (left := deadline - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(left):
                await _check_health(session, base_url)
                return await _describe(session, base_url, model)
        except (aiohttp.ClientError, OSError) as error:
            why = str(error) or why
        await asyncio.sleep(min(POLL_SECONDS, left))
    raise ServerError(
        f"no server is ready at {base_url} within {seconds:g} s ({why}): start one, or name "
        "another with --base-url"
    )


async def _check_health(session: aiohttp.ClientSession, base_url: str) -> None:
    """Raises ClientResponseError where the server says it is not well; many have no /health."""
    async with session.get(f"{base_url}/health") as response:
        if response.status >= 500:
            response.raise_for_status()


async def _describe(session: aiohttp.ClientSession, base_url: str, model: str | None) -> Served:
    async with session.get(f"{base_url}/v1/models") as response:
        if response.status in (401, 403):
            raise ServerError(f"{base_url} answered {response.status}: give it an --api-key")
        if response.status >= 500:
            response.raise_for_status()
        try:
            models = {str(each["id"]): each for each in (await response.json())["data"]}
            name = model or next(iter(models))
        except (ValueError, LookupError, TypeError, StopIteration, aiohttp.ContentTypeError):
            if model is None:
                raise ServerError(f"{base_url} lists no models: name one with --model") from None
            models, name = {}, model
    size = models.get(name, {}).get("vocab_size")
    return Served(name, size if isinstance(size, int) else FALLBACK_VOCABULARY)
