"""Head's part of an engine on several machines: the nodes that join, and its own data connections.

This module imports no torch.
"""

import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import zmq

from gllm.config.nodes import BYTES_PER_MBIT, NodesConfig
from gllm.messages.node_report import NodeDrainError, NodeReport, UnknownNodeError
from gllm.messages.nodes import EngineState, NodeFacts
from gllm.messages.reports import LinkTimes
from gllm.options.addresses import format_host_port, is_wildcard
from gllm.recovery.join_check import JoinFacts
from gllm.recovery.liveness import FREEZE_SECONDS
from gllm.recovery.node_layout import distribute_stages
from gllm.recovery.placement import LOCAL_NODE
from gllm.recovery.records import RecoveryState
from gllm.runtime.driver.driver_relay import DriverProxies
from gllm.runtime.head.layer_planner import Machine
from gllm.runtime.head.link_process import LinkProcess
from gllm.runtime.head.node_group import LinkTimesReporter, collect_link_times
from gllm.runtime.head.node_hub import (
    NodeHub,
    configured_threads,
    report_head,
    report_node,
    resolve_hub,
)
from gllm.runtime.messaging.security import NodeCertificate, create_certificate
from gllm.runtime.node.machine import MachineMonitor, read_facts
from gllm.transport.link.commands import LinkPeer

if TYPE_CHECKING:
    from gllm.runtime.head.event_receiver import EventReceiver
    from gllm.runtime.head.supervisor import Supervisor

log = logging.getLogger(__name__)

HEAD_NAME = "head"
"""Name of the head's node without `--node-name`."""


