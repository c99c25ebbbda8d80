"""KV transfers of an engine in its head process: between the driver and a `gllm-link` process.

The caches of a generation are opened once all of its workers are ready. If the process dies, its
fetches have failed and its tickets are served no longer; the next process opens the same caches,
under another endpoint. Nothing of an earlier generation reaches a later driver.
"""

import logging
import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from gllm.config.link_encodings import PLAIN
from gllm.messages.base import WireMessage
from gllm.messages.kv_layout import KvLayout, count_token_bytes
from gllm.messages.kv_transfer import (
    FetchKv,
    KvCommand,
    KvFetched,
    KvFetchStarted,
    KvReport,
    KvRevoked,
    RevokeKv,
    ServeKv,
)
from gllm.runtime.head.link_child import LinkChild, LinkOwner
from gllm.runtime.messaging.certificates import NodeCertificate, create_certificate
from gllm.transport.kv.endpoint import KvEndpoint, KvMachine, encode_endpoint
from gllm.transport.kv.totals import KvTransferTotals
from gllm.transport.link.commands import (
    CloseKvCaches,
    KvCachesOpened,
    KvMoved,
    LinkIdentity,
    LinkMessage,
    MoveKv,
    OpenKvCaches,
)

log = logging.getLogger(__name__)

_MAX_ENDED = 4096
"""Tickets whose end is remembered."""
_GONE = "the KV mover has ended"
CreateChild = Callable[[LinkIdentity, NodeCertificate | None, LinkOwner], LinkChild]


@dataclass
class _OpenCaches:
    """KV caches of the present generation."""

    generation: int
    layouts: list[KvLayout] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    """Own descriptors of the memory of each worker, in the order of the layouts."""
    served: set[int] = field(default_factory=set)
    """Tickets that the driver has not seen revoked."""
    ended: deque[int] = field(default_factory=lambda: deque(maxlen=_MAX_ENDED))
    """Tickets that are served no longer, and never again."""
    fetches: set[int] = field(default_factory=set)
    """Fetches that run."""
    is_refused: bool = False
    """True if they cannot be opened."""


