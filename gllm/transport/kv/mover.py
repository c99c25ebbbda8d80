"""KV mover of a machine: serves the blocks of its workers and fetches blocks from other engines.

It has threads of its own and works in any process. Workers do nothing during a transfer.
"""

import importlib
import logging
import os
import secrets
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from pathlib import Path

from gllm.config.kv_backends import AUTO, BACKENDS, MOCK, check_backend_name, parse_mock_rate
from gllm.config.link_encodings import PLAIN
from gllm.config.sized_folder import SizedFolder
from gllm.messages.kv_disk import LoadKvFromDisk
from gllm.messages.kv_layout import KvLayout
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
from gllm.transport.kv.backends.base import KvBackend, TargetPart
from gllm.transport.kv.backends.bounded import BoundedBackend, FetchSupervisor
from gllm.transport.kv.break_even import FetchDeadline
from gllm.transport.kv.disk_tier import KvDiskTier
from gllm.transport.kv.endpoint import KvEndpoint, KvMachine, decode_endpoint
from gllm.transport.kv.fetch import (
    KvFetchLateError,
    MachineTargets,
    RunningFetch,
    fetch_from_machine,
    find_targets,
)
from gllm.transport.kv.fetch_queue import FetchQueue, PeerCircuits
from gllm.transport.kv.frames import KvConnection, KvFrameError, KvTransferError
from gllm.transport.kv.pages import KvPages
from gllm.transport.kv.progress import open_progress
from gllm.transport.kv.source import MAX_CONNECTIONS, KvSourceServer, KvSourceState, ServedCaches
from gllm.transport.kv.tickets import HeldBlocks, TicketError
from gllm.transport.kv.transfer_estimate import TransferEstimate

log = logging.getLogger(__name__)

NUM_FETCH_THREADS = 4
"""Fetches from one engine that run at the same time; further ones wait."""
NUM_WAITING_THREADS = 32
"""Fetches per layer from one engine that run at the same time: they wait for its prefill most of
it."""
NUM_PARALLEL_PEERS = 4
"""Engines from which so many fetches run at the same time, so that no thread is left for others."""
MAX_WAITING_FETCHES = 64
"""Fetches from one engine that wait for a thread; the prompts of further ones are computed."""
FIRST_GUESS_BYTES_PER_SECOND = 1e7
"""Rate that a deadline assumes before any transfer was measured."""
_BACKLOG = 64
IDLE_SECONDS = 10.0
"""Time after which a connection of another machine that requests nothing is closed."""
_CREDENTIALS = struct.Struct("3i")
_SILENT = "the other engine has not answered the last fetch"

Dial = Callable[[KvMachine], socket.socket]
"""Connects to the data port of another machine. Raises OSError, ValueError."""


def make_backend(name: str) -> KvBackend:
    """Create the KV transfer backend with the given name.

    Args:
        name: a name of BACKENDS, or mock:GIGABYTES_PER_SECOND.

    Raises:
        ValueError: There is no such backend.
        ImportError: The backend's library is not installed.
    """
    check_backend_name(name)
    if name.startswith(MOCK):
        from gllm.transport.kv.backends.mock import MockBackend

        return MockBackend(make_backend("shm"), parse_mock_rate(name))
    module, class_name = BACKENDS[name]
    backend: KvBackend = getattr(importlib.import_module(module), class_name)()
    return backend


def _end_process(cause: str) -> None:
    """End this process at once, because a fetch goes on although it had to end."""
    log.error("gllm-link ends, because a KV transfer does not end: %s", cause)
    os._exit(1)


