"""Host names and addresses: their text form, and those that only this machine can reach."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_ip_address(name: str) -> Address | None:
    """Return the IP address that a text is, or None if it is a host name."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_wildcard(name: str) -> bool:
    """Return True if an IP address is the wildcard of all addresses of a machine."""
    address = parse_ip_address(name)
    return address is not None and address.is_unspecified


def is_loopback(name: str) -> bool:
    """Return True if a host name or IP address is a loopback one."""
    address = parse_ip_address(name)
    if address is None:
        return name.lower() == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def parse_host_port(text: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT; an IPv6 address is in brackets.

    Raises:
        ValueError: it is no such address.
    """
    host, colon, port = text.rpartition(":")
    is_bracketed = host.startswith("[") and host.endswith("]")
    if is_bracketed:
        host = host[1:-1]
    is_host = bool(host) and not set(host) & set("[]/ ") and (is_bracketed or ":" not in host)
    if not (colon and is_host and port.isascii() and port.isdigit() and 0 < int(port) < 2**16):
        raise ValueError(f"{text!r} is no address of the form HOST:PORT")
    return host, int(port)


def format_host_port(host: str, port: int) -> str:
    """Return HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a host and port as HOST:PORT with a numeric host; raises OSError."""


async def resolve_host(host: str, port: int) -> list[str]:
    """Return the addresses of a host in the system's order of preference. See Resolve."""
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(format_host_port(str(info[4][0]), port) for info in infos))
