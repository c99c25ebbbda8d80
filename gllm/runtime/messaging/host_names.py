"""Resolution of host names."""

import asyncio
import socket
from collections.abc import Awaitable, Callable

from gllm.options.addresses import format_host_port

Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a host and port as HOST:PORT with a numeric host; raises OSError."""


async def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of a host in the system's order of preference. See Resolve."""
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(format_host_port(str(info[4][0]), port) for info in infos))
