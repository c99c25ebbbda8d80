"""Disaggregated prefill under SGLang's router: the decode engine requests a KV grant over HTTP.

SGLang's router sends a request to both engines at the same time, with the same random number in
`bootstrap_room`, called the room. The prefill engine stores a KV grant for this room after the
prefill; the decode engine requests the grant and fetches the KV blocks with it.
"""

import asyncio
import logging
import socket
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.frontend.handoffs.access import ControlAccess
from gllm.frontend.handoffs.grant import MAX_GRANT_CHARACTERS, GrantSealer
from gllm.options.field_types import FieldError

OPEN_SECONDS = 5.0
"""Time for which a decode engine waits until the prefill engine has received the request."""
GRANT_SECONDS = 60.0
"""Time for which it then waits for the end of the prefill."""
KEEP_SECONDS = 30.0
"""Time for which a grant is stored: as long as the lease of the KV blocks."""
MAX_ROOMS = 4096
"""Maximum number of rooms; further requests are computed without a hand-off."""


@dataclass
class _Room:
    opened: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the prefill engine has received the request."""
    closed: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the prefill has ended."""
    grant: str = ""
    """Empty if the KV blocks are not held."""
    num_waiting: int = 0


class RoomTable:
    """Table of requests from SGLang's router, by `bootstrap_room`, with their KV grants.

    Used by a prefill engine. `bootstrap_room` is the random number that the router sends with a
    request to both engines. A KV grant is the signed text that permits the decode engine to fetch
    the KV blocks.

    Args:
        open_seconds: Time for which the decode engine waits for the prefill engine's request.
        grant_seconds: Time for which it then waits for the end of the prefill.
        keep_seconds: Time for which a grant is stored after the prefill.
    """

    def __init__(
        self,
        open_seconds: float = OPEN_SECONDS,
        grant_seconds: float = GRANT_SECONDS,
        keep_seconds: float = KEEP_SECONDS,
    ) -> None:
        self._open_seconds = open_seconds
        self._grant_seconds = grant_seconds
        self._keep_seconds = keep_seconds
        self._rooms: dict[int, _Room] = {}

    def __len__(self) -> int:
        """Return the number of rooms."""
        return len(self._rooms)

    def open(self, number: int) -> bool:
        """Register a request of this engine by its room.

        Returns:
            False if the room is in use or there are too many.
        """
        room = self._rooms.get(number)
        if room is None or room.closed.is_set():
            room = self._add(number)
        if room is None or room.opened.is_set():
            return False
        room.opened.set()
        return True

    def publish(self, number: int, grant: str) -> None:
        """Store the grant of a room at the end of its prefill, and wake the waiting decode engine.

        Args:
            number: Number of a room that `open` has registered.
            grant: Signed KV grant; empty if the engine keeps no KV blocks.
        """
        room = self._rooms[number]
        room.grant = grant
        room.closed.set()
        # Also without a grant, so that the decode engine computes the prompt at once.
        asyncio.get_running_loop().call_later(self._keep_seconds, self._forget, number, room)

    async def wait(self, number: int) -> str:
        """Wait for the grant of a room; return an empty text if there is none before a timeout."""
        room = self._rooms.get(number) or self._add(number)
        if room is None:
            return ""
        room.num_waiting += 1
        try:
            async with asyncio.timeout(self._open_seconds):
                await room.opened.wait()
            async with asyncio.timeout(self._grant_seconds):
                await room.closed.wait()
        except TimeoutError:
            return ""
        finally:
            room.num_waiting -= 1
            # A grant is used once, and a room that was never opened is not kept.
            if not room.num_waiting and room.opened.is_set() == room.closed.is_set():
                self._forget(number, room)
        return room.grant

    def _add(self, number: int) -> _Room | None:
        if len(self._rooms) >= MAX_ROOMS:
            return None
        room = self._rooms[number] = _Room()
        return room

    def _forget(self, number: int, room: _Room) -> None:
        if self._rooms.get(number) is room:
            del self._rooms[number]


log = logging.getLogger(__name__)

PROOF_HEADER = "X-Control-Proof"
"""Header with the proof that the sender has the control key."""
CONNECT_SECONDS = 2.0
TIMEOUT = aiohttp.ClientTimeout(
    total=OPEN_SECONDS + GRANT_SECONDS + CONNECT_SECONDS, sock_connect=CONNECT_SECONDS
)
"""Timeouts of a request for a grant: the other engine answers within both waits."""


class RoomClient:
    """HTTP client of a decode engine that requests KV grants from prefill engines.

    A KV grant is the signed text that permits it to fetch the KV blocks of a `bootstrap_room`.

    Args:
        config: Configuration of the server; engines with a certificate use HTTPS.
        access: Networks in which prefill engines may be.
        sealer: Signs the requests.
    """

    def __init__(self, config: ServerConfig, access: ControlAccess, sealer: GrantSealer) -> None:
        # The certificate is not verified: grants are authenticated, and proofs are of no other use.
        self._scheme = "http" if config.ssl_certfile is None else "https"
        self._access = access
        self._sealer = sealer
        self._session: aiohttp.ClientSession | None = None
        """None before the first request."""

    async def close(self, app: web.Application) -> None:
        """Close the connections; called at the end of the application."""
        if self._session is not None:
            await self._session.close()

    async def read_grant(self, host: str, port: int, room: int) -> str:
        """Return a prefill engine's grant for a room; empty if there is none or the request fails.

        Args:
            host: Host of the prefill engine.
            port: Its HTTP port.
            room: Value of `bootstrap_room`.

        Raises:
            FieldError: The host is in no control network.
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
        address = next((str(found_address[4][0]) for found_address in found), "")
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
