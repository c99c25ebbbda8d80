"""Nodes of other machines, the edges between nodes, and all nodes of an engine as one object."""

import asyncio
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from msgspec.structs import replace

from gllm.messages.base import WireMessage
from gllm.messages.nodes import (
    AssignStages,
    DumpStacks,
    EndWorker,
    EpochReady,
    LinkState,
    StartWorker,
)
from gllm.messages.reports import LinkTime, LinkTimes
from gllm.options.addresses import format_host_port
from gllm.recovery.liveness import ProcessSample
from gllm.recovery.placement import LOCAL_NODE, Placement, source_dials
from gllm.runtime.driver.driver_relay import DriverProxies
from gllm.runtime.head.assignment import (
    KvMoverConnection,
    NodeAssignment,
    StageAssignment,
    WorkerIdentity,
    encode_node_assignment,
)
from gllm.runtime.head.node import Node, OnExit
from gllm.runtime.head.node_hub import AgentSession
from gllm.transport.link.commands import LinkPeer

SILENT_SECONDS = 2.5
"""Time without a heartbeat after which the state of a node's workers is unknown."""

REPEAT_SECONDS = 60.0
"""Time in which two losses of edges between the same nodes are no coincidence."""

NodePair = tuple[str, str]
"""Names of the nodes that send and receive."""


REPORT_SECONDS = 1.0
"""Interval of reading the measurements; machines report theirs once per second."""


MIN_CHANGE = 0.02
"""Relative change of a bandwidth or round trip from which it is reported to the driver."""


class EdgeGate:
    """Tracks which connections between machines are not open yet; serving waits for all of them.

    It also detects pairs of machines whose connection is lost repeatedly. "Edge" is the connection
    from one stage's worker to the next stage's; only edges between machines count here.
    """

    def __init__(self) -> None:
        self._epoch = 0
        self._pairs: dict[int, NodePair] = {}
        """Nodes of the edges between nodes, by the edge's number."""
        self._missing: set[int] = set()
        self._lost: set[int] = set()
        """Edges of the epoch that were lost; both ends report it."""
        self._losses: dict[NodePair, deque[float]] = {}
        """Times of the last two losses."""

    @property
    def is_open(self) -> bool:
        """True if all edges between nodes are connected."""
        return not self._missing

    @property
    def missing_pairs(self) -> list[NodePair]:
        """Nodes of the edges that are not connected."""
        return [self._pairs[edge] for edge in sorted(self._missing)]

    def has_end(self, edge: int, node: str) -> bool:
        """Return True if an edge of the epoch begins or ends on a node."""
        return node in self._pairs.get(edge, ())

    def begin(self, placement: Placement) -> None:
        """Start to wait for the edges of an epoch."""
        self._epoch = placement.epoch
        self._pairs = remote_edges(placement)
        self._missing = set(self._pairs)
        self._lost.clear()

    def on_opened(self, epoch: int, edge: int) -> bool:
        """Handle the report that an edge is connected; return True if it was the last one."""
        if epoch != self._epoch or edge not in self._missing:
            return False
        self._missing.discard(edge)
        return self.is_open

    def on_lost(self, epoch: int, edge: int, now: float) -> tuple[NodePair, bool] | None:
        """Handle the loss of an edge.

        Returns:
            Its nodes, and True if edges between them were lost twice within REPEAT_SECONDS. None if
            it is no edge of the present epoch, or was lost before.
        """
        if epoch != self._epoch or edge not in self._pairs or edge in self._lost:
            return None
        self._lost.add(edge)
        pair = self._pairs[edge]
        losses = self._losses.setdefault(pair, deque(maxlen=2))
        losses.append(now)
        return pair, len(losses) == 2 and losses[1] - losses[0] <= REPEAT_SECONDS


def remote_edges(placement: Placement) -> dict[int, NodePair]:
    """Return the pair of machines of each connection between stages on different machines.

    Returns:
        Names of the sending and the receiving machine, by the connection's number.
    """
    nodes = placement.nodes
    return {
        edge.number: pair
        for edge in placement.edges
        if (pair := (nodes[edge.source_place], nodes[edge.target_place]))[0] != pair[1]
    }


class LinkTimesReporter:
    """Sends the driver measured round trips and bandwidths between stages when they change."""

    def __init__(
        self,
        read: Callable[[], LinkTimes | None],
        send: Callable[[WireMessage], None],
        report_seconds: float = REPORT_SECONDS,
    ) -> None:
        """Start, on the running event loop.

        Args:
            read: returns the present times; None while no driver can use them.
            send: sends a message to the driver of the present epoch.
            report_seconds: time between two looks at the measurements.
        """
        self._read = read
        self._send = send
        self._report_seconds = report_seconds
        self._sent: LinkTimes | None = None
        """Times that the present driver has."""
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(self._report_seconds, self._report)

    def close(self) -> None:
        """Stop the reports."""
        self._timer.cancel()

    def _report(self) -> None:
        self._timer = self._loop.call_later(self._report_seconds, self._report)
        times = self._read()
        if times is None:
            self._sent = None
        elif self._sent is None or _differ(times, self._sent):
            self._sent = times
            self._send(times)


