"""Ask the engine that prefills for the grant of a room, over HTTP."""

import asyncio
import logging
import socket

import aiohttp
from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.frontend.handoffs.access import ControlAccess
from gllm.frontend.handoffs.grant import MAX_GRANT_CHARACTERS, GrantSealer
from gllm.frontend.handoffs.rooms import GRANT_SECONDS, OPEN_SECONDS
from gllm.options.field_types import FieldError

log = logging.getLogger(__name__)

PROOF_HEADER = "X-Control-Proof"
"""Header with the proof that the sender has the control key."""
CONNECT_SECONDS = 2.0
TIMEOUT = aiohttp.ClientTimeout(
    total=OPEN_SECONDS + GRANT_SECONDS + CONNECT_SECONDS, sock_connect=CONNECT_SECONDS
)
"""The other engine answers within the first two."""


class RoomClient:
    """Client of the rooms of other engines. `install` lets an application close it."""

    def __init__(self, config: ServerConfig, access: ControlAccess, sealer: GrantSealer) -> None:
        # The certificate is not verified: grants are authenticated, and proofs are of no other use.
        self._scheme = "http" if config.ssl_certfile is None else "https"
        self._access = access
        self._sealer = sealer
        self._session: aiohttp.ClientSession | None = None
        """None before the first question."""

    def install(self, app: web.Application) -> None:
        """Close the connections when an application ends."""

        async def close(app: web.Application) -> None:
            if self._session is not None:
                await self._session.close()

        app.on_cleanup.append(close)

    async def read_grant(self, host: str, port: int, room: int) -> str:
        """Return the grant of another engine's room; empty if it has none, or cannot be asked.

        Raises:
            FieldError: the host is in no control network.
        """
        try:
            address = await self._resolve(host, port)
            return await self._read(address, port, room)
        except (OSError, TimeoutError, aiohttp.ClientError, UnicodeError, ValueError) as error:
            if isinstance(error, FieldError):
                raise
            log.warning(
                "a prompt is computed here, because %s:%d cannot be asked for it: %s",
                host, port, str(error) or type(error).__name__,
            )  # fmt: skip
            return ""

    async def _resolve(self, host: str, port: int) -> str:
        """Return the IP address of a host. Raises OSError, UnicodeError, FieldError."""
        name = host.removeprefix("[").removesuffix("]")
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(name, port, type=socket.SOCK_STREAM)
        address = next((str(each[4][0]) for each in found), "")
        # Engines dial no address that only a client has named.
        if not self._access.contains(address):
            raise FieldError(
                "bootstrap_host",
                f"bootstrap_host {host[:200]!r} is in no network of --control-network: name the "
                "network of the prefill engines there",
            )
        return address

    async def _read(self, address: str, port: int, room: int) -> str:
        """Return a grant. Raises OSError, TimeoutError, aiohttp.ClientError, ValueError."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=TIMEOUT)
        shown = f"[{address}]" if ":" in address else address
        async with self._session.get(
            f"{self._scheme}://{shown}:{port}/kv_handoffs/{room}",
            headers={PROOF_HEADER: self._sealer.prove(room)},
            allow_redirects=False,
            ssl=False,
        ) as response:
            if response.status != 200:
                raise ValueError(f"it answers with status {response.status}")
            text = await response.content.read(MAX_GRANT_CHARACTERS + 1)
            return text.decode("ascii")
