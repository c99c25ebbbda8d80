"""KV mover of an engine in its head process: the `gllm-link` process and the caches that it opens.

The caches of an epoch are opened once all of its workers are ready. The driver then commands
the process directly, over a pair of sockets that this module makes for both. If the process dies,
the driver reads the end of its channel; the next process opens the same caches, under another
endpoint and with another channel. Nothing of an earlier epoch reaches a later driver.
"""

import logging
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import msgspec

from gllm.config.kv_backends import MOCK, scale_mock_rate
from gllm.config.link_encodings import PLAIN
from gllm.messages.handoff import FirstChunkComputed, KvPushStarted
from gllm.messages.kv_layout import KvLayout, count_token_bytes
from gllm.messages.kv_transfer import KvTransferTotals
from gllm.recovery.liveness import FREEZE_SECONDS
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


@dataclass
class _OpenCaches:
    """KV caches of the present epoch."""

    epoch: int
    layouts: list[KvLayout] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)
    """Own descriptors of the memory of each worker, in the order of the layouts."""
    scale: float = 1.0
    """Bytes of an entry in the device's memory, divided by its bytes here."""
    is_refused: bool = False
    """True if they cannot be opened."""


class EngineKvMover:
    """Starts and restarts the `gllm-link` process, which transfers KV blocks between engines.

    It gives the process access to the KV caches of all workers on this machine, and publishes the
    endpoint at which other engines fetch blocks. All methods are called on the event loop.
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
    ) -> None:
        """Create a mover without caches; the process starts with the first ones.

        Args:
            connect_driver: gives the driver of an epoch the descriptor of its end of the
                channel to the process, which stays the caller's.
            backend: `EngineConfig.kv_transfer`; None for an engine without transfers.
            encoding: of fetches over TCP, a name of LINK_ENCODINGS.
            address: HOST:PORT at which engines of other machines fetch; empty if they cannot.
            create_child: creates the owner of the process.
            freeze_timeout: see LinkChild.
            speed: factor of the bandwidth of the backend mock.
        """
        self.endpoint = b""
        """Address and layouts of the caches for other engines; empty while they are not served."""
        self.bytes_per_token = 0
        """Bytes of one token's keys and values over all layers and heads; 0 before the start."""
        self.digest = ""
        """Digest of all that decides the numbers in the caches; empty before the start."""
        self.totals = KvTransferTotals()
        """Counters over all epochs, as the drivers report them."""
        self.create_channels: CreateChannels = create_channels
        """Makes the two ends of a channel: that of the driver, and that of the process."""
        self.on_change: Callable[[], None] = lambda: None
        """Called when the endpoint has changed."""
        self.on_prefill: Callable[[KvPushStarted | FirstChunkComputed], None] = lambda report: None
        """Called with the driver's reports on prompts with a ticket that are still computed."""
        self._connect_driver = connect_driver
        self._backend, self._encoding = backend, encoding
        self._address, self._speed = address, speed
        self._certificate = create_certificate() if address else None
        identity = commands.ConfigureLink(
            0, "kv", address, bool(address), accepts_engines=bool(address)
        )
        self._child = create_child(identity, self._certificate, self, freeze_timeout)
        self._layouts: dict[int, KvLayout] = {}
        """Layouts of the present epoch's workers, by sender."""
        self._caches: _OpenCaches | None = None

    @property
    def is_enabled(self) -> bool:
        """True if the engine may transfer KV blocks from and to other engines."""
        return self._backend is not None

    @property
    def num_restarts(self) -> int:
        """Starts of the process after the first one."""
        return self._child.num_restarts

    @property
    def process_id(self) -> int | None:
        """Process id of gllm-link; None while it does not run."""
        return None if self._child.process is None else self._child.process.pid

    def add_layout(self, sender: int, layout: KvLayout | None) -> None:
        """Store the KV layout of a worker that is ready; None for a worker without transfers."""
        if layout is not None:
            self._layouts[sender] = layout

    def open(
        self,
        epoch: int,
        senders: Iterable[int],
        memory: Mapping[int, int],
        block_bytes: int | None = None,
    ) -> None:
        """Serve the caches of an epoch, whose workers are all ready.

        Args:
            epoch: its number.
            senders: its workers.
            memory: descriptor of the memory of each worker's cache, which stays the caller's.
            block_bytes: bytes of a block of the first worker in its device's memory; None for those
                of its cache here, which may be smaller on an emulated device.
        """
        if self._backend is None:
            return
        self._caches = caches = _OpenCaches(epoch)
        try:
            for sender in senders:
                caches.layouts.append(self._layouts[sender])
                caches.descriptors.append(os.dup(memory[sender]))
            was_running = self._child.is_running
            # Another process opens the caches once it has started.
            self._child.ensure_started()
        except (OSError, KeyError) as error:
            cause = f"worker {error} has no cache for it" if isinstance(error, KeyError) else error
            log.warning("no KV blocks are transferred: %s", cause)
            caches.is_refused = True
            return
        own = caches.layouts[0]
        caches.scale = (block_bytes or 0) / (own.block_size * own.bytes_per_token) or 1.0
        self.bytes_per_token = round(count_token_bytes(caches.layouts) * caches.scale)
        self.digest = caches.layouts[0].model
        if was_running:
            self._open_caches(caches)

    def end_epoch(self) -> None:
        """Close the caches, because their driver has ended."""
        self._layouts.clear()
        if self._caches is None:
            return
        for descriptor in self._caches.descriptors:
            os.close(descriptor)
        self._caches = None
        if self._child.is_running:
            self._child.send(commands.CloseKvCaches())
        self._set_endpoint(b"")

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
        """Handle the report that the caches are open: publish the endpoint."""
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
        self._set_endpoint(encode_endpoint(KvEndpoint([machine])))

    def on_exited(self) -> None:
        """Withdraw the endpoint, because gllm-link has exited."""
        self._set_endpoint(b"")

    def on_import_failed(self, cause: str) -> None:
        """Note that the caches of this epoch are not served, because gllm-link cannot start."""
        log.warning("no KV blocks are transferred: %s", cause)
        if self._caches is not None:
            self._caches.is_refused = True

    def _open_caches(self, caches: _OpenCaches) -> None:
        """Let the process open the caches, and connect it with the driver."""
        assert self._backend is not None
        if caches.is_refused:
            return
        backend = self._backend
        if backend.startswith(MOCK):
            backend = scale_mock_rate(backend, self._speed / caches.scale)
        try:
            driver_end, mover_end = self.create_channels()
        except OSError as error:
            log.warning("no KV blocks are transferred: %s", error)
            caches.is_refused = True
            return
        try:
            self._child.send(
                commands.OpenKvCaches(caches.epoch, caches.layouts, backend, self._encoding),
                [*caches.descriptors, mover_end.fileno()],
            )
            self._connect_driver(caches.epoch, driver_end.fileno())
        finally:
            driver_end.close()
            mover_end.close()

    def _set_endpoint(self, endpoint: bytes) -> None:
        if endpoint != self.endpoint:
            self.endpoint = endpoint
            self.on_change()
