"""KV movers of an engine: each machine's `gllm-link` process and the caches that it opens.

The caches of an epoch are opened once all of its workers are ready. The driver then commands
the process of its machine directly, over a pair of sockets that this module makes for both; that of
another machine has such a pair with the machine's first worker, which passes on what both send. If
a process dies, the end of its channel is read; the next process opens the same caches, under
another endpoint and with another channel. Nothing of an earlier epoch reaches a later driver.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from gllm.config.kv_backends import AUTO, MOCK, scale_mock_rate
from gllm.config.link_encodings import PLAIN
from gllm.messages.base import WireMessage
from gllm.messages.handoff import FirstChunkComputed, KvPushStarted
from gllm.messages.kv_disk import KvDiskTotals
from gllm.messages.kv_layout import KvLayout, count_token_bytes
from gllm.messages.kv_transfer import KvTransferTotals
from gllm.messages.nodes import OpenKvMachine, RestartKvMover
from gllm.recovery.liveness import FREEZE_SECONDS
from gllm.recovery.placement import LOCAL_NODE
from gllm.runtime.head.link_process import LinkChild, LinkOwner
from gllm.runtime.messaging.security import NodeCertificate, create_certificate
from gllm.transport.descriptors import DescriptorChannel, create_channels
from gllm.transport.kv.endpoint import KvEndpoint, KvMachine, encode_endpoint
from gllm.transport.link import commands

log = logging.getLogger(__name__)

CreateChild = Callable[
    [commands.ConfigureLink, NodeCertificate | None, LinkOwner, float], LinkChild
]
CreateChannels = Callable[[], tuple[DescriptorChannel, DescriptorChannel]]


SendToNode = Callable[[str, WireMessage], None]
"""Sends a message to the agent of another machine, if that is a member."""


@dataclass
class _OpenCaches:
    """KV caches of the present epoch on one machine."""

    epoch: int
    engine: list[list[KvLayout]]
    """Layouts of all machines."""
    machine: int
    """Index of this machine among them."""
    scale: float
    """Bytes of an entry in the device's memory, divided by its bytes here."""
    descriptors: list[int] = field(default_factory=list)
    """Own descriptors of the memory of each worker, in the order of the layouts."""
    is_refused: bool = False
    """True if they cannot be opened."""


