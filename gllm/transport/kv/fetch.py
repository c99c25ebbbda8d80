"""One fetch at the receiving mover: its parts on each machine of the owner, and its deadline."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from gllm.messages.kv_layout import KvLayout, plan_parts
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
from gllm.transport.kv.pages import KvPages, Slots
from gllm.transport.kv.part_gate import ReceiverGate


class KvFetchLateError(KvTransferError):
    """The other engine does not go on: the deadline of a fetch has passed."""


@dataclass
class RunningFetch:
    """State of one KV fetch from another engine: deadline, received bytes, cancellation.

    Shared by the threads that receive from the machines of the other engine.
    """

    command: FetchKv
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


class MachineTargets(NamedTuple):
    """Parts that this machine reads from one machine of another engine."""

    parts: list[TargetPart]
    """Head ranges and their destinations, in layer order."""
    num_readers: int
    """Machines of this engine that read from that machine, this one included."""


def find_targets(
    command: FetchKv,
    endpoint: KvEndpoint,
    pages: Sequence[KvPages],
    engine: Sequence[Sequence[KvLayout]],
    machine: int,
) -> dict[int, MachineTargets]:
    """Return which heads of which layers to read from each machine of the engine with the KV.

    Args:
        command: the fetch: ticket, tokens and local block ids.
        endpoint: machines and KV layouts of the engine that has the blocks.
        pages: KV caches of the workers of this machine.
        engine: KV layouts of the receiving engine, by machine and worker.
        machine: index of this machine in the receiving engine.

    Returns:
        The parts, by index of the machine in `endpoint.machines`.

    Raises:
        KvLayoutError, KvPagesError: the two layouts are incompatible, or blocks are missing.
    """
    readers: dict[int, set[int]] = {}
    targets: dict[int, list[TargetPart]] = {}
    slots: dict[int, Slots] = {}
    for part in plan_parts(engine, [owner.layouts for owner in endpoint.machines]):
        readers.setdefault(part.owner_machine, set()).add(part.machine)
        if part.machine != machine:
            continue
        own = pages[part.worker]
        if part.worker not in slots:
            offset = command.first_token % own.layout.block_size
            slots[part.worker] = own.find_slots(command.block_ids, offset, command.num_tokens)
        read = ReadPart(part.owner, part.layer, part.heads.start, len(part.heads))
        target = TargetPart(read, own, slots[part.worker])
        targets.setdefault(part.owner_machine, []).append(target)
    return {
        # As they are computed.
        owner: MachineTargets(sorted(parts, key=lambda each: each.part.layer), len(readers[owner]))
        for owner, parts in targets.items()
    }


def fetch_from_machine(
    fetch: RunningFetch,
    connection: KvConnection,
    backend: KvBackend,
    names: tuple[str, str],
    targets: MachineTargets,
) -> None:
    """Fetch the requested head ranges of layers from one machine of another engine.

    Args:
        fetch: state of the whole fetch, also used for the other machines.
        connection: connection to the KV mover of the machine.
        backend: backend that transfers the bytes.
        names: name of the backend and of the encoding.
        targets: head ranges of layers that the machine has, with their destinations.

    Raises:
        OSError, KvFrameError: the connection failed or sent invalid data.
        KvTransferError: the machine refused, the fetch was cancelled or is late, or the blocks were
            freed before the last byte was read.
    """
    command, parts, num_fetched = fetch.command, targets.parts, 0
    while num_fetched < command.num_tokens:
        request = ReadRequest(
            command.first_token + num_fetched,
            command.num_tokens - num_fetched,
            *names,
            [part.part for part in parts],
            command.is_per_layer,
        )
        ticket = ReadTicket(command.ticket, command.reader, targets.num_readers)
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