def collect_link_times(
    placement: Placement,
    links: Mapping[str, Sequence[LinkState]],
    round_trips: Mapping[str, float | None],
) -> LinkTimes | None:
    """Return round trips and bandwidths between stages, and round trips to the driver.

    If several workers of two stages are connected, the slowest connection counts.

    Args:
        placement: assignment of the stages' workers to machines.
        links: measurements of the data connections that each machine has reported, by its name.
        round_trips: seconds between the head and each other machine; None before the first
            heartbeats.

    Returns:
        The times; None while a round trip is unknown.
    """
    nodes = [placement.workers_of(stage)[0].node for stage in range(placement.num_stages)]
    ways = [0.0 if node == LOCAL_NODE else round_trips.get(node) for node in nodes]
    pairs = remote_edges(placement)
    times = [LinkTime() for _ in nodes[1:]]
    for edge in placement.edges:
        if edge.number not in pairs:
            continue
        sent = [
            state
            for state in links.get(pairs[edge.number][0], ())
            if state.edge == edge.number and state.is_open
        ]
        if not sent or sent[0].round_trip_seconds is None:
            return None
        # A rate is known once messages have filled the link; before that it limits nothing.
        before = times[edge.source]
        rates = [rate for rate in (sent[0].bytes_per_second, before.bytes_per_second) if rate]
        min_rates = [sent[0].min_bytes_per_second or 0.0]
        if before.min_bytes_per_second is not None:
            min_rates.append(before.min_bytes_per_second)
        times[edge.source] = LinkTime(
            min(rates, default=None),
            max(sent[0].round_trip_seconds, before.round_trip_seconds),
            min(min_rates),
        )
    driver_round_trips = []
    for node, way in zip(nodes, ways, strict=True):
        # Messages between the driver and other machines pass through the head.
        if way is None or ways[0] is None:
            return None
        driver_round_trips.append(0.0 if node == nodes[0] else ways[0] + way)
    return LinkTimes(times, driver_round_trips)


def _differ(new: LinkTimes, old: LinkTimes) -> bool:
    """Return True if a time has changed by MIN_CHANGE, or belongs to another pipeline."""
    values, before = _flatten(new), _flatten(old)
    if len(values) != len(before):
        return True
    return any(abs(a - b) > MIN_CHANGE * b for a, b in zip(values, before, strict=True))


def _flatten(times: LinkTimes) -> list[float]:
    rates = [link.bytes_per_second or 0.0 for link in times.links]
    rates += [link.min_bytes_per_second or 0.0 for link in times.links]
    return [*rates, *(link.round_trip_seconds for link in times.links), *times.driver_round_trips]


class RemoteNode:
    """Controls the workers of another machine, by messages to its agent process."""

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
        """Report exits of workers from now on; needs a running event loop."""
        self._on_exit = on_exit

    def spawn(self, identity: WorkerIdentity) -> None:
        """Command the agent to start a worker.

        The address of the worker's hub is the agent's.
        """
        logs = identity.logs
        self.session.send(StartWorker(identity.sender, logs.level, logs.format))

    def kill(self, sender: int) -> None:
        """Command the agent to kill a worker."""
        self.session.send(EndWorker(sender))

    def sample(self, sender: int) -> ProcessSample | None:
        """Return the state of a worker's process in the agent's last heartbeat; None if unknown."""
        return self.session.sample(sender)

    def dump_stacks(self, sender: int) -> None:
        """Command the agent to request the stacks of a worker."""
        self.session.send(DumpStacks(sender))

    def read_stacks(self, sender: int) -> str:
        """Return the thread stacks of a worker that the agent has reported."""
        return self._stacks.get(sender, "")

    def on_stacks(self, sender: int, stacks: str) -> None:
        """Store the stacks of a worker that the agent reports."""
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
        """Send the agent the assignment of its workers."""
        epoch = assignment.placement.epoch
        self.session.send(AssignStages(epoch, encode_node_assignment(assignment)))


class NodeGroup(Node):
    """Machines of a multi-node engine; forwards each call to the machine that runs the worker.

    It has the same interface as one machine (`Node`).
    """

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
        """Report exits of workers from now on; needs a running event loop."""
        self._on_exit = on_exit
        self.local.watch(on_exit)

    def connect_kv_mover(self, connection: KvMoverConnection) -> None:
        """Send the driver, which runs on this machine, its end of a channel for KV transfers."""
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
        """Assign a new worker to a machine; return the remote machine, None for this one.

        Raises:
            OSError: the machine is lost.
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
        """Remove a worker that has exited."""
        if remote := self._nodes.pop(sender, None):
            remote.forget(sender)
            if self.proxies is not None:
                self.proxies.forget(sender)

    def is_silent(self, sender: int) -> bool:
        """Return True if a worker's state is unknown: its node sends no heartbeats."""
        remote = self._nodes.get(sender)
        return remote is not None and remote.is_silent

    def spawn(self, identity: WorkerIdentity) -> None:
        """Start a worker on the machine that `place` has assigned, by default on this one."""
        self._node_of(identity.sender).spawn(identity)

    def kill(self, sender: int) -> None:
        """Kill a worker on its node; the exit is reported as every other exit."""
        self._node_of(sender).kill(sender)

    def sample(self, sender: int) -> ProcessSample | None:
        """Return the state of a worker's process; None if it has exited or is unknown."""
        return self._node_of(sender).sample(sender)

    def dump_stacks(self, sender: int) -> None:
        """Make a worker write the stacks of its threads, to be read with `read_stacks`."""
        self._node_of(sender).dump_stacks(sender)

    def read_stacks(self, sender: int) -> str:
        """Return the stacks that a worker has written, also after a crash within `on_exit`."""
        return self._node_of(sender).read_stacks(sender)

    async def stop(self) -> None:
        """Wait until the workers have exited after the shutdown message; kill late workers.

        Agents end their own workers.
        """
        await self.local.stop()
        if self.proxies is not None:
            self.proxies.close()

    def prepare(self, assignment: NodeAssignment, folder: Path, node: str | None = None) -> None:
        """Let this machine's workers measure their speed, or load layers while their stage serves.

        Machines that are lost meanwhile are left out.
        """
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
        """Send each worker of all machines its stage, with new edges and driver's address."""
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
        """Remove the driver's addresses on all machines, because all workers have connected."""
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
