"""KV transfers of a data mover: its KvMover, and the connections of other machines to it."""

import socket
from collections.abc import Callable, Sequence

import msgspec

from gllm.messages.kv_transfer import KvReport
from gllm.transport.kv.endpoint import KvMachine
from gllm.transport.kv.frames import KvTransferError
from gllm.transport.kv.mover import KvMover
from gllm.transport.link.commands import (
    CloseKvCaches,
    KvCachesOpened,
    KvMoved,
    LinkMessage,
    MoveKv,
    OpenKvCaches,
)
from gllm.transport.link.connection import dial
from gllm.transport.link.frames import EdgeHello, EdgeName, FrameClass, encode_payload
from gllm.transport.link.settings import LinkSettings

KvServiceCommand = OpenKvCaches | CloseKvCaches | MoveKv
_NO_EDGE = EdgeName(0, 0, 0)


class KvService:
    """Executes the commands about KV caches; the mover starts with the first caches."""

    def __init__(
        self,
        send: Callable[[LinkMessage], None],
        find_settings: Callable[[], LinkSettings | None],
        yield_to_activations: Callable[[], None],
    ) -> None:
        """Create a service without caches.

        Args:
            send: Sends to the parent, on any thread.
            find_settings: Returns the settings of the data mover; None before they are known.
            yield_to_activations: Waits as long as activations wait for this machine's links.
        """
        self._send, self._find_settings = send, find_settings
        self._yield = yield_to_activations
        self._mover: KvMover | None = None
        self._generation = 0

    def handle(self, command: KvServiceCommand, descriptors: Sequence[int]) -> None:
        """Execute a command, whose descriptors belong to the service."""
        match command:
            case OpenKvCaches():
                self._open(command, descriptors)
            case CloseKvCaches() if self._mover is not None:
                self._mover.close_caches()
            case MoveKv(generation, moved) if self._mover and generation == self._generation:
                self._mover.handle(moved)

    def adopt(self, connection: socket.socket, address: str) -> None:
        """Serve a connection of another machine's data mover, whose IP address is given."""
        if self._mover is None:
            connection.close()
        else:
            self._mover.adopt(connection, address)

    def _open(self, command: OpenKvCaches, descriptors: Sequence[int]) -> None:
        self._generation = command.generation
        caches = list(zip(command.layouts, descriptors, strict=True))
        try:
            if self._mover is None:
                self._mover = KvMover(
                    self._on_report, command.backend, command.encoding, self._dial, self._yield
                )
            self._mover.open_caches(command.generation, caches)
        except (OSError, ValueError) as error:
            self._send(KvCachesOpened(command.generation, b"", str(error)))
            return
        machine = msgspec.msgpack.encode(self._mover.machine())
        self._send(KvCachesOpened(command.generation, machine))

    def _on_report(self, generation: int, report: KvReport) -> None:
        self._send(KvMoved(generation, report))

    def _dial(self, machine: KvMachine) -> socket.socket:
        """Connect to another machine's data port. Raises OSError, ValueError, KvTransferError."""
        settings = self._find_settings()
        if settings is None:
            raise KvTransferError("this machine has no data connections")
        connection = dial(machine.address, settings.congestion, settings.tls, machine.certificate)
        hello = encode_payload(EdgeHello(settings.node, "", is_sender=False))
        connection.sendall(_NO_EDGE.header(FrameClass.KV_HELLO, hello))
        return connection