class KvMover:
    """Transfers KV blocks for one machine's workers: serves other engines and fetches from them."""

    def __init__(
        self,
        on_report: Callable[[int, KvReport], None],
        backend: str = AUTO,
        encoding: str = PLAIN,
        dial: Dial | None = None,
        yield_to_activations: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
        create_backend: Callable[[str], KvBackend] = make_backend,
        max_connections: int = MAX_CONNECTIONS,
        on_refused: Callable[[str, str, bool], None] = lambda address, cause, is_malformed: None,
        supervisor: FetchSupervisor | None = None,
    ) -> None:
        """Start to accept connections of KV movers on this machine.

        Args:
            on_report: Called with the epoch and each report, on any thread.
            backend: Backend of fetches: a name of BACKENDS, AUTO or mock:GIGABYTES_PER_SECOND.
            encoding: Encoding of fetches over TCP: a name of LINK_ENCODINGS.
            dial: Connects to other machines; None to reach only this machine.
            yield_to_activations: Waits while activations are queued for sending from this machine.
            clock: Returns the time in seconds.
            sleep: Waits for a number of seconds, between two checks of the computed layers.
            create_backend: Creates a backend by its name, once per name.
            max_connections: Largest number of connections that are served at the same time.
            on_refused: See KvSourceState.
            supervisor: Watches the fetches; None for one that ends this process.

        Raises:
            ValueError: There is no such backend.
            ImportError: The library of the backend is not installed.
            OSError: No socket can be bound.
        """
        check_backend_name(backend)
        self._on_report, self._backend, self._encoding = on_report, backend, encoding
        self._dial, self._clock = dial, clock
        self._state = KvSourceState(on_used=self._end_ticket, on_refused=on_refused)
        self._supervisor = supervisor or FetchSupervisor(_end_process)
        self._find_backend = cache(
            lambda name: BoundedBackend(create_backend(name), self._supervisor)
        )
        """Returns the backend of a name. Raises ValueError, ImportError."""
        self._source = KvSourceServer(
            self._state, self._find_backend, yield_to_activations, clock, sleep, max_connections
        )
        if backend != AUTO:
            # An engine that cannot fetch must not announce that it can.
            self._find_backend(backend)
        self._fetches: dict[tuple[int, int], RunningFetch] = {}
        """Fetches that have not ended, by epoch and number."""
        self._estimates: dict[str, TransferEstimate] = {}
        """By the socket name of the other machine's mover."""
        self._circuits = PeerCircuits()
        self._disk: KvDiskTier | None = None
        """Disk tier of the prefix cache; None without one."""
        self._fetch_pools = [
            _FetchPool(NUM_FETCH_THREADS, "kv-fetch"),
            _FetchPool(NUM_WAITING_THREADS, "kv-fetch-per-layer"),
        ]
        self.socket_name = f"gllm-kv-{secrets.token_hex(16)}"
        self._listening = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listening.bind(f"\0{self.socket_name}")
        self._listening.listen(_BACKLOG)
        threading.Thread(target=self._accept, name="kv-listener", daemon=True).start()

    @property
    def num_malformed(self) -> int:
        """Number of connections that sent invalid frames."""
        return self._state.num_malformed

    @property
    def num_fetches(self) -> int:
        """Number of running fetches."""
        return len(self._fetches)

    @property
    def num_fetched_bytes(self) -> int:
        """Number of bytes that the running fetches have received."""
        return sum(fetch.num_bytes for fetch in list(self._fetches.values()))

    @property
    def num_readers(self) -> int:
        """Number of connections over which other engines read KV blocks."""
        return self._source.num_readers

    def machine(self, address: str = "", certificate: bytes = b"") -> KvMachine:
        """Return the addresses and KV layouts of this machine, for other engines.

        Args:
            address: HOST:PORT of the data port whose connections are passed to `adopt`.
            certificate: TLS certificate of the data port in DER.
        """
        layouts = [pages.layout for pages in self._state.caches.pages]
        return KvMachine(read_host_id(), self.socket_name, address, certificate, layouts)

    def open_caches(
        self,
        epoch: int,
        caches: list[tuple[KvLayout, int]],
        engine: Sequence[Sequence[KvLayout]] = (),
        machine: int = 0,
        disk: SizedFolder | None = None,
    ) -> None:
        """Start to serve the KV caches of an epoch; those of the previous epoch are closed.

        Args:
            epoch: Number of the engine restart.
            caches: Layout and memory descriptor of each worker. The mover closes the descriptors.
            engine: Layouts of the workers of all machines of the engine, by machine; empty if there
                is only this one.
            machine: Index of this machine.
            disk: Folder and size of the disk tier of the prefix cache; None for none. The same in
                all epochs.

        Raises:
            KvPagesError, OSError: A cache cannot be mapped.
        """
        pages, read_only, progress = [], [], []
        try:
            for layout, descriptor in caches:
                pages.append(KvPages(layout, descriptor))
                progress.append(open_progress(descriptor, layout))
                path = f"/proc/self/fd/{descriptor}"
                read_only.append(os.open(path, os.O_RDONLY | os.O_CLOEXEC))
        except BaseException:
            for file in read_only:
                os.close(file)
            raise
        finally:
            for _, descriptor in caches:
                os.close(descriptor)
        engine = engine or [[layout for layout, _ in caches]]
        self._replace_caches(ServedCaches(epoch, pages, read_only, progress, engine, machine))
        if disk is not None:
            if self._disk is None:
                self._disk = KvDiskTier(disk, self._on_report, self._clock)
            self._disk.open(epoch, pages)

    def close_caches(self) -> None:
        """Stop serving the KV caches and end all fetches, without reporting them."""
        if self._disk is not None:
            self._disk.close()
        self._replace_caches(ServedCaches(self._state.caches.epoch))

    def handle(self, command: KvCommand) -> None:
        """Execute a command of the driver."""
        match command:
            case ServeKv():
                self._serve(command)
            case RevokeKv(ticket):
                with self._state.lock:
                    self._state.book.revoke(ticket)
                # Readers are not waited for: they discard what they have read since.
                self._on_report(self._state.caches.epoch, KvRevoked(ticket))
            case FetchKv():
                fetch = RunningFetch(
                    command,
                    self._state.caches.epoch,
                    FetchDeadline(self._clock(), predicted_seconds=0.0),
                    self._report_start,
                    self._clock,
                )
                self._fetches[fetch.epoch, command.fetch] = fetch
                self._enqueue(fetch)
            case CancelKvFetch(number):
                if running := self._fetches.get((self._state.caches.epoch, number)):
                    running.cancel()
                elif self._disk is not None:
                    self._disk.cancel(number)
            case LoadKvFromDisk(number) if self._disk is None:
                report = KvFetched(number, is_ok=False, cause="there is no disk tier")
                self._on_report(self._state.caches.epoch, report)
            case _ if self._disk is not None:
                self._disk.handle(command)

    def adopt(self, connection: socket.socket, address: str) -> None:
        """Serve a connection that the data port has accepted."""
        self._source.adopt(KvConnection(connection, idle_seconds=IDLE_SECONDS), address)

    def close(self) -> None:
        """End all fetches and connections."""
        self.close_caches()
        # Wakes the thread that accepts.
        self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        self._source.close()
        if self._disk is not None:
            self._disk.shut_down()
        for pool in self._fetch_pools:
            pool.threads.shutdown(wait=True, cancel_futures=True)
        self._supervisor.close()

    def _replace_caches(self, caches: ServedCaches) -> None:
        with self._state.lock:
            previous, self._state.caches = self._state.caches, caches
            self._state.book.clear()
            for fetch in list(self._fetches.values()):
                fetch.cancel()
            self._fetches.clear()
        for descriptor in previous.descriptors:
            os.close(descriptor)

    def _serve(self, command: ServeKv) -> None:
        """Serve blocks, or report that their ticket has ended."""
        held = HeldBlocks(
            command.num_tokens,
            list(command.block_ids),
            step=command.step,
            is_partial=command.is_partial,
            lane=command.lane,
        )
        with self._state.lock:
            try:
                self._state.book.hold(command.ticket, held)
                return
            except TicketError as error:
                log.debug("blocks are not served: %s", error)
            is_served = command.ticket in self._state.book
        if not is_served:
            self._on_report(self._state.caches.epoch, KvRevoked(command.ticket))

    def _end_ticket(self, ticket: int) -> None:
        """Report a ticket as revoked, because its reader has all that it needs."""
        with self._state.lock:
            epoch = self._state.caches.epoch
            is_held = self._state.book.revoke(ticket)
        if is_held:
            self._on_report(epoch, KvRevoked(ticket))

    def _enqueue(self, fetch: RunningFetch) -> None:
        """Give a fetch to a thread, or fail it at once: its tokens are computed."""
        peer, pool = fetch.command.endpoint, self._fetch_pools[fetch.command.is_per_layer]
        with self._state.lock:
            is_closed = self._circuits.may_fetch(peer, self._clock())
            is_queued = is_closed and pool.queue.push(peer, (fetch, self._state.caches))
            if is_closed and not is_queued:
                self._circuits.on_cancelled(peer)
        if is_queued:
            pool.threads.submit(self._run_next, pool)
        elif is_closed:
            self._report_end(fetch, f"{MAX_WAITING_FETCHES} fetches from the other engine wait")
        else:
            self._report_end(fetch, _SILENT)

    def _run_next(self, pool: "_FetchPool") -> None:
        """Run the next fetch, and report its end and that of all that it lets fail."""
        with self._state.lock:
            item = pool.queue.pop()
        if item is None:
            return
        peer, (fetch, caches) = item
        begin = self._clock()
        cause, is_answered = self._run_fetch(fetch, caches)
        now, seconds = self._clock(), 0.0
        dropped: list[RunningFetch] = []
        with self._state.lock:
            pool.queue.end(peer)
            if is_answered:
                self._circuits.on_answer(peer)
            elif is_answered is None:
                self._circuits.on_cancelled(peer)
            elif seconds := self._circuits.on_silence(peer, begin, now):
                queues = [each.queue for each in self._fetch_pools]
                dropped = [each for queue in queues for each, _ in queue.drop(peer)]
            if pool.queue.num_waiting:
                # RuntimeError: the mover is being closed.
                with suppress(RuntimeError):
                    pool.threads.submit(self._run_next, pool)
        if seconds:
            log.warning("no KV of an engine is fetched for %.0f s: %s", seconds, cause)
        self._report_end(fetch, cause)
        for each in dropped:
            self._report_end(each, _SILENT)

    def _run_fetch(self, fetch: RunningFetch, caches: ServedCaches) -> tuple[str, bool | None]:
        """Fetch from all machines of the owner, one after another.

        Returns:
            The cause of a failure, empty for none, and whether the other engine has answered; None
            if it may not have been asked.
        """
        cause, is_answered = "", True
        # Fetches that wait for a thread are not late.
        fetch.deadline.begin = self._clock()
        if fetch.is_cancelled:
            return "the fetch was cancelled", None
        try:
            endpoint = decode_endpoint(fetch.command.endpoint)
            targets = find_targets(
                fetch.command, endpoint, caches.pages, caches.engine, caches.machine
            )
            if not targets:
                raise KvTransferError("this engine has no KV cache for transfers")
            self._predict(fetch, endpoint, targets)
            for number, each in targets.items():
                self._fetch_parts(fetch, endpoint.machines[number], each)
        except (OSError, ValueError, ImportError, KvTransferError, KvFrameError) as error:
            cause = str(error) or type(error).__name__
            is_answered = not isinstance(error, OSError | KvFetchLateError)
        except Exception as error:
            log.exception("fetch %d ends", fetch.command.fetch)
            cause = f"{type(error).__name__}: {error}"
        return cause, None if fetch.is_cancelled else is_answered

    def _report_end(self, fetch: RunningFetch, cause: str) -> None:
        """Report the end of a fetch, unless its epoch has ended; `cause` is empty for success."""
        seconds = self._clock() - fetch.arrival
        number = fetch.command.fetch
        # Before the report, because the driver may use the number again after it.
        with self._state.lock:
            is_current = self._fetches.get((fetch.epoch, number)) is fetch
            if is_current:
                del self._fetches[fetch.epoch, number]
        if is_current:
            done = KvFetched(number, not cause, fetch.num_bytes, seconds, cause)
            self._on_report(fetch.epoch, done)

    def _report_start(self, fetch: RunningFetch) -> None:
        """Report the first bytes of a fetch, unless its epoch has ended."""
        number = fetch.command.fetch
        if (fetch.epoch, number) in self._fetches:
            self._on_report(fetch.epoch, KvFetchStarted(number))

    def _predict(
        self, fetch: RunningFetch, endpoint: KvEndpoint, targets: dict[int, MachineTargets]
    ) -> None:
        """Set the deadline by the rates measured so far."""
        predicted = 0.0
        for number, (parts, _) in targets.items():
            num_bytes = _count_bytes(parts, fetch.command.num_tokens)
            estimate = self._estimates.get(endpoint.machines[number].socket)
            seconds = estimate and estimate.predict(num_bytes)
            predicted += seconds or num_bytes / FIRST_GUESS_BYTES_PER_SECOND
        fetch.deadline.predicted_seconds = predicted

    def _fetch_parts(
        self, fetch: RunningFetch, machine: KvMachine, targets: MachineTargets
    ) -> None:
        """Fetch what one machine has. Raises OSError, ValueError, KvTransferError, KvFrameError."""
        is_local = machine.host == read_host_id()
        name = self._backend
        if name == AUTO:
            name = "shm" if is_local else "tcp"
        backend, begin = self._find_backend(name), self._clock()
        connection = KvConnection(self._connect(machine, is_local), fetch.check)
        try:
            fetch_from_machine(fetch, connection, backend, (name, self._encoding), targets)
        finally:
            connection.close()
        if fetch.command.is_per_layer:
            # Its duration is that of the computation.
            return
        estimate = self._estimates.setdefault(machine.socket, TransferEstimate())
        num_bytes = _count_bytes(targets.parts, fetch.command.num_tokens)
        now = self._clock()
        estimate.observe(num_bytes, now - begin, now)

    def _connect(self, machine: KvMachine, is_local: bool) -> socket.socket:
        """Return a connection to another mover. Raises OSError, ValueError, KvTransferError."""
        if not is_local:
            if self._dial is None or not machine.address:
                raise KvTransferError(
                    "the other engine is on another machine and has no --kv-transfer-address"
                )
            return self._dial(machine)
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(f"\0{machine.socket}")
        except BaseException:
            connection.close()
            raise
        return connection

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listening.accept()
            except OSError:
                return
            option = socket.SO_PEERCRED
            peer = connection.getsockopt(socket.SOL_SOCKET, option, _CREDENTIALS.size)
            # Abstract sockets have no permissions of their own.
            if _CREDENTIALS.unpack(peer)[1] != os.getuid():
                connection.close()
                continue
            self._source.adopt(KvConnection(connection))


class _FetchPool:
    """Threads for one kind of fetches, and those that wait for them."""

    def __init__(self, max_running: int, name: str) -> None:
        self.queue: FetchQueue[tuple[RunningFetch, ServedCaches]] = FetchQueue(
            max_running, MAX_WAITING_FETCHES
        )
        self.threads = ThreadPoolExecutor(NUM_PARALLEL_PEERS * max_running, name)


def read_host_id() -> str:
    """Return an id of this machine and its network namespace, valid until the machine restarts.

    Two processes with the same id can transfer through shared memory.
    """
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    # Abstract sockets belong to a network namespace.
    return f"{boot}:{os.readlink('/proc/self/ns/net')}"


def _count_bytes(parts: list[TargetPart], num_tokens: int) -> int:
    return num_tokens * sum(
        part.pages.bytes_per_token(part.part.layer, part.part.heads) for part in parts
    )
