"""Kinds of discovery by the scheme of an entry of --router or --engines."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Protocol

from gllm.options.addresses import Resolve, resolve_host
from gllm.runtime.messaging.discovery.dns import DnsDiscovery
from gllm.runtime.messaging.discovery.static import StaticDiscovery
from gllm.runtime.messaging.link_config import RESOLVE_SECONDS


class Discovery(Protocol):
    """Addresses to dial."""

    @property
    def target(self) -> str:
        """HOST:PORT of the entry, before its host is resolved."""

    async def watch(self, on_change: Callable[[frozenset[str]], None]) -> None:
        """Report the addresses, HOST:PORT, as soon as they are known and when they change.

        Returns if they never change again; otherwise runs until it is cancelled.
        """


SCHEMES: Mapping[str, Callable[[str, Resolve, float], Discovery]] = MappingProxyType(
    {"dns": DnsDiscovery}
)
"""Kinds by the word before the first colon; entries without one are HOST:PORT."""


def make_discovery(
    entry: str, resolve: Resolve = resolve_host, resolve_seconds: float = RESOLVE_SECONDS
) -> Discovery:
    """Return the discovery of an entry: HOST:PORT, or dns:NAME:PORT for all addresses of a name.

    Args:
        entry: of --router or --engines.
        resolve: resolution of host names.
        resolve_seconds: interval at which a name with several addresses is resolved again.

    Raises:
        ValueError: the entry is neither.
    """
    scheme, _, rest = entry.partition(":")
    # A host may have the name of a scheme.
    if scheme in SCHEMES and ":" in rest:
        return SCHEMES[scheme](rest, resolve, resolve_seconds)
    return StaticDiscovery(entry, resolve)
