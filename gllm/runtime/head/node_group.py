"""Nodes of other machines, and all nodes of an engine as one that hands each worker to its node."""

import time
from pathlib import Path

from msgspec.structs import replace

from gllm.messages.nodes import AssignStages, DumpStacks, EndWorker, EpochReady, StartWorker
from gllm.options.addresses import format_host_port
from gllm.recovery.liveness import ProcessSample
from gllm.recovery.placement import LOCAL_NODE, Placement, source_dials
from gllm.runtime.head.agent_session import AgentSession
from gllm.runtime.head.assignment import (
    KvMoverConnection,
    NodeAssignment,
    StageAssignment,
    WorkerIdentity,
    encode_node_assignment,
)
from gllm.runtime.head.node import Node, OnExit
from gllm.runtime.head.node_edges import remote_edges
from gllm.runtime.worker.driver_proxies import DriverProxies
from gllm.transport.link.commands import LinkPeer

SILENT_SECONDS = 2.5
"""Time without a heartbeat after which the state of a node's workers is unknown."""


class RemoteNode:
    """Workers of a machine whose agent has a session with the head."""

    def __init__(self, session: AgentSession) -> None:
        """Create the node of a session."""
        self.node_name = session.name
        self.session = session
        self.workers: set[int] = set()
        """Senders of the workers that were started and have not exited."""
        self._stacks: dict[int, str] = {}
        """Stacks that workers have written, by sender."""
        self._on_exit: OnExit | None = None

    @property
    def is_silent(self) -> bool:
        """True if the agent has sent nothing for some time."""
        return time.monotonic() - self.session.last_heard > SILENT_SECONDS

    @property
    def peer(self) -> LinkPeer:
        """Data connections of the machine."""
        facts = self.session.join.facts
        address = facts.advertised
        if not address and facts.data_port:
            address = format_host_port(facts.address, facts.data_port)
        return LinkPeer(self.node_name, address, facts.certificate)

    def watch(self, on_exit: OnExit) -> None:
        """See Node."""
        self._on_exit = on_exit

    def spawn(self, identity: WorkerIdentity) -> None:
        """See Node; the address of the worker's hub is the agent's."""
        logs = identity.logs
        self.session.send(StartWorker(identity.sender, logs.level, logs.format))

    def kill(self, sender: int) -> None:
        """See Node."""
        self.session.send(EndWorker(sender))

    def sample(self, sender: int) -> ProcessSample | None:
        """See Node; as of the agent's last heartbeat."""
        return self.session.sample(sender)

    def dump_stacks(self, sender: int) -> None:
        """See Node."""
        self.session.send(DumpStacks(sender))

    def read_stacks(self, sender: int) -> str:
        """See Node; as the agent has reported them."""
        return self._stacks.get(sender, "")

    def on_stacks(self, sender: int, stacks: str) -> None:
        """Keep the stacks that the agent reports of a worker."""
        if stacks and sender in self.workers:
            self._stacks[sender] = stacks

    def on_exited(self, sender: int, description: str, stacks: str) -> None:
        """Report the exit of a worker."""
        self.on_stacks(sender, stacks)
        if self._on_exit is not None:
            self._on_exit(sender, f"{description}, on node {self.node_name}")

    def forget(self, sender: int) -> None:
        """Forget a worker that has exited."""
        self.workers.discard(sender)
        self._stacks.pop(sender, None)

    def assign(self, assignment: NodeAssignment) -> None:
        """Send the agent its part; it knows its own folder of the model."""
        epoch = assignment.placement.epoch
        self.session.send(AssignStages(epoch, encode_node_assignment(assignment)))


