"""Edges to other machines by a `gllm-link` process, which starts with the first of them.

`LinkChild` starts the process and starts it again after an exit. It watches the process as the head
watches workers, and kills one that is frozen. A new process receives the edges of the present epoch
again, because this end stores their descriptors; the workers are not affected, because the rings
stay. This module imports no torch.
"""

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from random import Random
from typing import Protocol

import msgspec

from gllm.config.link_encodings import PLAIN
from gllm.messages.nodes import LinkState
from gllm.observability.child_process import ChildProcess, has_import_failure, module_command
from gllm.pacing.policy_registry import DEFAULT_LINK_POLICY
from gllm.recovery.backoff import Backoff
from gllm.recovery.liveness import FREEZE_SECONDS, FrozenDetector, ProcessSample
from gllm.runtime.messaging.security import NodeCertificate
from gllm.transport.descriptors import DescriptorChannel, DescriptorError, create_channels
from gllm.transport.edge import Edge
from gllm.transport.link import commands

log = logging.getLogger(__name__)

FREEZE_SHARE = 0.5
"""Share of the time for a frozen worker after which gllm-link is replaced: that loses nothing but
the transfers that wait for it, and edges without a connection are lost later."""
_LINK = 0
"""Key of the process in its detector."""
STEADY_SECONDS = 30.0
"""Time after which a process that exits is started again without a long delay."""


class LinkOwner(Protocol):
    """Callbacks of a `LinkChild` for the start, messages and exit of its process."""

    def on_started(self) -> None:
        """Send the process what it needs, because it has started; it has its identity."""

    def on_message(self, message: commands.LinkMessage) -> None:
        """Handle a message of the process."""

    def on_exited(self) -> None:
        """Handle the end of the process: it has been reaped, and is started again later."""

    def on_import_failed(self, cause: str) -> None:
        """Handle the exit of a first process whose modules cannot be imported: no other follows."""


class LinkChild:
    """Starts a `gllm-link` process, which moves data between machines, and restarts it."""

    def __init__(
        self,
        identity: commands.ConfigureLink,
        certificate: NodeCertificate | None,
        owner: LinkOwner,
        freeze_timeout: float = FREEZE_SECONDS,
    ) -> None:
        """Create the owner of a process that has not started.

        Args:
            identity: first message to each process.
            certificate: this machine's certificate, closed by the caller; None without encryption.
            owner: gets the starts, messages and ends.
            freeze_timeout: time in seconds after which a frozen worker is replaced.
        """
        self.num_restarts = 0
        self.identity = identity
        self._certificate = certificate
        self._owner = owner
        self.process: ChildProcess | None = None
        """The process, if it runs."""
        self._channel: DescriptorChannel | None = None
        self._started_at = 0.0
        self._backoff = Backoff(Random())
        self._restart: asyncio.TimerHandle | None = None
        self._listening: asyncio.Future[int] | None = None
        """Port of the process, once it is ready."""
        self._is_closed = False
        self._has_started = False
        """True once a process has sent a message."""
        self._import_failure = ""
        """Exit of the first process, if its modules cannot be imported: no other one is started."""
        self._detector = FrozenDetector(FREEZE_SHARE * freeze_timeout)
        self._check_timer: asyncio.TimerHandle | None = None

    @property
    def is_running(self) -> bool:
        """True while a process runs, so that commands can be sent."""
        return self.process is not None

    def begin_run(self, run: int) -> None:
        """Change the run, the number of the head's start, in the identity of the process."""
        self.identity = msgspec.structs.replace(self.identity, run=run)
        if self.process is not None:
            self._send_identity()

    async def listen(self) -> int:
        """Start the process if it has to listen; return the port that it has bound, 0 for none.

        Raises:
            OSError: it cannot be started or cannot bind.
        """
        if not self.identity.listen:
            return 0
        if self.process is None:
            self._start()
        assert self._listening is not None
        return await asyncio.shield(self._listening)

    def ensure_started(self) -> None:
        """Start the process, unless it runs or is started again soon. Raises OSError."""
        if self.process is None and self._restart is None:
            self._start()

    def send(self, command: commands.LinkCommand, descriptors: Sequence[int] = ()) -> None:
        """Send a command; a process that does not receive it is killed, and started again."""
        assert self._channel is not None
        try:
            self._channel.send(commands.encode_link_message(command), descriptors)
        except DescriptorError as error:
            log.debug("gllm-link cannot be reached: %s", error)
            self.kill()

    def close(self) -> None:
        """End the process, at once; nothing is reported any more."""
        self._is_closed = True
        if self._restart is not None:
            self._restart.cancel()
        if self.process is not None:
            self.kill()
            self._reap()

    def _start(self) -> None:
        """Start a process.

        Raises:
            OSError: it cannot be started, or the modules of the first one cannot be imported.
        """
        if self._import_failure:
            raise OSError(self._import_failure)
        loop = asyncio.get_running_loop()
        if self._restart is not None:
            self._restart.cancel()
            self._restart = None
        self._started_at = loop.time()
        own, inherited = create_channels()
        try:
            self.process = ChildProcess(
                module_command("gllm.transport.link", str(inherited.fileno())),
                pass_fds=[inherited.fileno()],
            )
        except BaseException:
            own.close()
            raise
        finally:
            inherited.close()
        self._channel = own
        self._listening = loop.create_future()
        # An error that no task waits for is logged by `_on_exit`.
        self._listening.add_done_callback(lambda done: done.cancelled() or done.exception())
        self.process.watch(self._on_exit)
        loop.add_reader(own.fileno(), self._read)
        self._detector.watch([_LINK])
        self._check_timer = loop.call_later(self._detector.check_seconds, self._check)
        self._send_identity()
        self._owner.on_started()

    def _check(self) -> None:
        """Kill the process if it is frozen: stopped, or silent without progress of its CPU time."""
        loop = asyncio.get_running_loop()
        self._check_timer = loop.call_later(self._detector.check_seconds, self._check)
        if self.process is None:
            return
        self.send(commands.CheckLink())
        usage = self.process.read_usage()
        samples = {} if usage is None else {_LINK: ProcessSample(*usage)}
        if cause := self._detector.check(samples, loop.time(), is_serving=True).get(_LINK):
            log.warning("gllm-link is frozen and is replaced: %s", cause)
            self.kill()

    def _send_identity(self) -> None:
        certificate = self._certificate
        self.send(self.identity, [] if certificate is None else [certificate.descriptor])

    def kill(self) -> None:
        """Kill the process, if it runs; `LinkOwner.on_exited` and another start follow."""
        if self.process is not None:
            self.process.kill()

    def _read(self) -> None:
        """Handle one message of the process."""
        assert self._channel is not None
        try:
            payload, descriptors = self._channel.receive()
            for descriptor in descriptors:
                os.close(descriptor)
            message = commands.decode_link_message(payload)
        except (DescriptorError, OSError, msgspec.DecodeError) as error:
            asyncio.get_running_loop().remove_reader(self._channel.fileno())
            log.debug("gllm-link is lost: %s", error)
            self.kill()
            return
        self._has_started = True
        if isinstance(message, commands.LinkListening):
            self._on_listening(message.port, message.cause)
        elif isinstance(message, commands.LinkAlive):
            now = asyncio.get_running_loop().time()
            self._detector.on_heartbeat(_LINK, None, 0.0, now)
        else:
            self._owner.on_message(message)

    def _on_listening(self, port: int, cause: str) -> None:
        assert self._listening is not None
        if self._listening.done():
            return
        if cause:
            text = f"the data port {self.identity.listen} cannot be bound: {cause}"
            self._listening.set_exception(OSError(text))
            # Another process tries again later: no peer can connect to this one.
            self.kill()
            return
        self._listening.set_result(port)
        if port:
            # Another process after this one has to be where the other machines expect it.
            prefix, _, _ = self.identity.listen.rpartition(":")
            self.identity = msgspec.structs.replace(self.identity, listen=f"{prefix}:{port}")

    def _on_exit(self) -> None:
        """Start another process after one that has exited."""
        loop = asyncio.get_running_loop()
        cause, listening = self._reap(), self._listening
        if self._is_closed:
            return
        if listening is not None and not listening.done():
            listening.set_exception(OSError(f"{cause} at its start"))
        if not self._has_started and has_import_failure(cause):
            log.error("%s; it is not started again", cause)
            self._import_failure = cause
            self._owner.on_import_failed(cause)
            return
        if loop.time() - self._started_at > STEADY_SECONDS:
            self._backoff.reset()
        delay = self._backoff.next_delay()
        error = None if listening is None or listening.cancelled() else listening.exception()
        log.warning(
            "%s%s; it is started again in %.1f seconds",
            cause,
            "" if error is None else f" ({error})",
            delay,
        )
        self._restart = loop.call_later(delay, self._start_again)
        self._owner.on_exited()

    def _start_again(self) -> None:
        self._restart = None
        self.num_restarts += 1
        try:
            self._start()
        except OSError as error:
            log.warning("gllm-link cannot be started: %s", error)
            loop = asyncio.get_running_loop()
            self._restart = loop.call_later(self._backoff.next_delay(), self._start_again)

    def _reap(self) -> str:
        """Reap the process, which has exited or was killed; return the exit in words."""
        assert self.process is not None
        assert self._channel is not None
        self.process.unwatch()
        if self._check_timer is not None:
            self._check_timer.cancel()
            self._check_timer = None
        asyncio.get_running_loop().remove_reader(self._channel.fileno())
        self._channel.close()
        cause = self.process.describe_exit("gllm-link")
        self.process = self._channel = None
        return cause


class LinkProcess:
    """Connects stages on different machines by TCP, through a `gllm-link` process on this machine.

    It stores which connections are open, and opens them again when the process had to be restarted.
    """

    def __init__(
        self,
        node: str,
        listen: str,
        certificate: NodeCertificate | None = None,
        congestion: str | None = None,
        node_timeout: float = 5.0,
        policy: str = DEFAULT_LINK_POLICY,
        encoding: str = PLAIN,
        freeze_timeout: float = FREEZE_SECONDS,
        min_bytes_per_second: float = 0.0,
    ) -> None:
        """Create the owner of a process that has not started.

        Args:
            node: name of this machine.
            listen: HOST:PORT at which it accepts data connections, port 0 for any; empty for none.
            certificate: this machine's certificate, closed by the caller; None without encryption.
            congestion: congestion control of TCP; None for that of the system.
            node_timeout: seconds, as in `ConfigureLink`.
            policy: order of the steps that wait for a connection, a name of LINK_POLICIES.
            encoding: encoding of activations, a name of LINK_ENCODINGS.
            freeze_timeout: as in `LinkChild`.
            min_bytes_per_second: as in `ConfigureLink`.
        """
        self.links: list[LinkState] = []
        """Data connections, as the process has reported them last."""
        self.refused: dict[str, int] = {}
        """Data connections that were refused, by IP address."""
        self.num_malformed = 0
        """Frames and handshakes that were invalid, over all processes."""
        self._num_malformed_before = 0
        """`num_malformed` when the present process started."""
        identity = commands.ConfigureLink(
            0,
            node,
            listen,
            certificate is not None,
            congestion,
            policy,
            encoding,
            node_timeout,
            min_bytes_per_second=min_bytes_per_second,
        )
        self._child = LinkChild(identity, certificate, self, freeze_timeout)
        self._on_opened: Callable[[int, int], None] = lambda epoch, edge: None
        self._on_lost: Callable[[int, int, str], None] = lambda epoch, edge, cause: None
        self._edges: dict[tuple[int, int], tuple[commands.OpenLinkEdge, list[int]]] = {}
        """Open edges by epoch and number: the command and own descriptors."""

    @property
    def process(self) -> ChildProcess | None:
        """The process, if it runs."""
        return self._child.process

    @property
    def num_restarts(self) -> int:
        """Starts after the first one."""
        return self._child.num_restarts

    def begin_run(
        self,
        run: int,
        on_opened: Callable[[int, int], None],
        on_lost: Callable[[int, int, str], None],
    ) -> None:
        """Change the run, the number of the head's start; close the edges of an earlier run.

        Args:
            run: number of the head's start.
            on_opened: called with epoch and number of an edge that is connected and whose
                receiving end is here; again after a restart of the process.
            on_lost: called with epoch and number of an edge that cannot be connected, and the
                cause.
        """
        self._on_opened, self._on_lost = on_opened, on_lost
        if run != self._child.identity.run:
            self._close_descriptors(list(self._edges))
            self._child.begin_run(run)

    async def listen(self) -> int:
        """Start the process if it has to listen; return the port that it has bound, 0 for none.

        Raises:
            OSError: it cannot be started or cannot bind.
        """
        return await self._child.listen()

    def open(self, command: commands.OpenLinkEdge, edge: Edge) -> None:
        """Connect this machine's end of an edge; the caller closes its descriptors afterwards.

        Raises:
            OSError: the system has no process or descriptor left.
        """
        key = command.epoch, command.edge
        descriptors: list[int] = []
        try:
            descriptors.extend(os.dup(descriptor) for descriptor in edge.descriptors)
            self._child.ensure_started()
        except BaseException:
            for descriptor in descriptors:
                os.close(descriptor)
            raise
        self._edges[key] = command, descriptors
        if self._child.is_running:
            self._child.send(command, descriptors)

    def close_edges(self, epoch: int) -> None:
        """Close the edges of an epoch and of all earlier epochs."""
        ended = [key for key in self._edges if key[0] <= epoch]
        self._close_descriptors(ended)
        if ended and self._child.is_running:
            self._child.send(commands.CloseLinkEdges(epoch))

    def close(self) -> None:
        """End the process, at once; nothing is reported any more."""
        self._close_descriptors(list(self._edges))
        self._child.close()
        self.links = []

    def on_started(self) -> None:
        """Open all edges again in a gllm-link process that has started."""
        self._num_malformed_before = self.num_malformed
        for command, descriptors in self._edges.values():
            self._child.send(command, descriptors)

    def on_message(self, message: commands.LinkMessage) -> None:
        """Handle a report of gllm-link on edges and connections."""
        match message:
            case commands.LinkEdgeOpened(epoch, edge):
                opened = self._edges.get((epoch, edge))
                if opened is not None and not opened[0].is_sender:
                    self._on_opened(epoch, edge)
            case commands.LinkEdgeLost(epoch, edge, cause):
                if (epoch, edge) in self._edges:
                    self._on_lost(epoch, edge, cause)
            case commands.LinkReport():
                self.links, self.refused = message.links, message.refused
                self.num_malformed = self._num_malformed_before + message.num_malformed

    def on_exited(self) -> None:
        """Forget the states of the connections, because gllm-link has exited."""
        self.links = []

    def on_import_failed(self, cause: str) -> None:
        """Report all open edges as lost, because gllm-link cannot be started."""
        for epoch, edge in list(self._edges):
            self._on_lost(epoch, edge, cause)

    def _close_descriptors(self, keys: list[tuple[int, int]]) -> None:
        """Forget edges."""
        for key in keys:
            for descriptor in self._edges.pop(key)[1]:
                os.close(descriptor)
