"""Discovery of the peers to dial: one address, or all addresses of a DNS name."""

import asyncio
import logging
from collections.abc import Callable

from gllm.options.addresses import Resolve, format_host_port, parse_host_port, resolve_host
from gllm.runtime.messaging.link_config import RESOLVE_SECONDS

log = logging.getLogger(__name__)

DNS = "dns:"
"""Prefix of a name with one record per peer, such as a headless service of Kubernetes."""


class Discovery:
    """Addresses to dial of an entry of --router or --engines."""

    def __init__(
        self, entry: str, resolve: Resolve = resolve_host, resolve_seconds: float = RESOLVE_SECONDS
    ) -> None:
        """Create the discovery of HOST:PORT, or of dns:NAME:PORT for all addresses of a name.

        Args:
            entry: of --router or --engines.
            resolve: resolution of host names.
            resolve_seconds: interval at which a name with several addresses is resolved again.

        Raises:
            ValueError: the entry is neither.
        """
        # A host may have the name `dns`.
        self.has_many = entry.startswith(DNS) and ":" in entry.removeprefix(DNS)
        """True for all addresses of a name."""
        self._host, self._port = parse_host_port(entry.removeprefix(DNS * self.has_many))
        self.target = format_host_port(self._host, self._port)
        """HOST:PORT of the entry, before its host is resolved."""
        self._resolve = resolve
        self._resolve_seconds = resolve_seconds

    async def watch(self, on_change: Callable[[frozenset[str]], None]) -> None:
        """Report the addresses, HOST:PORT, as soon as they are known and when they change.

        Returns at once for a single address, whose name is resolved whenever it is dialled. Else it
        runs until it is cancelled; while the name cannot be resolved, its last addresses stay.
        """
        if not self.has_many:
            on_change(frozenset((self.target,)))
            return
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
            await asyncio.sleep(self._resolve_seconds)