class ClusterHead:
    """Manages the other machines of a multi-node engine, on the head machine.

    It accepts the agents of other machines, connects the stages' data connections, and tracks which
    machines are members, silent or lost.
    """

    def __init__(
        self,
        config: NodesConfig,
        secret_file: str | None,
        facts: JoinFacts,
        degrees: Sequence[int],
        recovery_timeout: float = 60.0,
        make_links: Callable[..., LinkProcess] | None = None,
        freeze_timeout: float = FREEZE_SECONDS,
    ) -> None:
        """Create the head of a cluster without members.

        Args:
            config: configuration of the nodes; `nnodes` and the address are resolved.
            secret_file: file of the node secret; None without encryption, on loopback only.
            facts: facts about this machine, which the agents have to share.
            degrees: ranks of each stage of the engine.
            recovery_timeout: time in seconds after which agents without a head end.
            make_links: creates the data mover of this machine; None for a process.
            freeze_timeout: as in `LinkChild`.

        Raises:
            ValueError: the address, the secret or the number of stages cannot be used.
        """
        self.run = secrets.randbits(64)
        """Number of this start of the head process."""
        self.stage_nodes = distribute_stages(degrees, config.nnodes, config.stages_per_node)
        """Index of the node of each stage at the start, 0 for this one."""
        self._config = config
        self.name = config.node_name or HEAD_NAME
        """Name of this node for people and for other machines; placements have LOCAL_NODE."""
        self.hub = NodeHub(config, secret_file, self.run, facts, self.name, recovery_timeout)
        self._certificate: NodeCertificate | None = None
        self._has_secret = secret_file is not None
        self._make_links = make_links
        self._freeze_timeout = freeze_timeout
        self._links: LinkProcess | None = None
        self._peer = LinkPeer(self.name, "", b"")
        self._supervisor: Supervisor | None = None
        """None until the engine starts."""
        self.published_state = EngineState("", "", 0)
        """Latest one that the agents were sent."""
        self._link_times: LinkTimesReporter | None = None
        self._monitor = MachineMonitor()
        self._facts: NodeFacts | None = None
        self.members: list[str] = []
        """Nodes with which the engine starts."""
        self._is_stopped = False

    async def form(self) -> list[str]:
        """Wait until all nodes have joined; return the name of the node of each stage.

        Raises:
            EngineError: nodes are missing after the time for it; the message names them.
            OSError: an address cannot be bound.
        """
        try:
            await self._open_links()
            self.members = await self.hub.form()
        except BaseException:
            await self.stop("the engine could not start", is_failure=True)
            raise
        names = [LOCAL_NODE, *self.members]
        return [names[node] for node in self.stage_nodes]

    @property
    def machines(self) -> dict[str, Machine]:
        """Hardware of the machines that have joined, by their names in placements."""
        config = self.hub.facts.config
        machines = {
            name: Machine(session.join.facts, configured_threads(config, session.join.config))
            for name, session in self.hub.sessions.items()
        }
        if self._facts is not None:
            machines[LOCAL_NODE] = Machine(self._facts, configured_threads(config))
        return machines

    def begin(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        supervisor: "Supervisor",
        receiver: "EventReceiver",
    ) -> None:
        """Connect the nodes that have joined to an engine that starts.

        Args:
            context: ZeroMQ context of the head's process, for sessions with the driver.
            supervisor: runs the engine's workers.
            receiver: handles messages of the agents, and nodes that join, leave or are lost.
        """
        self._supervisor, group = supervisor, supervisor.group
        assert group is not None
        group.proxies = DriverProxies(context, self.run)
        group.local_peer = self._peer
        if self._links is not None:
            group.local.remote_edges = self._links
            self._links.begin_run(self.run, supervisor.on_edge_opened, receiver.on_edge_lost)
        receiver.add_members()

        def read_link_times() -> LinkTimes | None:
            placement = supervisor.recovery.placement
            if supervisor.recovery.state is not RecoveryState.READY or placement is None:
                return None
            if not placement.has_remote_edges:
                return None
            links = {LOCAL_NODE: [] if self._links is None else self._links.links}
            round_trips = {}
            for name, session in self.hub.sessions.items():
                links[name] = session.heartbeat.links
                round_trips[name] = session.clock_offset.round_trip_seconds
            return collect_link_times(placement, links, round_trips)

        self._link_times = LinkTimesReporter(read_link_times, supervisor.send_to_driver)

    def publish_state(self, state: str, cause: str, epoch: int) -> None:
        """Send the engine's state to all agents, if it has changed."""
        if self._supervisor is None:
            return
        stages, recovery = self._supervisor.node_stages, self._supervisor.recovery
        membership = self.hub.membership
        membership.draining = frozenset(recovery.draining)
        for name, reason in recovery.drain_errors.items():
            membership.note_cause(name, f"it was not drained: {reason}")
        for name in self.hub.sessions if stages else ():
            membership.set_spare(name, name not in stages)
        message = EngineState(state, cause, epoch)
        if message != self.published_state:
            self.published_state = message
            self.hub.broadcast(message)

    def reports(self, stages: Mapping[str, list[int]]) -> list[NodeReport]:
        """Return the state of each node, this one first.

        stages: stages of each node, by its name in placements.
        """
        head = report_head(
            self.name,
            self._facts,
            self._monitor.read(),
            stages.get(LOCAL_NODE, []),
            [] if self._links is None else self._links.links,
        )
        records = self.hub.membership.nodes.values()
        if any(stages.values()):
            for record in records:
                self.hub.membership.set_spare(record.name, not stages.get(record.name))
        return [
            head,
            *(
                report_node(
                    record,
                    self.hub.sessions_by_name.get(record.name),
                    stages,
                    record.name in self.hub.membership.draining,
                )
                for record in records
            ),
        ]

    def drain(self, name: str, check_ready: Callable[[], None]) -> str:
        """Start to move the stages of a machine to other machines; it leaves the engine afterwards.

        Args:
            name: name of the machine.
            check_ready: raises an error unless the engine is ready.

        Raises:
            UnknownNodeError: no machine has the name.
            NodeDrainError: the machine cannot be drained.
        """
        membership, supervisor = self.hub.membership, self._supervisor
        if name == self.name:
            raise NodeDrainError(f"{name} is the head, which has the API: stop the engine instead")
        if name in membership.draining:
            return "draining"
        record = membership.nodes.get(name)
        if record is None and name in membership.drained:
            return "drained"
        if record is None:
            raise UnknownNodeError(f"there is no machine {name!r}: see /nodes")
        check_ready()
        if not record.is_alive:
            # Nothing waits for it, because the engine is ready.
            membership.forget(name)
            return "drained"
        assert supervisor is not None, "an engine that is ready has begun"
        if reason := supervisor.recovery.refuse_drain(name):
            raise NodeDrainError(f"node {name} cannot be drained: {reason}")
        supervisor.execute(supervisor.recovery.drain_node(name, time.monotonic()))
        return "draining"

    @property
    def num_losses(self) -> int:
        """Number of times that a node was lost; a node that was lost twice counts twice."""
        return sum(record.num_losses for record in self.hub.membership.nodes.values())

    @property
    def num_malformed_frames(self) -> int:
        """Frames of other machines that could not be read or that their sender may not send."""
        return self.hub.num_malformed + (0 if self._links is None else self._links.num_malformed)

    @property
    def refused_peers(self) -> dict[str, int]:
        """Refused connections for control and data, by IP address."""
        refused = self.hub.refused_peers
        for address, number in ({} if self._links is None else self._links.refused).items():
            refused[address] = refused.get(address, 0) + number
        return refused

    async def stop(self, cause: str, is_failure: bool = False) -> None:
        """Let the agents leave, and close.

        Args:
            cause: reason for the agents' logs.
            is_failure: True if the agents have to exit with status 1.
        """
        if self._is_stopped:
            return
        self._is_stopped = True
        if self._link_times is not None:
            self._link_times.close()
        await self.hub.stop(cause, is_failure)
        if self._links is not None:
            self._links.close()
        if self._certificate is not None:
            self._certificate.close()

    async def _open_links(self) -> None:
        """Start the data mover, so that its port is known before anybody joins.

        Raises:
            OSError: the port cannot be bound.
        """
        config = self._config
        host, _ = resolve_hub(config)
        if self._has_secret:
            self._certificate = create_certificate()
        listen = format_host_port(host, config.data_port) if config.data_port else ""
        make_links = self._make_links or LinkProcess
        self._links = make_links(
            self.name,
            listen,
            self._certificate,
            config.link_congestion,
            config.node_timeout,
            config.link_policy,
            config.link_encoding,
            self._freeze_timeout,
            min_bytes_per_second=config.link_min_mbit_per_second * BYTES_PER_MBIT,
        )
        port = await self._links.listen() if listen else 0
        if is_wildcard(host) and config.master_addr is not None:
            host, _ = resolve_hub(config, config.master_addr)
        # The others cannot dial a wildcard, so that this machine has to dial them.
        is_dialable = port != 0 and not is_wildcard(host)
        address = config.advertise or (format_host_port(host, port) if is_dialable else "")
        certificate = b"" if self._certificate is None else self._certificate.certificate
        self._peer = LinkPeer(self.name, address, certificate)
        self._facts = read_facts(
            host, port, config.advertise or "", certificate, self._monitor.gpu_names
        )
