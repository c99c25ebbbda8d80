"""Edges to other machines by a `gllm-link` process, which starts with the first of them.

A process that is started again gets the edges of the present epoch anew; this end keeps their
descriptors for that. The workers notice nothing, because the rings stay. This module imports no
torch.
"""

import os
from collections.abc import Callable

from gllm.config.link_encodings import PLAIN
from gllm.messages.nodes import LinkState
from gllm.observability.child_process import ChildProcess
from gllm.pacing.policy_registry import DEFAULT_LINK_POLICY
from gllm.runtime.head.link_child import LinkChild
from gllm.runtime.messaging.certificates import NodeCertificate
from gllm.transport.edge import Edge
from gllm.transport.link.commands import (
    CloseLinkEdges,
    LinkEdgeLost,
    LinkEdgeOpened,
    LinkIdentity,
    LinkMessage,
    LinkReport,
    OpenLinkEdge,
)


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
        self._num_malformed_before = 0
        """`num_malformed` when the present process started."""
        identity = LinkIdentity(
            0, node, listen, certificate is not None, congestion, policy, encoding, node_timeout
        )
        self._child = LinkChild(identity, certificate, self)
        self._on_opened: Callable[[int, int], None] = lambda epoch, edge: None
        self._on_lost: Callable[[int, int, str], None] = lambda epoch, edge, cause: None
        self._edges: dict[tuple[int, int], tuple[OpenLinkEdge, list[int]]] = {}
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
        """Serve a start of the head from now on; edges of others are closed.

        Args:
            run: number of the head's start.
            on_opened: called with epoch and number of an edge that is connected and whose
                receiving end is here; again after a restart of the process.
            on_lost: called with epoch and number of an edge that cannot be connected, and the
                cause.
        """
        self._on_opened, self._on_lost = on_opened, on_lost
        if run != self._child.run:
            self._close_descriptors(list(self._edges))
            self._child.begin_run(run)

    async def listen(self) -> int:
        """Start the process if it has to listen; return the port that it has bound, 0 for none.

        Raises:
            OSError: it cannot be started or cannot bind.
        """
        return await self._child.listen()

    def open(self, command: OpenLinkEdge, edge: Edge) -> None:
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
        """Close the edges of an epoch and of all earlier ones."""
        ended = [key for key in self._edges if key[0] <= epoch]
        self._close_descriptors(ended)
        if ended and self._child.is_running:
            self._child.send(CloseLinkEdges(epoch))

    def close(self) -> None:
        """End the process, at once; nothing is reported any more."""
        self._close_descriptors(list(self._edges))
        self._child.close()
        self.links = []

    def on_started(self) -> None:
        """See LinkOwner."""
        self._num_malformed_before = self.num_malformed
        for command, descriptors in self._edges.values():
            self._child.send(command, descriptors)

    def on_message(self, message: LinkMessage) -> None:
        """See LinkOwner."""
        match message:
            case LinkEdgeOpened(epoch, edge):
                opened = self._edges.get((epoch, edge))
                if opened is not None and not opened[0].is_sender:
                    self._on_opened(epoch, edge)
            case LinkEdgeLost(epoch, edge, cause):
                if (epoch, edge) in self._edges:
                    self._on_lost(epoch, edge, cause)
            case LinkReport():
                self.links, self.refused = message.links, message.refused
                self.num_malformed = self._num_malformed_before + message.num_malformed

    def on_exited(self) -> None:
        """See LinkOwner."""
        self.links = []

    def _close_descriptors(self, keys: list[tuple[int, int]]) -> None:
        """Forget edges."""
        for key in keys:
            for descriptor in self._edges.pop(key)[1]:
                os.close(descriptor)
