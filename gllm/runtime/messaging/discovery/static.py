"""Peers at an address that was given."""

from collections.abc import Callable

from gllm.options.addresses import Resolve
from gllm.runtime.messaging.link_config import format_host_port, parse_host_port


class StaticDiscovery:
    """One peer, whose name is resolved whenever it is dialled."""

    def __init__(self, entry: str, resolve: Resolve) -> None:
        """Create the discovery of HOST:PORT. Raises ValueError."""
        self.target = format_host_port(*parse_host_port(entry))

    async def watch(self, on_change: Callable[[frozenset[str]], None]) -> None:
        """See Discovery."""
        on_change(frozenset((self.target,)))