class MachineKvMover:
    """Starts and restarts the `gllm-link` process of a machine, which transfers KV blocks.

    It gives the process access to the KV caches of the machine's workers. All methods are called on
    the event loop.
    """

    def __init__(
        self,
        connect_worker: Callable[[int, int], None],
        backend: str | None,
        encoding: str = PLAIN,
        address: str = "",
        create_child: CreateChild = LinkChild,
        freeze_timeout: float = FREEZE_SECONDS,
        speed: float = 1.0,
        disk: str = "",
    ) -> None:
        """Create a mover without caches; the process starts with the first ones.

        Args:
            connect_worker: gives the first worker of the machine in an epoch the descriptor of its
                end of the channel to the process, which stays the caller's.
            backend: `EngineConfig.kv_transfer`; None for no transfers, but a disk tier.
            encoding: encoding of fetches over TCP, a name of LINK_ENCODINGS.
            address: HOST:PORT at which engines of other machines fetch; empty if they cannot.
            create_child: creates the owner of the process.
            freeze_timeout: as in `LinkChild`.
            speed: factor of the bandwidth of the backend mock.
            disk: `EngineConfig.kv_cache_disk`; empty for no disk tier.
        """
        self.machine = b""
        """KvMachine in msgpack, for other engines; empty while the caches are not served."""
        self.create_channels: CreateChannels = create_channels
        """Makes the two ends of a channel: that of the worker, and that of the process."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when `machine` has changed."""
        self._connect_worker = connect_worker
        self._backend, self._encoding = backend or AUTO, encoding
        self._disk = disk
        self._address, self._speed = address, speed
        self._certificate = create_certificate() if address else None
        identity = commands.ConfigureLink(
            0, "kv", address, bool(address), accepts_engines=bool(address)
        )
        self._child = create_child(identity, self._certificate, self, freeze_timeout)
        self._caches: _OpenCaches | None = None

    @property
    def num_restarts(self) -> int:
        """Starts of the process after the first one."""
        return self._child.num_restarts

    @property
    def process_id(self) -> int | None:
        """Process id of gllm-link; None while it does not run."""
        return None if self._child.process is None else self._child.process.pid

    def prepare(self) -> None:
        """Start the process before the workers are ready, if it will open a disk tier."""
        if self._disk:
            with suppress(OSError):
                # `open` reports it.
                self._child.ensure_started()

    def open(
        self,
        epoch: int,
        engine: list[list[KvLayout]],
        machine: int,
        memory: Iterable[int],
        scale: float = 1.0,
    ) -> None:
        """Serve the caches of an epoch, whose workers are all ready.

        Args:
            epoch: its number.
            engine: KV layouts of all machines of the engine, by machine and worker.
            machine: index of this machine.
            memory: descriptors of the memory of this machine's caches, which stay the caller's.
            scale: bytes of an entry in the device's memory, divided by its bytes in the cache,
                which may be smaller on an emulated device.
        """
        self.end_epoch()
        self._caches = caches = _OpenCaches(epoch, engine, machine, scale)
        try:
            for descriptor in memory:
                caches.descriptors.append(os.dup(descriptor))
            was_running = self._child.is_running
            # Another process opens the caches once it has started.
            self._child.ensure_started()
        except OSError as error:
            log.warning("no KV blocks are transferred: %s", error)
            caches.is_refused = True
            return
        if was_running:
            self._open_caches(caches)

    def end_epoch(self) -> None:
        """Close the caches, because their workers have ended or will."""
        if self._caches is None:
            return
        for descriptor in self._caches.descriptors:
            os.close(descriptor)
        self._caches = None
        if self._child.is_running:
            self._child.send(commands.CloseKvCaches())
        self._set_machine(b"")

    def restart(self) -> None:
        """End a `gllm-link` process that does not answer commands; a new one is started."""
        log.warning("gllm-link does not answer commands about KV blocks")
        self._child.kill()

    def close(self) -> None:
        """End the process, at once."""
        self.on_change = lambda: None
        self.end_epoch()
        self._child.close()
        if self._certificate is not None:
            self._certificate.close()
            self._certificate = None

    def on_started(self) -> None:
        """Open the caches in a gllm-link process that has started."""
        if self._caches is not None:
            self._open_caches(self._caches)

    def on_message(self, message: commands.LinkMessage) -> None:
        """Handle the report that the caches are open: publish their addresses."""
        caches = self._caches
        if not isinstance(message, commands.KvCachesOpened) or caches is None:
            return
        if message.epoch != caches.epoch:
            return
        if message.cause:
            log.warning("no KV blocks are transferred: %s", message.cause)
            caches.is_refused = True
            return
        machine = msgspec.msgpack.decode(message.machine, type=KvMachine)
        if self._certificate is not None:
            certificate = self._certificate.certificate
            machine = msgspec.structs.replace(
                machine, address=self._address, certificate=certificate
            )
        self._set_machine(msgspec.msgpack.encode(machine))

    def on_exited(self) -> None:
        """Withdraw the addresses, because gllm-link has exited."""
        self._set_machine(b"")

    def on_import_failed(self, cause: str) -> None:
        """Note that the caches of this epoch are not served, because gllm-link cannot start."""
        log.warning("no KV blocks are transferred: %s", cause)
        if self._caches is not None:
            self._caches.is_refused = True

    def _open_caches(self, caches: _OpenCaches) -> None:
        """Let the process open the caches, and connect it with the machine's first worker."""
        if caches.is_refused:
            return
        backend = self._backend
        if backend.startswith(MOCK):
            backend = scale_mock_rate(backend, self._speed / caches.scale)
        try:
            worker_end, mover_end = self.create_channels()
        except OSError as error:
            log.warning("no KV blocks are transferred: %s", error)
            caches.is_refused = True
            return
        try:
            self._child.send(
                commands.OpenKvCaches(
                    caches.epoch,
                    caches.engine,
                    caches.machine,
                    backend,
                    self._encoding,
                    self._disk,
                ),
                [*caches.descriptors, mover_end.fileno()],
            )
            self._connect_worker(caches.epoch, worker_end.fileno())
        finally:
            worker_end.close()
            mover_end.close()

    def _set_machine(self, machine: bytes) -> None:
        if machine != self.machine:
            self.machine = machine
            self.on_change()


