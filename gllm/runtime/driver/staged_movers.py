"""KV movers of an engine whose KV caches are in the memory of devices. Pure: time is an argument.

The movers see staging blocks in the memory of the host, of which all workers have the same number.
Before blocks are served the workers copy them to staging blocks, and what a fetch has written they
copy back. Blocks and staging blocks are in use until all workers have reported the copy and no
mover uses them: neither a step nor another copy writes what is still read.
"""

from collections.abc import Callable
from dataclasses import dataclass

from msgspec.structs import replace

from gllm.messages.kv_transfer import (
    COPY_LANE,
    CopyKvBlocks,
    FetchKv,
    KvFetched,
    KvReport,
    KvRevoked,
    ServeKv,
)
from gllm.runtime.driver.kv_movers import MoverGroup, SendCommand

RING_FULL = "no staging blocks are free: raise --kv-staging-tokens"
"""Cause of the failure of a fetch for which there is no memory."""


class StagingBlocks:
    """Free list of staging blocks: those that were freed longest ago are allocated first."""

    def __init__(self, num_blocks: int) -> None:
        """Create the list with the blocks 0 to `num_blocks` - 1."""
        self._free = list(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Remove `count` blocks from the free list and return them; None if there are too few."""
        if count > len(self._free):
            return None
        blocks, self._free = self._free[:count], self._free[count:]
        return blocks

    def free(self, blocks: list[int]) -> None:
        """Add blocks to the free list."""
        self._free += blocks


@dataclass
class _StagedTicket:
    """Ticket that is served from staging blocks."""

    staging_ids: list[int]
    copy: int
    """Number of the copy to them."""
    is_revoked: bool = False
    """True once no mover reads them."""


@dataclass
class _StagedFetch:
    """Fetch into staging blocks."""

    block_ids: list[int]
    staging_ids: list[int]
    end: KvFetched | None = None
    """Its success, which is reported once its blocks are copied to the device."""
    copy: int = 0
    """Number of that copy; 0 before."""


class StagedMovers:
    """KV movers of an engine on devices, with the interface of a MoverGroup.

    Reports of the movers are held back until the workers have copied the blocks.
    """

    def __init__(
        self,
        movers: MoverGroup,
        num_blocks: int,
        num_workers: int,
        copy: Callable[[CopyKvBlocks], None],
    ) -> None:
        """Create movers without tickets and fetches.

        Args:
            movers: read and write the staging blocks.
            num_blocks: staging blocks of each worker.
            num_workers: workers of all stages, each of which reports every copy.
            copy: sends a command to all workers.
        """
        self._movers, self._num_workers, self._copy = movers, num_workers, copy
        self._blocks = StagingBlocks(num_blocks)
        self._num_copies = 0
        self._copies: dict[int, int] = {}
        """Workers that have not reported a copy, by its number."""
        self._tickets: dict[int, _StagedTicket] = {}
        self._fetches: dict[int, _StagedFetch] = {}

    @property
    def num_free_blocks(self) -> int:
        """Number of staging blocks that nothing uses."""
        return self._blocks.num_free

    @property
    def is_complete(self) -> bool:
        """True if all movers are connected, so that KV can be fetched and served."""
        return self._movers.is_complete

    def has_mover(self, machine: int) -> bool:
        """Return True if the mover of a machine is connected."""
        return self._movers.has_mover(machine)

    def has_ticket(self, ticket: int) -> bool:
        """Return True if blocks may still be read under a ticket, by a mover or by a copy."""
        return ticket in self._tickets

    def connect(self, machine: int, send: SendCommand) -> None:
        """Add the mover of a machine."""
        self._movers.connect(machine, send)

    def serve(self, command: ServeKv) -> bool:
        """Copy a computed prompt's blocks to staging blocks, from which other engines fetch them.

        A layer can be read as soon as it is copied.

        Returns:
            False if no staging blocks are free or a mover is not connected: the ticket is not
            served, and the prompt's blocks need not be held.
        """
        ticket = command.ticket
        if ticket in self._tickets:
            return True
        assert not command.step, "prompts are copied once they are computed"
        staging_ids = None
        if self._movers.is_complete:
            staging_ids = self._blocks.allocate(len(command.block_ids))
        if staging_ids is None:
            return False
        number = self._start_copy(command.block_ids, staging_ids, False)
        self._tickets[ticket] = _StagedTicket(staging_ids, number)
        return self._movers.serve(
            replace(command, block_ids=staging_ids, step=number, lane=COPY_LANE)
        )

    def revoke(self, ticket: int, now: float) -> bool:
        """Revoke a ticket; return False if nothing reads blocks under it."""
        if ticket not in self._tickets:
            return False
        self._movers.revoke(ticket, now)
        return True

    def fetch(self, command: FetchKv) -> str:
        """Start a fetch to staging blocks; return why that is impossible, "" if it has started."""
        staging_ids = self._blocks.allocate(len(command.block_ids))
        if staging_ids is None:
            return RING_FULL
        if cause := self._movers.fetch(replace(command, block_ids=staging_ids)):
            self._blocks.free(staging_ids)
            return cause
        self._fetches[command.fetch] = _StagedFetch(command.block_ids, staging_ids)
        return ""

    def cancel(self, number: int, now: float) -> None:
        """End a fetch on the machines where it runs; a copy to the device ends by itself."""
        self._movers.cancel(number, now)

    def on_report(self, machine: int, report: KvReport, now: float) -> list[KvReport]:
        """Handle a report of one mover; return the reports that now hold for the whole engine."""
        reports: list[KvReport] = []
        for merged in self._movers.on_report(machine, report, now):
            match merged:
                case KvFetched(number) if merged.is_ok:
                    fetch = self._fetches[number]
                    fetch.end = merged
                    fetch.copy = self._start_copy(fetch.block_ids, fetch.staging_ids, True)
                case KvFetched(number):
                    self._blocks.free(self._fetches.pop(number).staging_ids)
                    reports.append(merged)
                case KvRevoked(ticket):
                    staged = self._tickets[ticket]
                    staged.is_revoked = True
                    if staged.copy not in self._copies:
                        reports.append(self._end_ticket(ticket))
                case _:
                    reports.append(merged)
        return reports

    def on_copied(self, number: int) -> list[KvReport]:
        """Handle a worker's report of a copy; return the reports that waited for it."""
        self._copies[number] -= 1
        if self._copies[number]:
            return []
        del self._copies[number]
        reports: list[KvReport] = []
        for ticket, staged in list(self._tickets.items()):
            if staged.copy == number and staged.is_revoked:
                reports.append(self._end_ticket(ticket))
        for fetch, running in list(self._fetches.items()):
            if running.copy == number:
                del self._fetches[fetch]
                self._blocks.free(running.staging_ids)
                assert running.end is not None, "it is copied once it has ended"
                reports.append(running.end)
        return reports

    def check_answers(self, now: float) -> None:
        """Report movers that do not answer; called once per turn of the driver."""
        self._movers.check_answers(now)

    def _start_copy(self, block_ids: list[int], staging_ids: list[int], is_fetched: bool) -> int:
        """Let all workers copy blocks; return the number of the copy."""
        self._num_copies += 1
        self._copies[self._num_copies] = self._num_workers
        self._copy(CopyKvBlocks(self._num_copies, block_ids, staging_ids, is_fetched))
        return self._num_copies

    def _end_ticket(self, ticket: int) -> KvRevoked:
        """Free the staging blocks of a ticket; return the report that its blocks are free."""
        self._blocks.free(self._tickets.pop(ticket).staging_ids)
        return KvRevoked(ticket)
