"""Owner's side of transfers: answers READs as long as their tickets are held."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from gllm.config.kv_backends import served_backend
from gllm.messages.kv_layout import KvLayout
from gllm.transport.kv.backends.base import KvBackend, ServedRead
from gllm.transport.kv.frames import (
    KvConnection,
    KvFrameError,
    KvFrameKind,
    KvTransferError,
    ReadConfirmed,
    ReadPart,
    ReadRequest,
    ReadTicket,
)
from gllm.transport.kv.pages import KvPages, KvPagesError
from gllm.transport.kv.part_gate import OwnerGate
from gllm.transport.kv.progress import LayerProgress
from gllm.transport.kv.tickets import HeldBlocks, ServedChunk, TicketBook, TicketError

MAX_CONNECTIONS = 256
"""Beyond, the oldest connection without an answered READ of the address with most is closed."""
_TICKET_SECONDS = 1.0
"""Time in which a ticket may arrive after its first READ, or be free after the death of its reader:
the driver's message, the end of a connection and the reader's way over the router are not
ordered."""
_TICKET_TICK_SECONDS = 0.01
_CLOSE_SECONDS = 5.0
"""Limit for the end of a connection's thread."""


@dataclass
class ServedCaches:
    """KV caches of this machine's workers that other engines may read.

    They belong to one epoch: the time between two restarts of the engine. Lists are indexed by
    worker.
    """

    epoch: int
    pages: Sequence[KvPages] = ()
    descriptors: Sequence[int] = ()
    """Read-only, for other processes."""
    progress: Sequence[LayerProgress | None] = ()
    """Counters of computed layers; None for workers that do not count them."""
    engine: Sequence[Sequence[KvLayout]] = ()
    """Layouts of the workers of all machines of the engine, by machine."""
    machine: int = 0
    """Index of this machine in the engine."""

    def find_awaited(self, chunk: ServedChunk, part: ReadPart) -> tuple[LayerProgress, int] | None:
        """Return the counters and the number of layers to wait for before a head range is read.

        Args:
            chunk: tokens to read last.
            part: head range of a layer to read.

        Returns:
            None if the range is already computed.

        Raises:
            KvTransferError: The worker does not count its layers.
        """
        if not chunk.step:
            return None
        counter = self.progress[part.place]
        if counter is None:
            raise KvTransferError("the other engine cannot be read before a prefill has ended")
        layers = [layer.layer for layer in self.pages[part.place].layout.layers]
        return counter, layers.index(part.layer) + 1


