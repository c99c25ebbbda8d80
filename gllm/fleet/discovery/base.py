"""Interface of the ways to find peers, and the resolution of host names."""

import asyncio
import socket
from collections.abc import Awaitable, Callable
from typing import Protocol

from gllm.fleet.link_config import format_host_port

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a host and port as HOST:PORT with a numeric host; raises OSError."""


class Discovery(Protocol):
    """Addresses to dial."""

    @property
    def target(self) -> str:
        """HOST:PORT of the entry, before its host is resolved."""

    async def watch(self, on_change: Callable[[frozenset[str]], None]) -> None:
        """Report the addresses, HOST:PORT, as soon as they are known and when they change.

        Returns if they never change again; otherwise runs until it is cancelled.
        """


async def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of a host in the system's order of preference. See Resolve."""
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(format_host_port(str(info[4][0]), port) for info in infos))
