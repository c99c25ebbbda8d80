"""Host names and addresses: which of them can be reached from this machine alone."""

import ipaddress

Address = ipaddress.IPv4Address | ipaddress.IPv6Address


def parse_ip_address(name: str) -> Address | None:
    """Return the IP address that a text is, or None if it is a host name."""
    try:
        return ipaddress.ip_address(name)
    except ValueError:
        return None


def is_loopback(name: str) -> bool:
    """Return True if a host name or IP address is a loopback one."""
    address = parse_ip_address(name)
    if address is None:
        return name.lower() == "localhost"
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback
