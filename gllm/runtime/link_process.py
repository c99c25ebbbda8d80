"""Data mover of this machine as a child process: its start, its commands, its end.

The process starts with the first edge to another machine. If it exits it is started again, and gets
the edges of the present generation anew; this end keeps their descriptors for that. The workers
notice nothing, because the rings stay. This module imports no torch.
"""

import asyncio
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from random import Random

import msgspec

from gllm.link.commands import (
    CloseLinkEdges,
    LinkCommand,
    LinkEdgeLost,
    LinkEdgeOpened,
    LinkIdentity,
    LinkListening,
    LinkReport,
    OpenLinkEdge,
    decode_link_message,
    encode_link_message,
)
from gllm.link.encodings import PLAIN
from gllm.messages.nodes import LinkState
from gllm.pacing.policy_registry import DEFAULT_LINK_POLICY
from gllm.runtime.backoff import Backoff
from gllm.runtime.certificates import NodeCertificate
from gllm.transport.descriptors import DescriptorChannel, DescriptorError, create_channels
from gllm.transport.edge import Edge

log = logging.getLogger(__name__)

STEADY_SECONDS = 30.0
"""Time after which a process that exits is started again without a long delay."""


class LinkProcess:
    """Connects edges to other machines by means of a `gllm-link` process."""

    def __init__(
        self,
        node: str,
        listen: str,
        certificate: NodeCertificate | None = None,
        congestion: str | None = None,
        node_timeout: float = 5.0,
        policy: str = DEFAULT_LINK_POLICY,
        encoding: str = PLAIN,
    ) -> None:
        """Create the owner of a process that has not started.

        Args:
            node: name of this machine.
            listen: HOST:PORT at which it accepts data connections, port 0 for any; empty for none.
            certificate: of this machine; None without encryption. It belongs to the caller.
            congestion: congestion control of TCP; None for that of the system.
            node_timeout: in seconds; see LinkIdentity.
            policy: order of the steps that wait for a connection, a name of LINK_POLICIES.
            encoding: of activations, a name of LINK_ENCODINGS.
        """
        self.links: list[LinkState] = []
        """Data connections, as the process has reported them last."""
        self.refused: dict[str, int] = {}
        """Data connections that were refused, by IP address."""
        self.num_malformed = 0
        """Frames and handshakes that were invalid, over all processes."""
        self.num_restarts = 0
        self._num_malformed_before = 0
        """`num_malformed` when the present process started."""
        self._identity = LinkIdentity(
            0, node, listen, certificate is not None, congestion, policy, encoding, node_timeout
        )
        self._certificate = certificate
        self._on_opened: Callable[[int, int], None] = lambda generation, edge: None
        self._on_lost: Callable[[int, int, str], None] = lambda generation, edge, cause: None
        self._edges: dict[tuple[int, int], tuple[OpenLinkEdge, list[int]]] = {}
        """Open edges by generation and number: the command and own descriptors."""
        self._process: subprocess.Popen[bytes] | None = None
        self._channel: DescriptorChannel | None = None
        self._exit_descriptor: int | None = None
        self._started_at = 0.0
        self._backoff = Backoff(Random())
        self._restart: asyncio.TimerHandle | None = None
        self._listening: asyncio.Future[int] | None = None
        """Port of the process, once it is ready."""
        self._is_closed = False

    @property
    def process(self) -> "subprocess.Popen[bytes] | None":
        """The process, if it runs."""
        return self._process

    def begin_run(
        self,
        run: int,
        on_opened: Callable[[int, int], None],
        on_lost: Callable[[int, int, str], None],
    ) -> None:
        """Serve a start of the head from now on; edges of others are closed.

        Args:
            run: number of the head's start.
            on_opened: called with generation and number of an edge that is connected and whose
                receiving end is here; again after a restart of the process.
            on_lost: called with generation and number of an edge that cannot be connected, and the
                cause.
        """
        self._on_opened, self._on_lost = on_opened, on_lost
        if run == self._identity.run:
            return
        self._close_descriptors(list(self._edges))
        self._identity = msgspec.structs.replace(self._identity, run=run)
        if self._process is not None:
            self._send_identity()

    async def listen(self) -> int:
        """Start the process if it has to listen; return the port that it has bound, 0 for none.

        Raises:
            OSError: it cannot be started or cannot bind.
        """
        if not self._identity.listen:
            return 0
        if self._process is None:
            self._start()
        assert self._listening is not None
        return await asyncio.shield(self._listening)

    def open(self, command: OpenLinkEdge, edge: Edge) -> None:
        """See RemoteEdges."""
        key = command.generation, command.edge
        descriptors: list[int] = []
        try:
            descriptors.extend(os.dup(each) for each in edge.descriptors)
            if self._process is None and self._restart is None:
                self._start()
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        self._edges[key] = command, descriptors
        if self._process is not None:
            self._send(command, descriptors)

    def close_edges(self, generation: int) -> None:
        """See RemoteEdges."""
        ended = [key for key in self._edges if key[0] <= generation]
        self._close_descriptors(ended)
        if ended and self._process is not None:
            self._send(CloseLinkEdges(generation))

    def close(self) -> None:
        """End the process, at once; nothing is reported any more."""
        self._is_closed = True
        if self._restart is not None:
            self._restart.cancel()
        self._close_descriptors(list(self._edges))
        if self._process is not None:
            self._kill()
            self._reap()

    def _start(self) -> None:
        """Start a process and send it the open edges. Raises OSError."""
        loop = asyncio.get_running_loop()
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None
        self._started_at = loop.time()
        own, inherited = create_channels()
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "gllm.link", str(inherited.fileno())],
                stdin=subprocess.DEVNULL,
                pass_fds=[inherited.fileno()],
            )
        except BaseException:
            own.close()
            raise
        finally:
            inherited.close()
        self._channel = own
        self._listening = loop.create_future()
        # An error that nobody waits for is logged by `_reap`.
        self._listening.add_done_callback(lambda done: done.cancelled() or done.exception())
        self._num_malformed_before = self.num_malformed
        self._exit_descriptor = os.pidfd_open(self._process.pid)
        loop.add_reader(self._exit_descriptor, self._on_exit)
        loop.add_reader(own.fileno(), self._read)
        self._send_identity()
        for command, descriptors in self._edges.values():
            self._send(command, descriptors)

    def _send_identity(self) -> None:
        certificate = self._certificate
        self._send(self._identity, [] if certificate is None else [certificate.descriptor])

    def _send(self, command: LinkCommand, descriptors: list[int] | None = None) -> None:
        """Send a command; a process that does not receive it is killed, and started again."""
        assert self._channel is not None
        try:
            self._channel.send(encode_link_message(command), descriptors or [])
        except DescriptorError as error:
            log.debug("gllm-link cannot be reached: %s", error)
            self._kill()

    def _kill(self) -> None:
        """End the process; `_on_exit` follows."""
        assert self._process is not None
        with suppress(ProcessLookupError):
            self._process.kill()

    def _read(self) -> None:
        """Handle one message of the process."""
        assert self._channel is not None
        try:
            payload, descriptors = self._channel.receive()
            for descriptor in descriptors:
                os.close(descriptor)
            message = decode_link_message(payload)
        except (DescriptorError, OSError, msgspec.DecodeError) as error:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            log.debug("gllm-link is lost: %s", error)
            self._kill()
            return
        match message:
            case LinkListening(port, cause):
                self._on_listening(port, cause)
            case LinkEdgeOpened(generation, edge):
                opened = self._edges.get((generation, edge))
                if opened is not None and not opened[0].is_sender:
                    self._on_opened(generation, edge)
            case LinkEdgeLost(generation, edge, cause):
                if (generation, edge) in self._edges:
                    self._on_lost(generation, edge, cause)
            case LinkReport():
                self.links, self.refused = message.links, message.refused
                self.num_malformed = self._num_malformed_before + message.num_malformed

    def _on_listening(self, port: int, cause: str) -> None:
        assert self._listening is not None
        if self._listening.done():
            return
        if cause:
            text = f"the data port {self._identity.listen} cannot be bound: {cause}"
            self._listening.set_exception(OSError(text))
            # Another process tries again later: nobody can connect to this one.
            self._kill()
            return
        self._listening.set_result(port)
        if port:
            # Another process after this one has to be where the other machines expect it.
            host, _, _ = self._identity.listen.rpartition(":")
            self._identity = msgspec.structs.replace(self._identity, listen=f"{host}:{port}")

    def _on_exit(self) -> None:
        """Start another process after one that has exited."""
        loop = asyncio.get_running_loop()
        status, listening = self._reap(), self._listening
        if self._is_closed:
            return
        if listening is not None and not listening.done():
            listening.set_exception(OSError(f"gllm-link exited with {status} at its start"))
        if loop.time() - self._started_at > STEADY_SECONDS:
            self._backoff.reset()
        delay = self._backoff.next_delay()
        error = None if listening is None or listening.cancelled() else listening.exception()
        log.warning(
            "gllm-link exited with %s%s; it is started again in %.1f seconds",
            status,
            "" if error is None else f" ({error})",
            delay,
        )
        self._restart = loop.call_later(delay, self._start_again)

    def _start_again(self) -> None:
        self._restart = None
        self.num_restarts += 1
        try:
            self._start()
        except OSError as error:
            log.warning("gllm-link cannot be started: %s", error)
            loop = asyncio.get_running_loop()
            self._restart = loop.call_later(self._backoff.next_delay(), self._start_again)

    def _reap(self) -> int:
        """Reap the process, which has exited or was killed; return its exit status."""
        assert self._process is not None
        assert self._channel is not None
        assert self._exit_descriptor is not None
        loop = asyncio.get_running_loop()
        loop.remove_reader(self._exit_descriptor)
        loop.remove_reader(self._channel.fileno())
        os.close(self._exit_descriptor)
        self._channel.close()
        status = self._process.wait()
        self._process = self._channel = self._exit_descriptor = None
        self.links = []
        return status

    def _close_descriptors(self, keys: list[tuple[int, int]]) -> None:
        """Forget edges."""
        for key in keys:
            for descriptor in self._edges.pop(key)[1]:
                os.close(descriptor)
