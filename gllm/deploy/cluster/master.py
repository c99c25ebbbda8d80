"""Master of a cluster: the sessions with its nodes, and what the table of services decides."""

import asyncio
import logging
import secrets
import time
from dataclasses import dataclass

from gllm.config.cluster import ClusterConfig
from gllm.config.nodes import NodesConfig
from gllm.deploy.cluster.selection import (
    LinkQuality,
    NetworkView,
    NodeCandidate,
    NodeSelection,
    SelectionError,
    select_nodes,
)
from gllm.deploy.cluster.service import Service, ServiceRequest
from gllm.deploy.cluster.service_table import ServiceTable
from gllm.messages.codec import AnyMessage
from gllm.messages.node_report import NodeReport
from gllm.messages.nodes import PROTOCOL
from gllm.messages.services import (
    ServiceNodeKept,
    ServiceProcessExited,
    ServiceProcessStarted,
    ServiceReport,
)
from gllm.options.version import __version__
from gllm.recovery.join_check import JoinFacts
from gllm.recovery.membership import NodeRecord
from gllm.runtime.head.node_hub import AgentSession, NodeHub, report_node

log = logging.getLogger(__name__)

MASTER_NAME = "master"
"""Name that no node may have."""
TICK_SECONDS = 0.25
"""Interval at which restarts and lost nodes are handled."""
STOP_SECONDS = 5.0
"""Time beyond that for running requests in which services end when the master stops."""
KEY_BYTES = 32


class UnknownServiceError(Exception):
    """Raised if the cluster has no service (deployed engine) of the requested name."""


class UnknownClusterNodeError(Exception):
    """Raised if the cluster has no node of the requested name."""


class ServiceExistsError(Exception):
    """Raised if the name for a new service (deployed engine) is already in use."""


@dataclass(frozen=True)
class ClusterNode:
    """State of a cluster's node, as GET /nodes returns it: hardware, service, draining or not."""

    report: NodeReport
    num_cores: int
    memory_bytes: int
    """Memory of the host that was available when the node joined."""
    data_port: int
    """Port at which it accepts connections for activations; 0 if it only opens connections."""
    service: str | None
    """Name of the service that it runs a process of; None for none."""
    is_draining: bool
    """True if it leaves the cluster once its processes have ended."""


