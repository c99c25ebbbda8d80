"""One fetch at the receiving mover: its parts on each machine of the owner, and its deadline."""

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from gllm.messages.kv_layout import KvMove, find_moves
from gllm.messages.kv_transfer import FetchKv
from gllm.transport.kv.backends.base import FetchTarget, KvBackend, TargetPart
from gllm.transport.kv.break_even import FetchDeadline
from gllm.transport.kv.endpoint import KvEndpoint
from gllm.transport.kv.frames import (
    KvConnection,
    KvFrameKind,
    KvTransferError,
    ReadConfirmed,
    ReadPart,
    ReadRequest,
)
from gllm.transport.kv.pages import KvPages
from gllm.transport.kv.part_gate import ReceiverGate


@dataclass
class RunningFetch:
    """State of a fetch that the mover's threads share."""

    command: FetchKv
    reader: int
    """See ReadRequest."""
    epoch: int
    deadline: FetchDeadline
    on_started: Callable[[], None]
    """Called with the first bytes."""
    clock: Callable[[], float] = time.monotonic
    num_bytes: int = 0
    _is_cancelled: threading.Event = field(default_factory=threading.Event)

    def cancel(self) -> None:
        """End the fetch soon; called on any thread."""
        self._is_cancelled.set()

    def check(self) -> None:
        """Raise KvTransferError if the fetch has to end."""
        if self._is_cancelled.is_set():
            raise KvTransferError("the fetch was cancelled")
        if self.deadline.is_late(self.clock()):
            raise KvTransferError("the fetch is late")

    def on_bytes(self, num_bytes: int) -> None:
        """Note bytes that were written. Raises KvTransferError."""
        if num_bytes:
            if not self.num_bytes:
                self.on_started()
            self.num_bytes += num_bytes
        self.deadline.on_bytes(self.clock())
        self.check()


def find_targets(
    command: FetchKv, endpoint: KvEndpoint, pages: Sequence[KvPages], first_position: int = 0
) -> dict[int, list[TargetPart]]:
    """Return the parts of a fetch, by machine of the owner and in the order of the layers.

    Args:
        command: The fetch.
        endpoint: Of the owner.
        pages: KV caches of this machine's workers.
        first_position: Workers of the receiving engine on machines before this one.

    Raises:
        KvLayoutError, KvPagesError: The layouts or blocks do not fit.
    """
    places = endpoint.places
    layouts = [endpoint.machines[machine].layouts[place] for machine, place in places]
    by_machine: dict[int, list[TargetPart]] = {}
    for position, own in enumerate(pages, start=first_position):
        offset = command.first_token % own.layout.block_size
        slots = own.find_slots(command.block_ids, offset, command.num_tokens)
        for move in find_moves(own.layout, layouts, position):
            machine, place = places[move.peer]
            part = TargetPart(_read_part(place, move), own, slots)
            by_machine.setdefault(machine, []).append(part)
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
    """Fetch the parts that one machine has.

    Args:
        fetch: The whole fetch.
        connection: To the machine.
        backend: Moves the bytes.
        names: Of the backend and of the encoding.
        parts: To be filled.

    Raises:
        OSError, KvFrameError: The connection ends.
        KvTransferError: The machine refuses, the fetch has to end, or the blocks were not kept
            until the last byte.
    """
    command, num_fetched = fetch.command, 0
    while num_fetched < command.num_tokens:
        request = ReadRequest(
            command.ticket,
            fetch.reader,
            command.first_token + num_fetched,
            command.num_tokens - num_fetched,
            *names,
            [part.part for part in parts],
            command.is_per_layer,
        )
        left = [part._replace(slots=part.slots[num_fetched:]) for part in parts]
        num_fetched += _read(fetch, connection, backend, FetchTarget(request, left, fetch.on_bytes))


def _read(
    fetch: RunningFetch, connection: KvConnection, backend: KvBackend, target: FetchTarget
) -> int:
    """Send one READ and receive the answer; return the number of tokens that have arrived.

    Raises as `fetch_from_machine` does.
    """
    connection.send_struct(KvFrameKind.READ, target.request)
    if target.request.is_per_layer:
        num_tokens, parts = target.request.num_tokens, target.parts
        # Announcements keep the fetch alive as bytes do.
        gate = ReceiverGate(connection, num_tokens, len(parts), lambda: fetch.on_bytes(0))
        num_tokens = gate.wait_for_tokens()
        target = FetchTarget(
            msgspec.structs.replace(target.request, num_tokens=num_tokens),
            [part._replace(slots=part.slots[:num_tokens]) for part in parts],
            fetch.on_bytes,
            gate.wait_for_part,
        )
    backend.fetch(connection, target)
    connection.send(KvFrameKind.CONFIRM)
    if not connection.receive_struct(KvFrameKind.CONFIRMED, ReadConfirmed).is_held:
        raise KvTransferError("the other engine did not keep the blocks until the end")
    return target.request.num_tokens


def _read_part(place: int, move: KvMove) -> ReadPart:
    return ReadPart(place, move.layer, move.heads.start, len(move.heads))
