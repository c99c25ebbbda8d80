"""Data movers as processes, with rings at both ends, as the parents of workers run them."""

import os
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from gllm.config.link_encodings import PLAIN
from gllm.pacing.policy_registry import DEFAULT_LINK_POLICY
from gllm.runtime.messaging.security import NodeCertificate, create_certificate
from gllm.transport.base import EdgeLayout
from gllm.transport.descriptors import DescriptorChannel, DescriptorError, create_channels
from gllm.transport.link.commands import (
    ConfigureLink,
    LinkCommand,
    LinkEdgeOpened,
    LinkListening,
    LinkMessage,
    LinkPeer,
    LinkReport,
    OpenLinkEdge,
    decode_link_message,
    encode_link_message,
)
from gllm.transport.ring import Ring

RUN = 77
LAYOUT = EdgeLayout(slots=4, max_tokens=64, hidden_size=96, itemsize=4)
WAIT_SECONDS = 60.0


class Mover:
    """A `gllm-link` process; `messages` has its reports."""

    def __init__(
        self,
        node: str,
        has_tls: bool = True,
        listen: str = "127.0.0.1:0",
        node_timeout: float = 5.0,
        policy: str = DEFAULT_LINK_POLICY,
        congestion: str | None = None,
        host: str = "127.0.0.1",
        command: Sequence[str] = (),
        encoding: str = PLAIN,
    ) -> None:
        """Start a data mover; `command` precedes that of the process, as to enter a namespace."""
        self.node, self.listen, self.node_timeout = node, listen, node_timeout
        self.policy, self.congestion, self.encoding = policy, congestion, encoding
        self.host, self.prefix = host, command
        self.certificate: NodeCertificate | None = create_certificate() if has_tls else None
        self.commands: list[tuple[OpenLinkEdge, Files]] = []
        self.start()

    @property
    def der(self) -> bytes:
        return self.certificate.certificate if self.certificate else b""

    def start(self) -> None:
        own, inherited = create_channels()
        self.channel = own
        command = [
            *self.prefix,
            sys.executable,
            "-m",
            "gllm.transport.link",
            str(inherited.fileno()),
        ]
        self.process = subprocess.Popen(command, pass_fds=[inherited.fileno()])
        inherited.close()
        self.messages: queue.SimpleQueue[LinkMessage | None] = queue.SimpleQueue()
        """None follows the last message."""
        self.report = LinkReport([], 0, {})
        threading.Thread(target=self._receive, args=(own, self.messages), daemon=True).start()
        descriptors = [self.certificate.descriptor] if self.certificate else []
        identity = ConfigureLink(
            RUN,
            self.node,
            self.listen,
            bool(descriptors),
            congestion=self.congestion,
            policy=self.policy,
            encoding=self.encoding,
            node_timeout=self.node_timeout,
        )
        self.send(identity, descriptors)
        listening = self.wait_for(LinkListening)
        if listening.cause:
            self.close()
            raise OSError(listening.cause)
        self.port = listening.port
        if self.listen:
            # The same port after a restart, as with --data-port.
            self.listen = f"{self.host}:{self.port}"

    def peer(self, address: str | None = None) -> LinkPeer:
        own = f"{self.host}:{self.port}" if self.port else ""
        return LinkPeer(self.node, own if address is None else address, self.der)

    def send(self, command: LinkCommand, descriptors: list[int] | None = None) -> None:
        self.channel.send(encode_link_message(command), descriptors or [])

    def open(self, command: OpenLinkEdge, files: "Files") -> None:
        """Open an edge; `close` closes its files."""
        self.commands.append((command, files))
        self.send(command, files.descriptors)

    def restart(self) -> None:
        """Kill the process in the middle of what it does, and start another one."""
        self.stop()
        self.start()
        for command, files in self.commands:
            self.send(command, files.descriptors)

    def wait_for(self, kind: Any, accept: Callable[[Any], bool] = lambda _: True) -> Any:
        end = time.monotonic() + WAIT_SECONDS
        while True:
            message = self.messages.get(timeout=max(0.0, end - time.monotonic()))
            if message is None:
                raise ChildProcessError(f"the data mover of {self.node} has closed its channel")
            if isinstance(message, kind) and accept(message):
                return message

    def rss_bytes(self) -> int:
        with open(f"/proc/{self.process.pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def stop(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()
        self._close_channel()

    def close(self) -> None:
        """End the process as its parent's death does."""
        self._close_channel()
        try:
            assert self.process.wait(WAIT_SECONDS) in (0, -signal.SIGKILL)
        finally:
            self.process.kill()
            if self.certificate is not None:
                self.certificate.close()
            for _, files in self.commands:
                files.close()

    def _close_channel(self) -> None:
        # A thread waits for messages, so closing alone would not end the connection.
        with suppress(OSError), socket.socket(fileno=os.dup(self.channel.fileno())) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)
        self.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def _receive(
        self, channel: DescriptorChannel, messages: "queue.SimpleQueue[LinkMessage | None]"
    ) -> None:
        try:
            # Not select.select, which refuses descriptors from 1024.
            waiting = select.poll()
            waiting.register(channel, select.POLLIN)
            while True:
                if not waiting.poll(WAIT_SECONDS * 1000):
                    continue
                message = decode_link_message(channel.receive()[0])
                if isinstance(message, LinkReport):
                    self.report = message
                messages.put(message)
        except (DescriptorError, OSError, ValueError):
            return
        finally:
            messages.put(None)


