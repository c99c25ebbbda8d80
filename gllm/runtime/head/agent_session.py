"""Session of the head with the agent of another node, and the receiver of its events."""

import time
from collections.abc import Callable
from typing import Protocol

from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage
from gllm.messages.nodes import JoinCluster, LeaveCluster, NodeHeartbeat
from gllm.recovery.clock_offset import ClockOffset
from gllm.recovery.liveness import ProcessSample


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
        found = next((each for each in samples if each.sender == sender), None)
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
