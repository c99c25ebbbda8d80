"""Lifecycle of processes that serve together, as `gllm up`, Ray and `gllm cluster` share it.

A group has an entry that requests reach, the router of a plan or the head of an engine, and others
behind it. Pure. `gllm up` runs the processes of one group (gllm/deploy/up/engine_manager.py), on
its machine or in Ray; the master of a cluster has the processes of each service on its nodes
(gllm/deploy/cluster/service_table.py), which run them by the same `LocalProcess`.
"""

from collections.abc import Iterable
from typing import Protocol, TypeVar


class GroupProcess(Protocol):
    """A process of a group that runs."""

    @property
    def is_entry(self) -> bool:
        """True if requests reach the group by it."""

    @property
    def is_ending(self) -> bool:
        """True if it was told to end."""


P = TypeVar("P", bound=GroupProcess)


def next_to_end(processes: Iterable[P]) -> list[P]:
    """Return the processes of a group that shall end now, if the group ends.

    The entry finishes its requests first, for which it needs the others.

    Args:
        processes: those of the group that have not exited.
    """
    running = list(processes)
    entries = [process for process in running if process.is_entry]
    return [process for process in entries or running if not process.is_ending]
