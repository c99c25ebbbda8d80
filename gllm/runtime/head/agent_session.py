"""Session of the head with the agent of another node, the receiver of its events, and reports."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from msgspec.structs import replace

from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage
from gllm.messages.node_report import NodeReport
from gllm.messages.nodes import (
    JoinCluster,
    LeaveCluster,
    LinkState,
    NodeFacts,
    NodeHeartbeat,
    NodeLoad,
)
from gllm.recovery.clock_offset import ClockOffset
from gllm.recovery.liveness import ProcessSample
from gllm.recovery.membership import NodeRecord


class AgentSession:
    """A node that has joined, and the state that its heartbeats report."""

    def __init__(
        self, sender: int, join: JoinCluster, address: str, send: Callable[[WireMessage], None]
    ) -> None:
        """Create the session of an agent.

        Args:
            sender: number of the session, never used again.
            join: the agent's first message.
            address: the agent's IP address.
            send: queues a message to the agent.
        """
        self.sender = sender
        self.join = join
        self.address = address
        self.last_heard = time.monotonic()
        self.is_open = True
        self.clock_offset = ClockOffset()
        self.dismissed_at: float | None = None
        """Time at which the head has ended the membership; None if it has not."""
        self.heartbeat = NodeHeartbeat(0.0, 0.0, 0.0)
        """Latest one."""
        self._send = send

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.join.name

    def capacity(self, num_workers: int) -> int:
        """Return the number of workers that the node can have, one per GPU.

        num_workers: of the engine; a machine without a GPU can have all of them, with fewer threads
            each.
        """
        facts = self.join.facts
        return len(facts.devices) or max(facts.num_cores, num_workers)

    def send(self, message: WireMessage) -> None:
        """Queue a message; it is dropped if the session has ended."""
        if self.is_open:
            self._send(message)

    def dismiss(self, cause: str) -> None:
        """End the membership of the node; its agent ends the session.

        cause: for the agent's log.
        """
        self.dismissed_at = time.monotonic()
        self.send(LeaveCluster(cause))

    def on_heartbeat(self, heartbeat: NodeHeartbeat, now: float) -> None:
        """Handle a heartbeat of the agent, and answer it."""
        self.heartbeat = heartbeat
        if heartbeat.echo:
            self.clock_offset.on_echo(heartbeat.echo, heartbeat.heard, heartbeat.sent, now)
        self.send(NodeHeartbeat(time.monotonic(), heartbeat.sent, now))

    def sample(self, sender: int) -> ProcessSample | None:
        """Return the state of a worker in the latest heartbeat; None if it has none."""
        samples = self.heartbeat.samples
        found = next((sample for sample in samples if sample.sender == sender), None)
        return None if found is None else ProcessSample(found.is_stopped, found.cpu_seconds)


class NodeListener(Protocol):
    """Receiver of the events of members."""

    def on_node_joined(self, session: AgentSession) -> None:
        """Handle a node that has joined; `NodeHub.welcome` has to be called."""

    def on_node_message(self, session: AgentSession, message: AnyMessage) -> None:
        """Handle a message of a member."""

    def on_node_lost(
        self, session: AgentSession, cause: str, is_death: bool, has_left: bool
    ) -> None:
        """Handle the end of a session.

        Args:
            session: it has ended.
            cause: description.
            is_death: True if the agent has closed the connection without a message, so that its
                process has probably died.
            has_left: True if the agent has ended its membership by itself.
        """


def report_head(
    name: str,
    facts: NodeFacts | None,
    load: NodeLoad,
    stages: Sequence[int],
    links: Sequence[LinkState],
) -> NodeReport:
    """Return the report on the head's own node.

    Args:
        name: of the node.
        facts: of the machine; None if they are not known yet.
        load: of the machine.
        stages: that it computes.
        links: its data connections.
    """
    return NodeReport(
        name,
        "member",
        rank=0,
        host_name="" if facts is None else facts.host_name,
        system="" if facts is None else facts.system,
        version="" if facts is None else facts.version,
        devices=[] if facts is None else facts.devices,
        load=load,
        stages=sorted(stages),
        links=list(links),
    )


def report_node(
    record: NodeRecord,
    session: AgentSession | None,
    stages: Mapping[str, list[int]],
    is_draining: bool = False,
) -> NodeReport:
    """Return the report on another node.

    Args:
        record: of its membership.
        session: its last one, which may have ended.
        stages: of each node, by name.
        is_draining: True if its stages move to other nodes.
    """
    # One that is dismissed has not ended its session yet.
    is_draining = is_draining or (session is not None and session.dismissed_at is not None)
    state = "draining" if is_draining and record.is_alive else record.status.value
    report = NodeReport(
        record.name,
        state,
        rank=record.rank,
        last_cause=record.last_cause,
        num_losses=record.num_losses,
    )
    if session is None:
        return report
    facts = session.join.facts
    report = replace(
        report,
        host_name=facts.host_name,
        system=facts.system,
        version=facts.version,
        address=session.address,
        devices=facts.devices,
    )
    if not session.is_open:
        # Of a node that is lost nothing is known.
        return report
    return replace(
        report,
        load=session.heartbeat.load,
        stages=sorted(stages.get(record.name, [])),
        round_trip_seconds=session.clock_offset.round_trip_seconds,
        clock_offset_seconds=session.clock_offset.seconds,
        links=list(session.heartbeat.links),
    )
