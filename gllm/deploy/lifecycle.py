"""Lifecycle of processes that serve together, as `gllm up`, Ray and `gllm cluster` share it.

A group has an entry that requests reach, the router of a plan or the head of an engine, and others
behind it. `gllm up` runs the processes of one group (gllm/deploy/up/engine_manager.py), on
its machine or in Ray; the master of a cluster has the processes of each service on its nodes
(gllm/deploy/cluster/service_table.py), which run them by the same `LocalProcess`.
"""

import logging
from collections.abc import Iterable
from typing import Protocol, TypeVar

log = logging.getLogger("gllm")


class GroupProcess(Protocol):
    """Process of a group that serves together: a router with its engines, or one engine."""

    @property
    def is_entry(self) -> bool:
        """True if it receives the requests of the group: a router, or the head of an engine."""

    @property
    def is_ending(self) -> bool:
        """True if its end was requested."""


P = TypeVar("P", bound=GroupProcess)


class RunningProcess(Protocol):
    """Process that can be started, probed, drained and killed, here or in a Ray cluster."""

    @property
    def is_ending(self) -> bool:
        """True if its end was requested."""

    @property
    def has_failed(self) -> bool:
        """True if it has ended with an error."""

    async def run(self) -> str:
        """Start the process, wait until it has ended and return the cause; may raise errors."""

    async def is_ready(self) -> bool:
        """Return True if it is ready for requests."""

    def end(self) -> None:
        """Drain the process and end it, immediately or once it has started."""

    def kill(self) -> None:
        """Kill the process."""


async def run_to_end(process: RunningProcess) -> tuple[str, bool]:
    """Run a process until it ends; return the cause of its end, and True if it has failed.

    Errors at the start or while it is watched are failures, too.
    """
    try:
        cause = await process.run()
    except OSError as error:
        return f"it could not be started: {error}", True
    except Exception as error:
        log.exception("a process failed")
        process.kill()
        return f"it could not be watched: {error}", True
    return cause, process.has_failed


def next_to_end(processes: Iterable[P]) -> list[P]:
    """Return the processes to end next when a group is shut down.

    The process that receives requests (router or head) ends first, because finishing its requests
    requires the others.

    Args:
        processes: processes of the group that have not exited.
    """
    running = list(processes)
    entries = [process for process in running if process.is_entry]
    return [process for process in entries or running if not process.is_ending]