class EngineKvMover:
    """Owner of the KV mover of an engine on one machine; called on the event loop."""

    def __init__(
        self,
        send: Callable[[WireMessage], None],
        backend: str | None,
        encoding: str = PLAIN,
        address: str = "",
        create_child: CreateChild = LinkChild,
    ) -> None:
        """Create a mover without caches; the process starts with the first ones.

        Args:
            send: sends to the driver of the present generation.
            backend: `EngineConfig.kv_transfer`; None for an engine without transfers.
            encoding: of fetches over TCP, a name of LINK_ENCODINGS.
            address: HOST:PORT at which engines of other machines fetch; empty if they cannot.
            create_child: creates the owner of the process.
        """
        self.endpoint = b""
        """Address and layouts of the caches for other engines; empty while they are not served."""
        self.bytes_per_token = 0
        """Bytes of one token's keys and values over all layers and heads; 0 before the start."""
        self.digest = ""
        """Digest of all that decides the numbers in the caches; empty before the start."""
        self.totals = KvTransferTotals()
        self.on_change: Callable[[], None] = lambda: None
        """Called when the endpoint has changed."""
        self.on_push: Callable[[int], None] = lambda ticket: None
        """Called with the ticket of a prompt that can be fetched while it is computed."""
        self.on_first_chunk: Callable[[int], None] = lambda ticket: None
        """Called with the ticket of a prompt whose first chunk is computed, if others follow and
        its router has to know."""
        self._send = send
        self._backend, self._encoding = backend, encoding
        self._address = address
        self._certificate = create_certificate() if address else None
        identity = LinkIdentity(0, "kv", address, bool(address), accepts_engines=bool(address))
        self._child = create_child(identity, self._certificate, self)
        self._layouts: dict[int, KvLayout] = {}
        """Layouts of the present generation's workers, by sender."""
        self._caches: _OpenCaches | None = None

    @property
    def is_enabled(self) -> bool:
        """True if the engine is to give KV blocks to other engines and to fetch them."""
        return self._backend is not None

    @property
    def num_holds(self) -> int:
        """Tickets that are served."""
        return 0 if self._caches is None else len(self._caches.served)

    @property
    def num_restarts(self) -> int:
        """Starts of the process after the first one."""
        return self._child.num_restarts

    @property
    def process_id(self) -> int | None:
        """Process id of gllm-link; None if it does not run."""
        return None if self._child.process is None else self._child.process.pid

    def add_layout(self, sender: int, layout: KvLayout | None) -> None:
        """Note the layout of a worker that is ready; None if it has no cache for transfers."""
        if layout is not None:
            self._layouts[sender] = layout

    def open(self, generation: int, senders: Iterable[int], memory: Mapping[int, int]) -> None:
        """Serve the caches of a generation, whose workers are all ready.

        Args:
            generation: its number.
            senders: its workers.
            memory: descriptor of the memory of each worker's cache, which stays the caller's.
        """
        if self._backend is None:
            return
        self._caches = caches = _OpenCaches(generation)
        try:
            for sender in senders:
                caches.layouts.append(self._layouts[sender])
                caches.descriptors.append(os.dup(memory[sender]))
            self._child.ensure_started()
        except (OSError, KeyError) as error:
            cause = f"worker {error} has no cache for it" if isinstance(error, KeyError) else error
            log.warning("no KV blocks are transferred: %s", cause)
            caches.is_refused = True
            return
        self.bytes_per_token = count_token_bytes(caches.layouts)
        self.digest = caches.layouts[0].model
        if self._child.is_running:
            self._open_caches(caches)

    def end_generation(self) -> None:
        """Forget the caches, because their driver has ended; it gets no answers any more."""
        self._layouts.clear()
        if self._caches is None:
            return
        for descriptor in self._caches.descriptors:
            os.close(descriptor)
        self._caches = None
        if self._child.is_running:
            self._child.send(CloseKvCaches())
        self._set_endpoint(b"")

    def handle(self, command: KvCommand) -> None:
        """Execute a command of the present generation's driver."""
        caches = self._caches
        if caches is None:
            return
        is_new_push = False
        match command:
            case ServeKv(ticket) if ticket in caches.ended:
                # Its reader has had all of it, or the process that served it has ended.
                self._send(KvRevoked(ticket))
                return
            case ServeKv(ticket) if ticket not in caches.served:
                caches.served.add(ticket)
                self.totals.num_served += 1
                is_new_push = command.step > 0
                self.totals.num_pushed += is_new_push
            case FetchKv(number):
                caches.fetches.add(number)
        if self._child.is_running and not caches.is_refused:
            self._child.send(MoveKv(caches.generation, command))
            if isinstance(command, ServeKv) and is_new_push:
                self.on_push(command.ticket)
            return
        self._end_transfers(caches, _GONE)
        if isinstance(command, RevokeKv):
            self._send(KvRevoked(command.ticket))

    def close(self) -> None:
        """End the process, at once."""
        self.on_change = lambda: None
        self.end_generation()
        self._child.close()
        if self._certificate is not None:
            self._certificate.close()
            self._certificate = None

    def on_started(self) -> None:
        """See LinkOwner."""
        if self._caches is not None:
            self._open_caches(self._caches)

    def on_message(self, message: LinkMessage) -> None:
        """See LinkOwner."""
        caches = self._caches
        match message:
            case KvCachesOpened(generation) if caches and generation == caches.generation:
                self._on_opened(caches, message)
            case KvMoved(generation, report) if caches and generation == caches.generation:
                self._on_moved(caches, report)

    def on_exited(self) -> None:
        """See LinkOwner."""
        # The process has been reaped, so nothing is read or written any more.
        if self._caches is not None:
            self._end_transfers(self._caches, _GONE)
        self._set_endpoint(b"")

    def _open_caches(self, caches: _OpenCaches) -> None:
        assert self._backend is not None
        if caches.is_refused:
            return
        command = OpenKvCaches(caches.generation, caches.layouts, self._backend, self._encoding)
        self._child.send(command, caches.descriptors)

    def _on_opened(self, caches: _OpenCaches, message: KvCachesOpened) -> None:
        if message.cause:
            log.warning("no KV blocks are transferred: %s", message.cause)
            caches.is_refused = True
            self._end_transfers(caches, message.cause)
            return
        machine = msgspec.msgpack.decode(message.machine, type=KvMachine)
        if self._certificate is not None:
            certificate = self._certificate.certificate
            machine = msgspec.structs.replace(
                machine, address=self._address, certificate=certificate
            )
        self._set_endpoint(encode_endpoint(KvEndpoint([machine])))

    def _on_moved(self, caches: _OpenCaches, report: KvReport) -> None:
        """Pass an answer on to the driver."""
        match report:
            case KvRevoked(ticket):
                caches.served.discard(ticket)
                caches.ended.append(ticket)
            case KvFetched(number) if number in caches.fetches:
                caches.fetches.remove(number)
                self._count(report)
            case KvFetchStarted(number) if number in caches.fetches:
                pass
            case _:
                return
        self._send(report)

    def _count(self, report: KvFetched) -> None:
        totals = self.totals
        totals.num_bytes += report.num_bytes
        if report.is_ok:
            totals.num_fetched += 1
            totals.seconds += report.seconds
        else:
            totals.num_failed += 1
            log.info("KV of another engine was not fetched: %s", report.cause)

    def _end_transfers(self, caches: _OpenCaches, cause: str) -> None:
        """Answer all fetches and tickets, which no process has."""
        fetches, caches.fetches = sorted(caches.fetches), set()
        served, caches.served = sorted(caches.served), set()
        caches.ended.extend(served)
        for number in fetches:
            report = KvFetched(number, False, cause=cause)
            self._count(report)
            self._send(report)
        for ticket in served:
            self._send(KvRevoked(ticket))

    def _set_endpoint(self, endpoint: bytes) -> None:
        if endpoint != self.endpoint:
            self.endpoint = endpoint
            self.on_change()
