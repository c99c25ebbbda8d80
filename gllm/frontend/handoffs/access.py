"""Access control of disaggregated prefill: a control key, or an address in a control network."""

from collections.abc import Sequence
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network

from aiohttp import web

from gllm.config.server import ServerConfig
from gllm.frontend.middleware.keys import ApiKeys, get_sent_keys, read_keys

CONTROL_KEY_HEADER = "X-Control-Key"
"""Header with the control key; `Authorization: Bearer` and `x-api-key` are accepted too, because
other routers send no further headers."""


class ControlAccess:
    """Checks that a request with KV-transfer fields comes from a trusted router.

    A trusted router sends a key of `--control-key-file` or has an address in `--control-network`.

    Raises:
        ValueError: The key file cannot be used; the message names the flag.
    """

    def __init__(self, config: ServerConfig) -> None:
        self.keys: Sequence[str] = ()
        """Control keys; the first signs, all are accepted. Without keys no request has access."""
        if config.control_key_file is not None:
            self.keys = read_keys(config.control_key_file, "--control-key-file")
        self._keys = ApiKeys(self.keys)
        self._networks = parse_networks(config.control_network)

    @property
    def is_enabled(self) -> bool:
        """True if there is a control key."""
        return bool(self.keys)

    def permits(self, request: web.Request) -> bool:
        """Return True if a request has a control key or comes from a control network."""
        if not self.is_enabled:
            return False
        shown = (
            [request.headers[CONTROL_KEY_HEADER]] if CONTROL_KEY_HEADER in request.headers else []
        )
        if any(self._keys.index_of(key) is not None for key in [*shown, *get_sent_keys(request)]):
            return True
        return request.remote is not None and self.contains(request.remote)

    def contains(self, address: str) -> bool:
        """Return True if an IP address is in a control network."""
        try:
            parsed = ip_address(address.partition("%")[0])
        except ValueError:
            return False
        mapped = getattr(parsed, "ipv4_mapped", None)
        return any((mapped or parsed) in network for network in self._networks)


def parse_networks(texts: Sequence[str]) -> list[IPv4Network | IPv6Network]:
    """Parse the IP networks of `--control-network`, such as 10.0.0.0/8.

    Raises:
        ValueError: A text is not a network; the message names the flag.
    """
    try:
        return [ip_network(text) for text in texts]
    except ValueError as error:
        raise ValueError(f"--control-network: {error}: use a network such as 10.0.0.0/8") from None
