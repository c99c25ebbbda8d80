"""Peers behind a DNS name with one record per peer, such as a headless service of Kubernetes."""

import asyncio
import logging
from collections.abc import Callable

from gllm.options.addresses import Resolve
from gllm.runtime.messaging.link_config import format_host_port, parse_host_port

log = logging.getLogger(__name__)


class DnsDiscovery:
    """All addresses of a name, resolved again every few seconds."""

    def __init__(self, entry: str, resolve: Resolve, interval: float) -> None:
        """Create the discovery of NAME:PORT. Raises ValueError.

        Args:
            entry: name and port.
            resolve: resolution of names.
            interval: seconds between two resolutions.
        """
        self._host, self._port = parse_host_port(entry)
        self.target = format_host_port(self._host, self._port)
        self._resolve = resolve
        self._interval = interval

    async def watch(self, on_change: Callable[[frozenset[str]], None]) -> None:
        """See Discovery. While the name cannot be resolved, its last addresses stay."""
        known: frozenset[str] | None = None
        has_failed = False
        while True:
            try:
                addresses = frozenset(await self._resolve(self._host, self._port))
            except OSError as error:
                if not has_failed:
                    log.warning("%s cannot be resolved: %s; trying again", self._host, error)
                has_failed = True
            else:
                has_failed = False
                if addresses != known:
                    known = addresses
                    on_change(addresses)
            await asyncio.sleep(self._interval)