class NodeGroup(Node):
    """The head's own node and the nodes of the agents, by name."""

    def __init__(self, local: Node) -> None:
        """Create the group of an engine on this machine.

        local: node of this machine.
        """
        super().__init__()
        self.local = local
        self.kv_memory = local.kv_memory
        self.local_peer = LinkPeer(LOCAL_NODE, "", b"")
        """Data connections of this machine."""
        self.remotes: dict[str, RemoteNode] = {}
        """Nodes of agents that are members, by name."""
        self._nodes: dict[int, RemoteNode] = {}
        """Node of each worker of another machine."""
        self._assigned: list[RemoteNode] = []
        """Nodes of the present epoch."""
        self._epoch = 0
        self.proxies: DriverProxies | None = None
        """Sessions with the driver in place of other nodes' workers; None without such nodes."""
        self._on_exit: OnExit | None = None

    @property
    def num_stale(self) -> int:
        """Messages between the driver and other nodes' workers that arrived late."""
        return 0 if self.proxies is None else self.proxies.num_stale

    def watch(self, on_exit: OnExit) -> None:
        """See Node."""
        self._on_exit = on_exit
        self.local.watch(on_exit)

    def connect_kv_mover(self, connection: KvMoverConnection) -> None:
        """Give the driver, which runs on this machine, its end of a channel to the KV mover."""
        self.local.connect_kv_mover(connection)

    def add(self, remote: RemoteNode) -> None:
        """Add the node of an agent that has joined."""
        self.remotes[remote.node_name] = remote
        if self._on_exit is not None:
            remote.watch(self._on_exit)

    def remove(self, remote: RemoteNode) -> None:
        """Remove the node of an agent that is lost, with its workers."""
        if self.remotes.get(remote.node_name) is remote:
            del self.remotes[remote.node_name]
        for sender in remote.workers:
            self._nodes.pop(sender, None)
            if self.proxies is not None:
                self.proxies.forget(sender)

    def dismiss(self, node: str, cause: str) -> list[int]:
        """End the membership of a node whose stages have ended; return its workers.

        Its agent ends with status 0.
        """
        remote = self.remotes.get(node)
        if remote is None:
            return []
        workers = sorted(remote.workers)
        self.remove(remote)
        remote.session.dismiss(cause)
        return workers

    def place(self, sender: int, node: str) -> RemoteNode | None:
        """Decide on which node a worker runs; return it, None for this machine.

        Raises:
            OSError: the node is lost.
        """
        if node == LOCAL_NODE:
            return None
        remote = self.remotes.get(node)
        if remote is None:
            raise OSError(f"node {node} is lost")
        remote.workers.add(sender)
        self._nodes[sender] = remote
        return remote

    def forget(self, sender: int) -> None:
        """Forget a worker that has exited."""
        if remote := self._nodes.pop(sender, None):
            remote.forget(sender)
            if self.proxies is not None:
                self.proxies.forget(sender)

    def is_silent(self, sender: int) -> bool:
        """Return True if nothing is known of a worker, because its node is silent."""
        remote = self._nodes.get(sender)
        return remote is not None and remote.is_silent

    def spawn(self, identity: WorkerIdentity) -> None:
        """See Node; the worker runs where `place` has put it, by default on this machine."""
        self._node_of(identity.sender).spawn(identity)

    def kill(self, sender: int) -> None:
        """See Node."""
        self._node_of(sender).kill(sender)

    def sample(self, sender: int) -> ProcessSample | None:
        """See Node."""
        return self._node_of(sender).sample(sender)

    def dump_stacks(self, sender: int) -> None:
        """See Node."""
        self._node_of(sender).dump_stacks(sender)

    def read_stacks(self, sender: int) -> str:
        """See Node."""
        return self._node_of(sender).read_stacks(sender)

    async def stop(self) -> None:
        """See Node; agents end their own workers."""
        await self.local.stop()
        if self.proxies is not None:
            self.proxies.close()

    def prepare(self, assignment: NodeAssignment, folder: Path, node: str | None = None) -> None:
        """See Node; machines that are lost meanwhile are left out."""
        self.local.prepare(assignment, folder, node)
        for remote in self._remotes_of(assignment.placement):
            if node in (None, remote.node_name):
                remote.assign(assignment)

    def assign(
        self,
        assignment: NodeAssignment,
        folder: Path,
        plan_record: int | None = None,
        output_lengths: dict[int, list[int]] | None = None,
    ) -> None:
        """See Node."""
        placement = assignment.placement
        self._check_nodes(placement)
        if self.remotes:
            peers = {LOCAL_NODE: self.local_peer}
            peers |= {name: remote.peer for name, remote in self.remotes.items()}
            names = {worker.node for worker in placement.workers}
            peers = {name: peers[name] for name in sorted(names)}
            for source, target in remote_edges(placement).values():
                ends = peers[source], peers[target]
                source_dials(ends[0].node, ends[0].address, ends[1].node, ends[1].address)
            assignment = replace(assignment, peers=peers)
        self.local.assign(assignment, folder, plan_record, output_lengths)
        self._epoch, self._assigned = placement.epoch, self._remotes_of(placement)
        if self.proxies is not None:
            sends = {
                worker.sender: self.remotes[worker.node].session.send
                for worker in placement.workers
                if worker.node != LOCAL_NODE
            }
            self.proxies.begin(placement.epoch, self.local.driver_address, sends)
        for remote in self._assigned:
            remote.assign(assignment)

    def on_epoch_ready(self) -> None:
        """See Node."""
        self.local.on_epoch_ready()
        for remote in self._assigned:
            remote.session.send(EpochReady(self._epoch))

    def _send(self, assignment: StageAssignment) -> None:
        raise AssertionError("each node sends the assignments of its workers")

    def _check_nodes(self, placement: Placement) -> None:
        for worker in placement.workers:
            if worker.node != LOCAL_NODE and worker.node not in self.remotes:
                raise OSError(f"node {worker.node} is lost")

    def _remotes_of(self, placement: Placement) -> list[RemoteNode]:
        names = dict.fromkeys(worker.node for worker in placement.workers)
        return [self.remotes[name] for name in names if name in self.remotes]

    def _node_of(self, sender: int) -> Node | RemoteNode:
        return self._nodes.get(sender, self.local)