class EngineKvMover:
    """KV movers of an engine's machines, in its head process.

    It lets each machine serve its caches, and publishes the endpoint at which other engines fetch
    blocks once all machines do. All methods are called on the event loop.
    """

    def __init__(
        self,
        connect_driver: Callable[[int, int], None],
        backend: str | None,
        encoding: str = PLAIN,
        address: str = "",
        create_child: CreateChild = LinkChild,
        freeze_timeout: float = FREEZE_SECONDS,
        speed: float = 1.0,
        send_to_node: SendToNode = lambda node, message: None,
        disk: str = "",
    ) -> None:
        """Create the movers of an engine without caches.

        Args:
            connect_driver: as in `MachineKvMover`; the first worker of this machine has the driver.
            backend: `EngineConfig.kv_transfer`; None for an engine without transfers, which may
                have a disk tier.
            encoding: as in `MachineKvMover`.
            address: as in `MachineKvMover`.
            create_child: as in `MachineKvMover`.
            freeze_timeout: as in `MachineKvMover`.
            speed: as in `MachineKvMover`.
            send_to_node: sends to the agents of other machines.
            disk: see MachineKvMover.
        """
        self.endpoint = b""
        """Addresses and layouts of the caches for other engines; empty while one is not served."""
        self.bytes_per_token = 0
        """Bytes of one token's keys and values over all layers and heads; 0 before the start."""
        self.digest = ""
        """Digest of all that decides the numbers in the caches; empty before the start."""
        self.totals = KvTransferTotals()
        """Counters over all epochs, as the drivers report them."""
        self.disk_totals: KvDiskTotals | None = KvDiskTotals() if disk else None
        """Those of the disk tier; None without one."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when the endpoint has changed."""
        self.on_prefill: Callable[[KvPushStarted | FirstChunkComputed], None] = lambda report: None
        """Called with the driver's reports on prompts with a ticket that are still computed."""
        self.local: MachineKvMover | None = None
        """Mover of this machine; None for an engine without transfers and disk tier."""
        self.is_enabled = backend is not None
        """True if the engine may transfer KV blocks from and to other engines."""
        if backend is not None or disk:
            self.local = MachineKvMover(
                *(connect_driver, backend, encoding, address, create_child),
                *(freeze_timeout, speed, disk),
            )
            self.local.on_change = self._on_local_change
        self._send_to_node = send_to_node
        self._layouts: dict[int, KvLayout] = {}
        """Layouts of the present epoch's workers, by sender."""
        self._epoch = 0
        self._machines: dict[str, bytes] = {}
        """KvMachine of each machine of the epoch by name; empty while it serves nothing."""

    @property
    def num_restarts(self) -> int:
        """Starts of this machine's process after the first one."""
        return 0 if self.local is None else self.local.num_restarts

    @property
    def process_id(self) -> int | None:
        """Process id of this machine's gllm-link; None while it does not run."""
        return None if self.local is None else self.local.process_id

    def add_layout(self, sender: int, layout: KvLayout | None) -> None:
        """Store the KV layout of a worker that is ready; None for a worker without transfers."""
        if layout is not None:
            self._layouts[sender] = layout

    def open(
        self,
        epoch: int,
        machines: Mapping[str, Sequence[int]],
        memory: Mapping[int, int],
        block_bytes: int | None = None,
    ) -> None:
        """Serve the caches of an epoch, whose workers are all ready.

        Args:
            epoch: its number.
            machines: workers of each machine, by its name in placements.
            memory: descriptor of the memory of each local worker's cache, which stays the caller's.
            block_bytes: bytes of a block of the first worker in its device's memory; None for those
                of its cache here, which may be smaller on an emulated device.
        """
        if self.local is None:
            return
        self._epoch, self._machines = epoch, dict.fromkeys(machines, b"")
        try:
            engine = [[self._layouts[sender] for sender in own] for own in machines.values()]
            descriptors = [memory[sender] for sender in machines[LOCAL_NODE]]
        except KeyError as error:
            log.warning("no KV blocks are transferred: worker %s has no cache for it", error)
            return
        first = engine[0][0]
        if any(each.is_staged != first.is_staged for own in engine for each in own):
            log.warning("no KV blocks are transferred: some stages are on GPUs, others on CPUs")
            return
        if first.is_staged and self.disk_totals is not None:
            log.warning("no KV blocks are kept on disk: kv_cache_disk needs stages on CPUs")
        scale = (block_bytes or 0) / (first.block_size * first.bytes_per_token) or 1.0
        token_bytes = count_token_bytes([layout for layouts in engine for layout in layouts])
        self.bytes_per_token = round(token_bytes * scale)
        self.digest = first.model
        for index, node in enumerate(machines):
            if node == LOCAL_NODE:
                self.local.open(epoch, engine, index, descriptors, scale)
            else:
                self._send_to_node(node, OpenKvMachine(epoch, engine, index, scale))

    def end_epoch(self) -> None:
        """Close the caches, because their driver has ended; other machines close theirs."""
        self._layouts.clear()
        self._machines.clear()
        if self.local is not None:
            self.local.end_epoch()
        self._publish()

    def restart(self, machine: int) -> None:
        """Replace the `gllm-link` process of a machine, which does not answer commands."""
        nodes = list(self._machines)
        if self.local is None or machine >= len(nodes):
            return
        if nodes[machine] == LOCAL_NODE:
            self.local.restart()
        else:
            self._send_to_node(nodes[machine], RestartKvMover(self._epoch))

    def on_opened(self, node: str, epoch: int, machine: bytes) -> None:
        """Handle the report of another machine that its caches are served, or not any more."""
        if epoch == self._epoch and node in self._machines:
            self._machines[node] = machine
            self._publish()

    def close(self) -> None:
        """End this machine's process, at once."""
        self.on_change = lambda: None
        self.end_epoch()
        if self.local is not None:
            self.local.close()

    def _on_local_change(self) -> None:
        assert self.local is not None
        if LOCAL_NODE in self._machines:
            self._machines[LOCAL_NODE] = self.local.machine
        self._publish()

    def _publish(self) -> None:
        """Publish the endpoint if all machines serve their caches, otherwise withdraw it."""
        endpoint = b""
        if self.is_enabled and self._machines and all(self._machines.values()):
            machines = [
                msgspec.msgpack.decode(machine, type=KvMachine)
                for machine in self._machines.values()
            ]
            endpoint = encode_endpoint(KvEndpoint(machines))
        if endpoint != self.endpoint:
            self.endpoint = endpoint
            self.on_change()
