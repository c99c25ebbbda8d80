"""KV transfers of a data mover: its KvMover, and the connections of other machines to it."""

import logging
import os
import socket
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress

import msgspec

from gllm.config.sized_folder import parse_sized_folder
from gllm.messages.codec import decode_for_kv_mover, encode
from gllm.messages.kv_transfer import KvReport
from gllm.transport.descriptors import DescriptorChannel, DescriptorError
from gllm.transport.kv.endpoint import KvMachine
from gllm.transport.kv.frames import KvTransferError
from gllm.transport.kv.mover import KvMover
from gllm.transport.link.commands import (
    CloseKvCaches,
    KvCachesOpened,
    LinkMessage,
    OpenKvCaches,
)
from gllm.transport.link.connection import dial
from gllm.transport.link.frames import EdgeHello, EdgeName, FrameClass, encode_payload
from gllm.transport.link.settings import LinkSettings

log = logging.getLogger(__name__)

KvServiceCommand = OpenKvCaches | CloseKvCaches
_NO_EDGE = EdgeName(0, 0, 0)


class DriverChannel:
    """Channel between the KV transfer threads and the scheduler's process: commands and reports.

    Commands are received on a thread of its own. A channel serves one epoch: the time between two
    restarts of the engine.
    """

    def __init__(self, epoch: int, channel: DescriptorChannel) -> None:
        self.epoch = epoch
        self._channel = channel
        self._sending, self._handling = threading.Lock(), threading.Lock()
        self._mover: KvMover | None = None

    def start(self, mover: KvMover) -> None:
        """Start a thread that passes the driver's commands to the KV mover."""
        self._mover = mover
        threading.Thread(target=self._run, name="kv-driver", daemon=True).start()

    def send(self, report: KvReport) -> None:
        """Send a report on any thread; it is dropped if the driver has disconnected."""
        with self._sending, suppress(DescriptorError):
            self._channel.send(encode(report), should_wait=True)

    def close(self) -> None:
        """End the channel; no command is executed once this has returned."""
        self._channel.shut_down()
        with self._handling:
            is_started, self._mover = self._mover is not None, None
        if not is_started:
            self._channel.close()

    def _run(self) -> None:
        try:
            while True:
                payload, descriptors = self._channel.receive()
                for descriptor in descriptors:
                    os.close(descriptor)
                try:
                    command = decode_for_kv_mover(payload)
                except msgspec.DecodeError as error:
                    log.error("a command of the driver is invalid: %s", error)
                    continue
                with self._handling:
                    if self._mover is not None:
                        self._mover.handle(command)
        except (DescriptorError, OSError):
            # The driver has gone, or the epoch has ended: the parent closes the caches.
            pass
        except Exception:
            # With the channel the driver would lose the fetches that still write to its blocks.
            log.exception("the KV mover has failed")
            os._exit(1)
        with self._sending:
            self._channel.close()


class KvService:
    """Executes the parent's commands that open and close KV caches for transfers between engines.

    The KV transfer threads are started with the first KV cache.
    """

    def __init__(
        self,
        send: Callable[[LinkMessage], None],
        find_settings: Callable[[], LinkSettings | None],
        yield_to_activations: Callable[[], None],
    ) -> None:
        """Create without KV caches.

        Args:
            send: Sends a message to the parent, on any thread.
            find_settings: Returns the settings of the data mover; None before they are known.
            yield_to_activations: Waits while activations are queued for sending from this machine.
        """
        self._send, self._find_settings = send, find_settings
        self._yield = yield_to_activations
        self._mover: KvMover | None = None
        self._driver: DriverChannel | None = None
        """Channel to the driver of the present epoch."""

    def handle(self, command: KvServiceCommand, descriptors: Sequence[int]) -> None:
        """Execute a command and take ownership of its descriptors."""
        match command:
            case OpenKvCaches():
                self._open(command, descriptors)
            case CloseKvCaches() if self._mover is not None:
                self._close_driver()
                self._mover.close_caches()

    def adopt(self, connection: socket.socket, address: str) -> None:
        """Serve a KV connection that the data port has accepted from an IP address."""
        if self._mover is None:
            connection.close()
        else:
            self._mover.adopt(connection, address)

    def _open(self, command: OpenKvCaches, descriptors: Sequence[int]) -> None:
        self._close_driver()
        *memory, channel = descriptors
        driver = DriverChannel(command.epoch, DescriptorChannel.from_descriptor(channel))
        caches = list(zip(command.layouts, memory, strict=True))
        try:
            if self._mover is None:
                try:
                    self._mover = self._create_mover(command)
                except BaseException:
                    for descriptor in memory:
                        os.close(descriptor)
                    raise
            # The disk tier reports to the driver from now on.
            self._driver = driver
            disk = parse_sized_folder(command.disk, needs_size=True) if command.disk else None
            self._mover.open_caches(command.epoch, caches, command.engine, command.machine, disk)
        except Exception as error:
            # The library of a backend has errors of its own.
            if not isinstance(error, OSError | ValueError | ImportError):
                log.exception("KV caches are not opened")
            self._driver = None
            driver.close()
            self._send(KvCachesOpened(command.epoch, b"", str(error) or type(error).__name__))
            return
        driver.start(self._mover)
        machine = msgspec.msgpack.encode(self._mover.machine())
        self._send(KvCachesOpened(command.epoch, machine))

    def _create_mover(self, command: OpenKvCaches) -> KvMover:
        """Create the mover. Raises OSError, ValueError, ImportError and errors of libraries."""
        return KvMover(
            self._on_report,
            command.backend,
            command.encoding,
            self._dial,
            self._yield,
            on_refused=self._on_refused,
        )

    def _close_driver(self) -> None:
        """End the channel to a driver: none of its commands is executed any more."""
        if self._driver is not None:
            self._driver.close()
            self._driver = None

    def _on_report(self, epoch: int, report: KvReport) -> None:
        """Send a report to the driver, on any thread; that of another epoch is dropped."""
        driver = self._driver
        if driver is not None and driver.epoch == epoch:
            driver.send(report)

    def _on_refused(self, address: str, cause: str, is_malformed: bool) -> None:
        """Count and log a peer without a valid ticket, on any thread."""
        if settings := self._find_settings():
            settings.refusals.add(address or "this machine", cause, is_malformed)

    def _dial(self, machine: KvMachine) -> socket.socket:
        """Connect to another machine's data port. Raises OSError, ValueError, KvTransferError."""
        settings = self._find_settings()
        if settings is None:
            raise KvTransferError("this machine has no data connections")
        connection = dial(machine.address, settings.congestion, settings.tls, machine.certificate)
        hello = encode_payload(EdgeHello(settings.node, "", is_sender=False))
        connection.sendall(_NO_EDGE.header(FrameClass.KV_HELLO, hello))
        return connection