@dataclass
class Files:
    """Files of one worker's end of an edge."""

    memory: int = field(default_factory=lambda: os.memfd_create("test-link"))
    event: int = field(default_factory=lambda: os.eventfd(0, os.EFD_SEMAPHORE))
    own_log: int = field(default_factory=lambda: os.memfd_create("test-own-log"))
    peer_log: int = field(default_factory=lambda: os.memfd_create("test-peer-log"))
    log_event: int = field(default_factory=lambda: os.eventfd(0))
    further_lanes: list[tuple[int, int]] = field(default_factory=list)
    """Memory and event of each lane but the first one."""

    @classmethod
    def of_lanes(cls, num_lanes: int) -> "Files":
        files = cls()
        for _ in range(1, num_lanes):
            ring = os.memfd_create("test-lane"), os.eventfd(0, os.EFD_SEMAPHORE)
            files.further_lanes.append(ring)
        return files

    @property
    def descriptors(self) -> list[int]:
        further = [descriptor for ring in self.further_lanes for descriptor in ring]
        return [self.memory, self.event, self.own_log, self.peer_log, self.log_event, *further]

    def close(self) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)

    def ring(self, layout: EdgeLayout = LAYOUT, lane: int = 0) -> Ring:
        rings = [(self.memory, self.event), *self.further_lanes]
        return Ring(*rings[lane], layout)


def connect(
    source: Mover,
    target: Mover,
    epoch: int = 1,
    edge: int = 3,
    target_dials: bool = False,
    address: str | None = None,
    waits: bool = True,
    num_lanes: int = 1,
) -> tuple[Files, Files]:
    """Open an edge; `address` replaces that of the end that is dialed, as a proxy does."""
    sent, received = Files.of_lanes(num_lanes), Files.of_lanes(num_lanes)
    to_target = target.peer(address if not target_dials else None)
    to_source = source.peer(address if target_dials else None)
    for mover, is_sender, dials, peer, files in (
        (source, True, not target_dials, to_target, sent),
        (target, False, target_dials, to_source, received),
    ):
        command = OpenLinkEdge(epoch, edge, is_sender, dials, peer, num_lanes)
        mover.open(command, files)
    if waits:
        for mover in (source, target):
            mover.wait_for(LinkEdgeOpened)
    return sent, received


def write_step(ring: Ring, step: int, tokens: int, value: int, error: str = "") -> None:
    """Send a step as a worker does; its bytes depend on `value`."""
    if not error:
        size = tokens * ring.shape.hidden_size * ring.shape.itemsize
        begin = ring.payload(step)
        ring.memory[begin : begin + size] = payload_of(value, size)
    ring.signal(step, 0 if error else tokens, error)


def payload_of(value: int, size: int) -> bytes:
    unit = value.to_bytes(8, "little") + b"abcdefgh"
    return (unit * (size // len(unit) + 1))[:size]


def read_step(ring: Ring, step: int, tokens: int) -> bytes:
    """Receive a step as a worker does."""
    ring.wait(step, tokens)
    size = tokens * ring.shape.hidden_size * ring.shape.itemsize
    begin = ring.payload(step)
    return ring.memory[begin : begin + size]
