"""Wait until a server is ready and read its model from /v1/models."""

import asyncio
import time
from typing import NamedTuple

import aiohttp

FALLBACK_VOCABULARY = 256
"""Vocabulary size assumed if the server does not report it."""
POLL_SECONDS = 0.5
"""Time between two attempts to reach the server."""


class TargetServerError(Exception):
    """The server is not ready or not usable; the message is the reason."""


class ServedModel(NamedTuple):
    """Model of the server."""

    name: str
    vocab_size: int


async def wait_until_ready(
    session: aiohttp.ClientSession,
    base_url: str,
    model: str | None,
    seconds: float,
    poll_seconds: float = POLL_SECONDS,
) -> ServedModel:
    """Wait until the server is healthy and return the named model, or the first that it serves.

    Args:
        session: Session of all requests.
        base_url: URL of the server.
        model: Name of the model; None for the first one.
        seconds: Time after which the wait ends.
        poll_seconds: Time between two attempts.

    Raises:
        TargetServerError: The time is over, or the server refuses access.
    """
    deadline = time.monotonic() + seconds
    reason = "no response"
    while (seconds_left := deadline - time.monotonic()) > 0:
        try:
            async with asyncio.timeout(seconds_left):
                await _check_health(session, base_url)
                return await _describe(session, base_url, model)
        except (aiohttp.ClientError, OSError) as error:
            reason = str(error) or reason
        await asyncio.sleep(min(poll_seconds, seconds_left))
    raise TargetServerError(
        f"no server is ready at {base_url} within {seconds:g} s ({reason}): start one, or set "
        "--base-url"
    )


async def _check_health(session: aiohttp.ClientSession, base_url: str) -> None:
    """Raise ClientResponseError if /health reports an error; many servers have no /health."""
    async with session.get(f"{base_url}/health") as response:
        if response.status >= 500:
            response.raise_for_status()


async def _describe(
    session: aiohttp.ClientSession, base_url: str, model: str | None
) -> ServedModel:
    async with session.get(f"{base_url}/v1/models") as response:
        if response.status in (401, 403):
            raise TargetServerError(
                f"{base_url} returned HTTP status {response.status}: set --api-key"
            )
        if response.status >= 500:
            response.raise_for_status()
        try:
            models = {str(listed["id"]): listed for listed in (await response.json())["data"]}
            name = model or next(iter(models))
        except (ValueError, LookupError, TypeError, StopIteration, aiohttp.ContentTypeError):
            if model is None:
                raise TargetServerError(f"{base_url} lists no models: set --model") from None
            models, name = {}, model
    size = models.get(name, {}).get("vocab_size")
    return ServedModel(name, size if isinstance(size, int) else FALLBACK_VOCABULARY)
