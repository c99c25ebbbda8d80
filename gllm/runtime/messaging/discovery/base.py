"""Interface of the ways to find peers."""

from collections.abc import Callable
from typing import Protocol


class Discovery(Protocol):
    """Addresses to dial."""

    @property
    def target(self) -> str:
        """HOST:PORT of the entry, before its host is resolved."""

    async def watch(self, on_change: Callable[[frozenset[str]], None]) -> None:
        """Report the addresses, HOST:PORT, as soon as they are known and when they change.

        Returns if they never change again; otherwise runs until it is cancelled.
        """
