"""A connection without a client: bytes out, bytes in."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import urlsplit

from aiohttp.test_utils import TestClient

SECONDS = 60
"""For what should happen at once, on a machine however busy."""


class Raw:
    """A TCP connection to a server."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection

    async def send(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def receive(self, size: int = 2**20) -> bytes:
        """What there is to read, at least a byte; nothing at the end."""
        async with asyncio.timeout(SECONDS):
            return await asyncio.get_running_loop().sock_recv(self._socket, size)

    async def rest(self) -> bytes:
        """All until the server closes."""
        received = b""
        while piece := await self.receive():
            received += piece
        return received

    async def answer(self) -> tuple[int, dict[str, str], Any]:
        """Status, headers in lower case, and JSON of one answer that has a length."""
        received = b""
        while b"\r\n\r\n" not in received:
            piece = await self.receive()
            assert piece, f"closed after {received!r}"
            received += piece
        head, _, body = received.partition(b"\r\n\r\n")
        first, *lines = head.decode().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        while len(body) < int(headers["content-length"]):
            body += await self.receive()
        return int(first.split()[1]), headers, json.loads(body)


@asynccontextmanager
async def connected(client: TestClient, window: int | None = None) -> AsyncIterator[Raw]:
    """A connection to a test's server; `window`: bytes of its receive buffer."""
    url = urlsplit(str(client.make_url("/")))
    with socket.socket() as made:
        if window is not None:
            made.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, window)
        made.setblocking(False)
        await asyncio.get_running_loop().sock_connect(made, (url.hostname, url.port))
        yield Raw(made)


def post(path: str, body: dict[str, Any], *headers: str) -> bytes:
    """The bytes of a request."""
    data = json.dumps(body).encode()
    lines = [f"POST {path} HTTP/1.1", "Host: x", f"Content-Length: {len(data)}", *headers]
    return "\r\n".join([*lines, "", ""]).encode() + data
