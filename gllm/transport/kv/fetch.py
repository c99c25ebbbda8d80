"""One fetch at the receiving mover: its parts on each machine of the owner, and its deadline."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from gllm.messages.kv_layout import find_moves
from gllm.messages.kv_transfer import FetchKv
from gllm.transport.kv.backends.base import FetchTarget, KvBackend, TargetPart, skip_wait
from gllm.transport.kv.break_even import FetchDeadline
from gllm.transport.kv.endpoint import KvEndpoint
from gllm.transport.kv.frames import (
    KvConnection,
    KvFrameKind,
    KvTransferError,
    ReadConfirmed,
    ReadPart,
    ReadRequest,
    ReadTicket,
)
from gllm.transport.kv.pages import KvPages
from gllm.transport.kv.part_gate import ReceiverGate


class KvFetchLateError(KvTransferError):
    """The other engine does not go on: the deadline of a fetch has passed."""


@dataclass
class RunningFetch:
    """State of one KV fetch from another engine: deadline, received bytes, cancellation.

    Shared by the threads that receive from the machines of the other engine.
    """

    command: FetchKv
    reader: int
    """Random number by which the other engine recognizes this fetch (`ReadTicket.reader`)."""
    epoch: int
    deadline: FetchDeadline
    on_started: "Callable[[RunningFetch], None]"
    """Called with this fetch when its first bytes arrive."""
    clock: Callable[[], float] = time.monotonic
    num_bytes: int = 0
    arrival: float = field(init=False)
    """Time of the command in seconds."""
    _is_cancelled: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        """Count the time from now on."""
        self.arrival = self.clock()

    @property
    def is_cancelled(self) -> bool:
        """True if the fetch has been cancelled."""
        return self._is_cancelled.is_set()

    def cancel(self) -> None:
        """Cancel the fetch; callable on any thread."""
        self._is_cancelled.set()

    def check(self) -> None:
        """Raise KvTransferError if the fetch is cancelled or late."""
        if self._is_cancelled.is_set():
            raise KvTransferError("the fetch was cancelled")
        if self.deadline.is_late(self.clock()):
            raise KvFetchLateError("the fetch is late")

    def on_bytes(self, num_bytes: int) -> None:
        """Count bytes that were written. Raises KvTransferError if the fetch has to end."""
        if num_bytes:
            if not self.num_bytes:
                self.on_started(self)
            self.num_bytes += num_bytes
        self.deadline.last_arrival = self.clock()
        self.check()


def find_targets(
    command: FetchKv, endpoint: KvEndpoint, pages: Sequence[KvPages], first_position: int = 0
) -> dict[int, list[TargetPart]]:
    """Return which heads of which layers to read from each machine of the engine with the KV.

    Args:
        command: the fetch: ticket, tokens and local block ids.
        endpoint: machines and KV layouts of the engine that has the blocks.
        pages: KV caches of the workers of this machine.
        first_position: number of workers of the receiving engine on the machines before this one.

    Returns:
        Head ranges and their destinations in layer order, by index of the machine in
        `endpoint.machines`.

    Raises:
        KvLayoutError, KvPagesError: the two layouts are incompatible, or blocks are missing.
    """
    places = [
        (number, place)
        for number, machine in enumerate(endpoint.machines)
        for place in range(len(machine.layouts))
    ]
    layouts = [endpoint.machines[machine].layouts[place] for machine, place in places]
    by_machine: dict[int, list[TargetPart]] = {}
    for position, own in enumerate(pages, start=first_position):
        offset = command.first_token % own.layout.block_size
        slots = own.find_slots(command.block_ids, offset, command.num_tokens)
        for move in find_moves(own.layout, layouts, position):
            machine, place = places[move.peer]
            part = ReadPart(place, move.layer, move.heads.start, len(move.heads))
            by_machine.setdefault(machine, []).append(TargetPart(part, own, slots))
    for parts in by_machine.values():
        # As they are computed.
        parts.sort(key=lambda part: part.part.layer)
    return by_machine


def fetch_from_machine(
    fetch: RunningFetch,
    connection: KvConnection,
    backend: KvBackend,
    names: tuple[str, str],
    parts: list[TargetPart],
) -> None:
    """Fetch the requested head ranges of layers from one machine of another engine.

    Args:
        fetch: state of the whole fetch, also used for the other machines.
        connection: connection to the KV mover of the machine.
        backend: backend that transfers the bytes.
        names: name of the backend and of the encoding.
        parts: head ranges of layers that the machine has, with their destinations.

    Raises:
        OSError, KvFrameError: the connection failed or sent invalid data.
        KvTransferError: the machine refused, the fetch was cancelled or is late, or the blocks were
            freed before the last byte was read.
    """
    command, num_fetched = fetch.command, 0
    while num_fetched < command.num_tokens:
        request = ReadRequest(
            command.first_token + num_fetched,
            command.num_tokens - num_fetched,
            *names,
            [part.part for part in parts],
            command.is_per_layer,
        )
        ticket = ReadTicket(command.ticket, fetch.reader)
        connection.send_struct(KvFrameKind.TICKET, ticket)
        connection.send_struct(KvFrameKind.READ, request)
        gate = None
        if request.is_per_layer:
            # Announcements keep the fetch alive as bytes do.
            gate = ReceiverGate(
                connection, request.num_tokens, len(parts), lambda: fetch.on_bytes(0)
            )
            request = msgspec.structs.replace(request, num_tokens=gate.wait_for_tokens())
        end = num_fetched + request.num_tokens
        left = [part._replace(slots=part.slots[num_fetched:end]) for part in parts]
        wait_for_part = skip_wait if gate is None else gate.wait_for_part
        backend.fetch(
            connection, FetchTarget(request, left, fetch.on_bytes, wait_for_part, fetch.check)
        )
        connection.send(KvFrameKind.CONFIRM)
        if not connection.receive_struct(KvFrameKind.CONFIRMED, ReadConfirmed).is_held:
            raise KvTransferError("the other engine did not keep the blocks until the end")
        num_fetched = end