@dataclass
class KvSourceState:
    """KV caches that other engines may read, and tickets: random numbers that permit one read each.

    Shared by the threads that serve other engines.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    book: TicketBook = field(default_factory=TicketBook)
    caches: ServedCaches = field(default_factory=lambda: ServedCaches(0))
    num_malformed: int = 0
    """Connections that have sent invalid frames."""
    on_used: Callable[[int], None] = lambda ticket: None
    """Called on any thread with a ticket whose blocks have been read completely."""
    on_refused: Callable[[str, str, bool], None] = lambda address, cause, is_malformed: None
    """Called on any thread with the IP address of a peer without a valid ticket, the cause, and
    True if its bytes were no frames."""


@dataclass(eq=False)
class _Reader:
    """A connection that is served."""

    connection: KvConnection
    address: str
    has_read: bool = False
    """True once it has shown a ticket that is held."""


@dataclass
class _Use:
    """Use of a ticket by a connection."""

    ticket: ReadTicket
    is_complete: bool = False
    """True once the reader has confirmed the last token."""


class KvSourceServer:
    """Server that sends KV blocks to other engines on request (READ), one thread per connection."""

    def __init__(
        self,
        state: KvSourceState,
        make_backend: Callable[[str], KvBackend],
        yield_to_activations: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        max_connections: int = MAX_CONNECTIONS,
    ) -> None:
        """Create a source.

        Args:
            state: Tickets and caches.
            make_backend: Returns the backend with a name. Raises ValueError, ImportError.
            yield_to_activations: See ServedRead.
            clock: Time in seconds.
            sleep: Waits for a number of seconds.
            max_connections: Largest number of connections that are served at the same time.
        """
        self._max_connections = max_connections
        self._state, self._make_backend = state, make_backend
        self._clock, self._sleep = clock, sleep
        self._yield = yield_to_activations
        self._readers: dict[_Reader, threading.Thread] = {}
        """Open connections and their threads, the oldest first."""

    @property
    def num_readers(self) -> int:
        """Number of open connections."""
        return len(self._readers)

    def adopt(self, connection: KvConnection, address: str = "") -> None:
        """Serve a connection on a new thread.

        At the limit of connections, one that has not used a valid ticket is closed in its favour;
        if there is none, the new connection is closed.

        Args:
            connection: The connection; the server closes it.
            address: IP address of the other end; empty on this machine.
        """
        reader = _Reader(connection, address)
        thread = threading.Thread(target=self._run, args=(reader,), name="kv-source", daemon=True)
        refused = None
        with self._state.lock:
            self._readers[reader] = thread
            if len(self._readers) > self._max_connections:
                refused = self._find_stranger()
                del self._readers[refused]
            if refused is not reader:
                thread.start()
        if refused is reader:
            connection.close()
        elif refused is not None:
            refused.connection.shut_down()

    def _find_stranger(self) -> _Reader:
        """Return the oldest stranger of the address that has most; the newest is one always."""
        strangers = [reader for reader in self._readers if not reader.has_read]
        counts = Counter(reader.address for reader in strangers)
        address, _ = counts.most_common(1)[0]
        return next(reader for reader in strangers if reader.address == address)

    def close(self) -> None:
        """End all connections."""
        with self._state.lock:
            readers = dict(self._readers)
        for reader in readers:
            reader.connection.shut_down()
        for thread in readers.values():
            thread.join(_CLOSE_SECONDS)

    def _run(self, reader: _Reader) -> None:
        connection = reader.connection
        uses: dict[int, _Use] = {}
        try:
            while True:
                ticket = connection.receive_struct(KvFrameKind.TICKET, ReadTicket)
                try:
                    self._await_ticket(ticket)
                except TicketError as error:
                    self._on_refused_ticket(reader, ticket.ticket, str(error))
                    # What was not read would reset the connection before the cause arrives.
                    connection.discard(KvFrameKind.READ)
                    connection.refuse(str(error))
                    return
                request = connection.receive_struct(KvFrameKind.READ, ReadRequest)
                try:
                    self._answer(reader, ticket, request, uses)
                except (KvTransferError, TicketError, KvPagesError, ValueError) as error:
                    connection.refuse(str(error))
                except ImportError as error:
                    connection.refuse(f"on the owner's machine: {error}")
        except KvFrameError as error:
            self._state.num_malformed += 1
            if not reader.has_read:
                self._state.on_refused(reader.address, str(error), True)
            with suppress(OSError):
                connection.refuse(str(error))
        except OSError:
            # The receiver has gone; it asks again if it needs the rest.
            pass
        finally:
            connection.close()
            with self._state.lock:
                self._readers.pop(reader, None)
            # A ticket has one reader, which has one connection per machine of its engine.
            for number, use in sorted(uses.items()):
                with self._state.lock:
                    book, ticket = self._state.book, use.ticket
                    if not use.is_complete:
                        book.leave(number, ticket.reader)
                        continue
                    is_used = book.count_complete(number, ticket.reader) >= ticket.num_readers
                if is_used:
                    self._state.on_used(number)

    def _on_refused_ticket(self, reader: _Reader, ticket: int, cause: str) -> None:
        """Report a peer that has shown a ticket that never was one."""
        with self._state.lock:
            # A fetch may be later than the end of its ticket.
            is_late = self._state.book.has_ended(ticket) or ticket in self._state.book
        if not (is_late or reader.has_read):
            self._state.on_refused(reader.address, cause, False)

    def _answer(
        self, reader: _Reader, ticket: ReadTicket, request: ReadRequest, uses: dict[int, _Use]
    ) -> None:
        """Answer one READ, and note the use of its ticket.

        Raises OSError, and all reasons to refuse it.
        """
        connection = reader.connection
        held, caches = self._use_ticket(ticket, request)
        use = uses[ticket.ticket] = _Use(ticket)
        backend = self._make_backend(served_backend(request.backend))
        last = request.first_token + request.num_tokens
        reader.has_read = True
        for part in request.parts:
            if part.place >= len(caches.pages):
                raise KvTransferError(f"worker {part.place} of {len(caches.pages)}")
            caches.pages[part.place].bytes_per_token(part.layer, part.heads)

        def is_held() -> bool:
            with self._state.lock:
                return self._state.book.is_held(ticket.ticket, held)

        read = ServedRead(
            request, caches.pages, caches.descriptors, held.block_ids, is_held, self._yield
        )
        if request.is_per_layer or held.step:
            read = self._await_layers(read, connection, held, caches)
            request = read.request
        backend.serve(connection, read)
        connection.receive(KvFrameKind.CONFIRM)
        connection.send_struct(KvFrameKind.CONFIRMED, ReadConfirmed(is_held()))
        use.is_complete = request.first_token + request.num_tokens == last

    def _await_layers(
        self, read: ServedRead, connection: KvConnection, held: HeldBlocks, caches: ServedCaches
    ) -> ServedRead:
        """Return a READ of blocks that are computed meanwhile, for the tokens of one chunk.

        A receiver that does not expect layers one by one gets them once all are computed.
        """
        request, first = read.request, read.request.first_token
        receiver = connection if request.is_per_layer else None
        gate = OwnerGate(read.is_held, receiver, self._clock, self._sleep)
        if receiver is not None:
            gate.wait(lambda: held.num_tokens > first)
        with self._state.lock:
            # More tokens may follow meanwhile, by later steps.
            chunk = held.find_chunk(held.num_tokens if receiver is None else first)
            block_ids = held.block_ids
        if receiver is not None:
            num_tokens = min(first + request.num_tokens, chunk.end) - first
            gate.announce(num_tokens)
            request = msgspec.structs.replace(request, num_tokens=num_tokens)
        awaited = [caches.find_awaited(chunk, part) for part in request.parts]
        gate.watch(len(awaited), lambda index: _is_computed(chunk, awaited[index]))
        if receiver is None:
            gate.wait_for_part(len(awaited) - 1)
        return read._replace(request=request, block_ids=block_ids, wait_for_part=gate.wait_for_part)

    def _await_ticket(self, ticket: ReadTicket) -> None:
        """Wait until a fetch may use its ticket. Raises TicketError if it may not in time."""
        state, end = self._state, self._clock() + _TICKET_SECONDS
        while True:
            with state.lock:
                is_expected = state.book.may_be_used_later(ticket.ticket, ticket.reader)
                if not is_expected or self._clock() >= end:
                    state.book.find(ticket.ticket, ticket.reader)
                    return
            self._sleep(_TICKET_TICK_SECONDS)

    def _use_ticket(
        self, ticket: ReadTicket, request: ReadRequest
    ) -> tuple[HeldBlocks, ServedCaches]:
        """Return the blocks of a ticket and their caches. Raises TicketError."""
        state = self._state
        with state.lock:
            held = state.book.use(
                ticket.ticket,
                ticket.reader,
                request.first_token,
                request.num_tokens,
                request.is_per_layer,
            )
            return held, state.caches


def _is_computed(chunk: ServedChunk, awaited: tuple[LayerProgress, int] | None) -> bool:
    """Return True if a part is in the KV cache; `awaited` is from `ServedCaches.find_awaited`."""
    return awaited is None or awaited[0].has_computed(chunk.lane, chunk.step, awaited[1])