class Master:
    """Master of a cluster: accepts nodes, and starts, moves and ends engines (services) on them."""

    def __init__(self, config: ClusterConfig, shutdown_seconds: float = 30.0) -> None:
        """Create a master that has not started.

        Args:
            config: address, node secret and timeouts of the cluster.
            shutdown_seconds: drain timeout of a service that is ended.

        Raises:
            ValueError: the address or the secret cannot be used; the message says what to do.
        """
        has_secret = config.node_secret_file is not None
        nodes = NodesConfig(
            node_listen=_listen_address(config.hub, has_secret),
            node_timeout=config.node_timeout,
            max_spares=config.max_nodes,
        )
        facts = JoinFacts(PROTOCOL, __version__, "", "", b"")
        self._hub = NodeHub(
            nodes,
            config.node_secret_file,
            secrets.randbits(63),
            facts,
            MASTER_NAME,
            config.node_return_timeout,
        )
        self._table = ServiceTable(config.node_return_timeout, shutdown_seconds)
        self._shutdown_seconds = shutdown_seconds
        self._links: dict[frozenset[str], LinkQuality] = {}
        """Links that engines of services have measured, by the names of both nodes."""
        self._ticker: asyncio.Task[None] | None = None

    @property
    def address(self) -> str:
        """Address at which nodes join."""
        return self._hub.address

    @property
    def refused_peers(self) -> dict[str, int]:
        """Number of refused connections of nodes by IP address."""
        return self._hub.refused_peers

    def start(self) -> None:
        """Accept nodes. Raises OSError if the address cannot be bound."""
        self._hub.listener = self
        self._hub.start()
        self._ticker = asyncio.create_task(self._tick())

    async def stop(self) -> None:
        """End all services and the memberships of all nodes."""
        for name in list(self._table.services):
            self._table.delete(name)
        self._send_commands()
        deadline = time.monotonic() + self._shutdown_seconds + STOP_SECONDS
        while self._table.processes and self._hub.sessions and time.monotonic() < deadline:
            await asyncio.sleep(TICK_SECONDS / 5)
        if self._ticker is not None:
            self._ticker.cancel()
            await asyncio.gather(self._ticker, return_exceptions=True)
        await self._hub.stop("the master has stopped")

    def deploy(self, request: ServiceRequest) -> Service:
        """Start a service on free nodes.

        Raises:
            ServiceExistsError: the name is taken.
            SelectionError: too few nodes fit.
        """
        if request.name in self._table.services:
            raise ServiceExistsError(
                f"there is a service {request.name!r} already: delete it first, or choose another "
                "name"
            )
        selection = self._select(request)
        key = f"sk-{secrets.token_urlsafe(KEY_BYTES)}"
        service = self._table.deploy(request, selection, key)
        service.created = int(time.time())
        log.info("service %s starts on %s", request.name, ", ".join(selection.nodes))
        self._send_commands()
        return service

    def services(self) -> list[Service]:
        """Return all services in the order of their deployment; the caller must not change them."""
        return list(self._table.services.values())

    def service(self, name: str) -> Service:
        """Return a service, which the caller must not change. Raises UnknownServiceError."""
        if (service := self._table.services.get(name)) is None:
            raise UnknownServiceError(f"there is no service {name!r}: see GET /services")
        return service

    def delete(self, name: str) -> bool:
        """Drain and end a service; return False if there is none of that name."""
        has_service = self._table.delete(name)
        if has_service:
            log.info("service %s is deleted", name)
        self._send_commands()
        return has_service

    def nodes(self) -> list[ClusterNode]:
        """Return the state of all nodes, including lost ones."""
        return [self._cluster_node(record) for record in self._hub.membership.nodes.values()]

    def node(self, name: str) -> ClusterNode:
        """Return the state of a node. Raises UnknownClusterNodeError."""
        record = self._hub.membership.nodes.get(name)
        if record is None:
            raise UnknownClusterNodeError(f"there is no node {name!r}: see GET /nodes")
        return self._cluster_node(record)

    def drain_node(self, name: str) -> ClusterNode:
        """Move the engine of a node to other nodes, then remove the node from the cluster.

        A node that is lost is removed at once.

        Raises:
            UnknownClusterNodeError: there is no such node.
        """
        node = self.node(name)
        self._table.drain_node(name, time.monotonic())
        log.info("node %s leaves the cluster", name)
        self._advance()
        return node

    def on_node_joined(self, session: AgentSession) -> None:
        """Handle a node that has joined; implements NodeListener."""
        join = session.join
        if session.name not in self._table.busy_nodes:
            # It has left before, and joins anew.
            self._table.draining.discard(session.name)
        living = join.workers if join.run == self._hub.run else []
        wanted = self._table.on_node_joined(session.name, living, time.monotonic())
        self._hub.welcome(session, wanted)
        self._advance()

    def on_node_message(self, session: AgentSession, message: AnyMessage) -> None:
        """Handle a message of a node; implements NodeListener."""
        now, number = time.monotonic(), getattr(message, "process", None)
        if number is None or self._table.node_of(number) != session.name:
            # Others may not report about a process.
            return
        match message:
            case ServiceProcessStarted(process, head, url):
                self._table.on_started(process, head, url)
            case ServiceReport(process, reading):
                self._table.on_reading(process, reading, now)
                for link in reading.links:
                    quality = LinkQuality(link.round_trip_seconds, link.bytes_per_second)
                    self._links[frozenset((link.source, link.target))] = quality
            case ServiceNodeKept(process, node, cause):
                log.warning("node %s cannot leave its running engine: %s", node, cause)
                self._table.on_release_refused(process, node)
            case ServiceProcessExited(process, cause):
                self._table.on_exited(process, cause, now)
        self._advance()

    def on_node_lost(
        self, session: AgentSession, cause: str, is_death: bool, has_left: bool
    ) -> None:
        """Handle a node that was lost or has left; implements NodeListener."""
        what = "has left" if has_left else "is lost"
        log.warning("node %s (%s) %s: %s", session.name, session.address, what, cause)
        self._table.on_node_lost(session.name, cause, has_left, time.monotonic())
        if has_left:
            self._forget(session.name)
        self._advance()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            try:
                self._table.tick(time.monotonic())
                self._advance()
            except Exception:
                # The master goes on, whatever happens to a service.
                log.exception("the services could not be checked")

    def _advance(self) -> None:
        """Start services that move, let nodes leave that have no process, send commands."""
        for name in self._table.movable:
            try:
                self._table.resume(name, self._select(self._table.services[name].request))
            except SelectionError as error:
                cause = f"{self._table.services[name].cause}, and no others can run it: {error}"
                self._table.fail(name, cause)
        self._send_commands()
        for name in self._table.draining - self._table.busy_nodes.keys():
            session = self._hub.sessions.get(name)
            if session is None:
                self._forget(name)
            elif session.dismissed_at is None:
                session.dismiss("it was drained")

    def _send_commands(self) -> None:
        commands, self._table.commands = self._table.commands, []
        for node, command in commands:
            if (session := self._hub.sessions.get(node)) is not None:
                session.send(command)

    def _forget(self, name: str) -> None:
        """Remove a node that has left from the list of nodes."""
        self._table.forget_node(name)
        self._hub.membership.forget(name)
        self._hub.sessions_by_name.pop(name, None)
        self._links = {pair: link for pair, link in self._links.items() if name not in pair}

    def _select(self, request: ServiceRequest) -> NodeSelection:
        """Return the nodes of a service. Raises SelectionError."""
        busy = self._table.busy_nodes
        free = [
            session
            for name, session in self._hub.sessions.items()
            if name not in busy and name not in self._table.draining
        ]
        trips = {session.name: session.clock_offset.round_trip_seconds for session in free}
        known = {name: seconds for name, seconds in trips.items() if seconds is not None}
        try:
            return select_nodes(
                map(_candidate, free), request.requirements, NetworkView(known, self._links)
            )
        except SelectionError as error:
            others = [f"{name}: runs service {service}" for name, service in busy.items()]
            raise SelectionError("; ".join([str(error), *others])) from error

    def _cluster_node(self, record: NodeRecord) -> ClusterNode:
        session = self._hub.sessions_by_name.get(record.name)
        facts = None if session is None else session.join.facts
        service = self._table.busy_nodes.get(record.name)
        if record.is_alive:
            self._hub.membership.set_spare(record.name, service is None)
        return ClusterNode(
            report_node(record, session, {}, record.name in self._table.draining),
            0 if facts is None else facts.num_cores,
            0 if facts is None else facts.memory_bytes,
            0 if facts is None else facts.data_port,
            service,
            record.name in self._table.draining,
        )


def _candidate(session: AgentSession) -> NodeCandidate:
    """Return a node as the selection sees it."""
    facts, load = session.join.facts, session.heartbeat.load
    available = load.memory_available_bytes
    return NodeCandidate(
        session.name,
        tuple(facts.devices),
        max(1, facts.num_cores),
        facts.memory_bytes if available is None else available,
        load.cpu_utilization or 0.0,
        bool(facts.data_port or facts.advertised),
    )


def _listen_address(hub: str, has_secret: bool) -> str:
    """Return HOST:PORT of a hub; a port alone is on loopback, or on all addresses with a secret."""
    if hub.isascii() and hub.isdigit():
        return f"{'0.0.0.0' if has_secret else '127.0.0.1'}:{hub}"
    return hub
