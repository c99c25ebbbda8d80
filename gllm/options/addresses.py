"""Host names and addresses: their text form, and those that only this machine can reach."""

import asyncio
import ipaddress
import socket
from collections.abc import Awaitable, Callable

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_ip_address(name: str) -> Address | None:
    """Return a text as an IP address object, or None if it is not an IP address."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_wildcard(name: str) -> bool:
    """Return True for 0.0.0.0 and ::, the addresses that bind all interfaces of a machine."""
    address = parse_ip_address(name)
    return address is not None and address.is_unspecified


def undialable_reason(text: str) -> str:
    """Return the reason for which other machines cannot dial an address; empty if they may.

    Args:
        text: HOST, or HOST:PORT; its form is checked elsewhere.
    """
    try:
        host, _ = parse_host_port(text)
    except ValueError:
        host = text.removeprefix("[").removesuffix("]")
    if not is_wildcard(host):
        return ""
    return f"other machines cannot dial {host}: give the address that they reach"


def is_loopback(name: str) -> bool:
    """Return True for localhost and loopback IP addresses, which only this machine can reach."""
    address = parse_ip_address(name)
    if address is None:
        return name.lower() == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


def parse_host_port(text: str) -> tuple[str, int]:
    """Parse HOST:PORT and return both; an IPv6 address is in brackets, as in [::1]:8000.

    Raises:
        ValueError: the text has another form, or the port is not in 1..65535.
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
    """Return HOST:PORT as text, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


Resolve = Callable[[str, int], Awaitable[list[str]]]
"""Returns the addresses of a host and port as HOST:PORT with a numeric host; raises OSError."""


async def resolve_host(host: str, port: int) -> list[str]:
    """Look up a host name and return its addresses as HOST:PORT with numeric hosts.

    Addresses are in the system's order of preference. Raises OSError if the name cannot be
    resolved.
    """
    loop = asyncio.get_running_loop()
    infos = await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(format_host_port(str(info[4][0]), port) for info in infos))
