"""Owner's side of transfers: answers READs as long as their tickets are held."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from gllm.kv_transfer.backends.base import KvBackend, ServedRead
from gllm.kv_transfer.frames import (
    KvConnection,
    KvFrameError,
    KvFrameKind,
    KvTransferError,
    ReadConfirmed,
    ReadRequest,
)
from gllm.kv_transfer.pages import KvPages, KvPagesError
from gllm.kv_transfer.tickets import HeldBlocks, TicketBook, TicketError

MAX_CONNECTIONS = 256
_CLOSE_SECONDS = 5.0
"""Limit for the end of a connection's thread."""


@dataclass
class ServedCaches:
    """KV caches of one generation, by place."""

    generation: int
    pages: Sequence[KvPages] = ()
    descriptors: Sequence[int] = ()
    """Read-only, for other processes."""


@dataclass
class KvSourceState:
    """Caches and tickets that the threads of the owner's mover share."""

    lock: threading.Lock = field(default_factory=threading.Lock)
    book: TicketBook = field(default_factory=TicketBook)
    caches: ServedCaches = field(default_factory=lambda: ServedCaches(0))
    num_malformed: int = 0
    """Connections that have sent invalid frames."""
    on_used: Callable[[int], None] = lambda ticket: None
    """Called on any thread with a ticket that its reader needs no longer."""


class KvSourceServer:
    """Answers the READs of other movers, each connection on a thread."""

    def __init__(
        self,
        state: KvSourceState,
        make_backend: Callable[[str], KvBackend],
        yield_to_activations: Callable[[], None],
    ) -> None:
        """Create a source.

        Args:
            state: Tickets and caches.
            make_backend: Returns the backend with a name. Raises ValueError, ImportError.
            yield_to_activations: See ServedRead.
        """
        self._state, self._make_backend = state, make_backend
        self._yield = yield_to_activations
        self._connections: dict[KvConnection, threading.Thread] = {}
        """Open connections and their threads."""

    def adopt(self, connection: KvConnection) -> None:
        """Serve a connection on a thread; one too many is closed."""
        with self._state.lock:
            is_full = len(self._connections) >= MAX_CONNECTIONS
            if not is_full:
                thread = threading.Thread(
                    target=self._run, args=(connection,), name="kv-source", daemon=True
                )
                self._connections[connection] = thread
                thread.start()
        if is_full:
            connection.close()

    def close(self) -> None:
        """End all connections."""
        with self._state.lock:
            connections = dict(self._connections)
        for connection in connections:
            connection.shut_down()
        for thread in connections.values():
            thread.join(_CLOSE_SECONDS)

    def _run(self, connection: KvConnection) -> None:
        confirmed: set[int] = set()
        try:
            while True:
                request = connection.receive_struct(KvFrameKind.READ, ReadRequest)
                try:
                    self._answer(connection, request)
                    confirmed.add(request.ticket)
                except (KvTransferError, TicketError, KvPagesError, ValueError) as error:
                    connection.refuse(str(error))
                except ImportError as error:
                    connection.refuse(f"on the owner's machine: {error}")
        except KvFrameError as error:
            self._state.num_malformed += 1
            with suppress(OSError):
                connection.refuse(str(error))
        except OSError:
            # The receiver has gone; it asks again if it needs the rest.
            pass
        finally:
            connection.close()
            with self._state.lock:
                self._connections.pop(connection, None)
            # A ticket has one reader, and a reader has one connection.
            for ticket in sorted(confirmed):
                self._state.on_used(ticket)

    def _answer(self, connection: KvConnection, request: ReadRequest) -> None:
        """Answer one READ. Raises OSError, and all reasons to refuse it."""
        backend = self._make_backend(request.backend)
        state = self._state
        with state.lock:
            held = state.book.use(
                request.ticket, request.reader, request.first_token, request.num_tokens
            )
            caches = state.caches
        for part in request.parts:
            if part.place >= len(caches.pages):
                raise KvTransferError(f"worker {part.place} of {len(caches.pages)}")
            caches.pages[part.place].bytes_per_token(part.layer, part.heads)

        def is_held() -> bool:
            return self._is_held(request.ticket, held)

        read = ServedRead(
            request, caches.pages, caches.descriptors, held.block_ids, is_held, self._yield
        )
        backend.serve(connection, read)
        connection.receive(KvFrameKind.CONFIRM)
        connection.send_struct(KvFrameKind.CONFIRMED, ReadConfirmed(is_held()))

    def _is_held(self, ticket: int, held: HeldBlocks) -> bool:
        with self._state.lock:
            return self._state.book.is_held(ticket, held)
