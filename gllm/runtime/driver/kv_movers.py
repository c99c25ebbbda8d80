"""KV movers of all machines of an engine as one. Pure: time is an argument.

Each machine reads and writes the blocks of its own stages. Blocks are in use until all machines
have answered: a fetch has succeeded once all machines have their parts, and a ticket has ended once
no machine serves it. A mover that ends lets all fetches that it has part in fail, and its tickets
are revoked on the other machines.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from gllm.messages.kv_disk import KvDiskCommand, LoadKvFromDisk
from gllm.messages.kv_transfer import (
    CancelKvFetch,
    FetchKv,
    KvCommand,
    KvFetched,
    KvFetchStarted,
    KvReport,
    KvRevoked,
    RevokeKv,
    ServeKv,
)
from gllm.transport.descriptors import DescriptorError

log = logging.getLogger(__name__)

ANSWER_SECONDS = 10.0
"""Time within which a KV mover has to confirm a revocation or to end a cancelled fetch."""
_MAX_TURN_SECONDS = 5.0
"""Interval between two checks of the answers after which this process itself was suspended."""
GONE = "the KV mover has ended"
"""Cause of the failure of a fetch whose mover has ended."""

SendCommand = Callable[[KvCommand], None]
"""Sends to a KV mover. Raises DescriptorError if it has ended or does not read."""


class UnansweredCommands:
    """Commands that a KV mover has not answered yet, with their deadlines.

    They are here because the mover may freeze. Pure: time is an argument.
    """

    def __init__(self) -> None:
        """Create without commands."""
        self._times: dict[tuple[str, int], float] = {}
        """Begin of the wait for each answer, by kind and number of the command, oldest first."""
        self._last_check = 0.0

    def add(self, kind: str, number: int, now: float) -> None:
        """Expect the answer to a command from now on."""
        self._times.setdefault((kind, number), now)

    def remove(self, kind: str, number: int) -> None:
        """Note an answer; one that is not expected is ignored."""
        self._times.pop((kind, number), None)

    def clear(self) -> None:
        """Expect no answer any more."""
        self._times.clear()

    def is_overdue(self, now: float) -> bool:
        """Return True if an answer is late; called once per turn of the driver."""
        if now - self._last_check > _MAX_TURN_SECONDS:
            # The answers may have arrived without being read.
            self._times = dict.fromkeys(self._times, now)
        self._last_check = now
        return any(now - begin > ANSWER_SECONDS for begin in self._times.values())


@dataclass
class _Mover:
    """The mover of one machine."""

    send: SendCommand
    unanswered: UnansweredCommands = field(default_factory=UnansweredCommands)


@dataclass
class _GroupFetch:
    """A fetch and its ends on the machines so far."""

    waiting: set[int]
    """Machines that may still write to the blocks."""
    has_started: bool = False
    is_ok: bool = True
    num_bytes: int = 0
    seconds: float = 0.0
    cause: str = ""


class MoverGroup:
    """The KV movers of an engine's machines, with the interface of one mover that has all parts."""

    def __init__(self, num_machines: int, report_stuck: Callable[[int], None]) -> None:
        """Create a group of which no mover is connected.

        Args:
            num_machines: machines of the engine.
            report_stuck: called with the index of a machine whose mover does not read or answer.
        """
        self._num_machines = num_machines
        self._report_stuck = report_stuck
        self._movers: dict[int, _Mover] = {}
        """Connected movers, by machine."""
        self._fetches: dict[int, _GroupFetch] = {}
        """By number."""
        self._tickets: dict[int, set[int]] = {}
        """Machines that may still be read from under a ticket."""
        self._revoking: set[int] = set()
        """Tickets that are revoked everywhere: they are not served again."""

    @property
    def is_complete(self) -> bool:
        """True if all movers are connected, so that KV can be fetched and served."""
        return len(self._movers) == self._num_machines

    def has_mover(self, machine: int) -> bool:
        """Return True if the mover of a machine is connected."""
        return machine in self._movers

    def has_ticket(self, ticket: int) -> bool:
        """Return True if a machine may still be read from under a ticket."""
        return ticket in self._tickets

    def connect(self, machine: int, send: SendCommand) -> None:
        """Add the mover of a machine, which has just started; `on_gone` was called before."""
        self._movers[machine] = _Mover(send)

    def serve(self, command: ServeKv) -> bool:
        """Serve blocks on all machines, or on those that have not ended the ticket.

        Returns:
            False if no machine has the ticket and none can get it, so that its blocks are free.
        """
        ticket = command.ticket
        if ticket not in self._tickets:
            if not self.is_complete:
                return False
            self._tickets[ticket] = set(self._movers)
        if ticket not in self._revoking:
            for machine in sorted(self._tickets[ticket]):
                self._send(machine, command)
        return True

    def revoke(self, ticket: int, now: float) -> bool:
        """Revoke a ticket on all machines that have it; return False if there are none."""
        if ticket not in self._tickets:
            return False
        if ticket not in self._revoking:
            self._revoking.add(ticket)
            for machine in sorted(self._tickets[ticket]):
                self._movers[machine].unanswered.add("revoke", ticket, now)
                self._send(machine, RevokeKv(ticket))
        return True

    def fetch(self, command: FetchKv | LoadKvFromDisk) -> str:
        """Start a fetch on all machines; return why that is impossible, "" if it has started."""
        if not self.is_complete:
            return GONE
        self._fetches[command.fetch] = _GroupFetch(set(self._movers))
        for machine in sorted(self._movers):
            self._send(machine, command)
        return ""

    def send_to_all(self, command: KvDiskCommand) -> None:
        """Send a command that is not followed here to all machines."""
        for machine in sorted(self._movers):
            self._send(machine, command)

    def cancel(self, number: int, now: float) -> None:
        """End a fetch on the machines where it runs."""
        fetch = self._fetches.get(number)
        for machine in sorted(fetch.waiting if fetch else ()):
            self._movers[machine].unanswered.add("cancel", number, now)
            self._send(machine, CancelKvFetch(number))

    def on_report(self, machine: int, report: KvReport, now: float) -> list[KvReport]:
        """Handle a report of one machine; return those that now hold for the engine."""
        mover = self._movers.get(machine)
        match report:
            case KvFetchStarted(number):
                fetch = self._fetches.get(number)
                if fetch is None or fetch.has_started:
                    return []
                fetch.has_started = True
                return [report]
            case KvFetched(number):
                if mover is not None:
                    mover.unanswered.remove("cancel", number)
                return self._end_part(machine, report, now)
            case KvRevoked(ticket):
                if mover is not None:
                    mover.unanswered.remove("revoke", ticket)
                return self._end_ticket(machine, ticket)
        return self.on_gone(machine, now)

    def on_gone(self, machine: int, now: float) -> list[KvReport]:
        """Remove a mover that has ended, which reads and writes no blocks any more.

        Returns:
            Reports that now hold for the engine; those of other machines follow.
        """
        if self._movers.pop(machine, None) is None:
            return []
        reports: list[KvReport] = []
        for number in list(self._fetches):
            gone = KvFetched(number, is_ok=False, cause=GONE)
            reports += self._end_part(machine, gone, now)
        for ticket in list(self._tickets):
            if machine in self._tickets[ticket]:
                reports += self._end_ticket(machine, ticket)
                self.revoke(ticket, now)
        return reports

    def check_answers(self, now: float) -> None:
        """Report movers that do not answer; called once per turn of the driver."""
        for machine, mover in self._movers.items():
            if mover.unanswered.is_overdue(now):
                # It may still write: nothing is freed before the process has ended.
                log.warning("gllm-link has not answered for %g seconds", ANSWER_SECONDS)
                mover.unanswered.clear()
                mover.send = _drop
                self._report_stuck(machine)

    def _end_part(self, machine: int, report: KvFetched, now: float) -> list[KvReport]:
        """Note the end of a fetch on one machine; return its end, if it was the last one."""
        fetch = self._fetches.get(report.fetch)
        if fetch is None or machine not in fetch.waiting:
            return []
        fetch.waiting.discard(machine)
        fetch.is_ok = fetch.is_ok and report.is_ok
        fetch.num_bytes += report.num_bytes
        fetch.seconds = max(fetch.seconds, report.seconds)
        fetch.cause = fetch.cause or report.cause
        if fetch.waiting:
            if not report.is_ok:
                self.cancel(report.fetch, now)
            return []
        del self._fetches[report.fetch]
        return [KvFetched(report.fetch, fetch.is_ok, fetch.num_bytes, fetch.seconds, fetch.cause)]

    def _end_ticket(self, machine: int, ticket: int) -> list[KvReport]:
        """Note the end of a ticket on one machine; return its end, if it was the last one."""
        machines = self._tickets.get(ticket, set())
        machines.discard(machine)
        if machines or ticket not in self._tickets:
            return []
        del self._tickets[ticket]
        self._revoking.discard(ticket)
        return [KvRevoked(ticket)]

    def _send(self, machine: int, command: KvCommand) -> None:
        """Send a command to one mover; what it does not read ends with it."""
        mover = self._movers[machine]
        try:
            mover.send(command)
        except DescriptorError as error:
            # The rest of this command may be missing. The end of the channel follows.
            mover.send = _drop
            if isinstance(error.__cause__, BlockingIOError):
                self._report_stuck(machine)


def _drop(command: KvCommand) -> None:
    """Send nothing, because the KV mover has gone or does not read."""
