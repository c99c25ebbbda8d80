"""Messages and events of the agents, passed on to what handles those of this machine's workers."""

import logging
from typing import Protocol

from gllm.messages.codec import AnyMessage, decode_for_head
from gllm.messages.lifecycle import Hello
from gllm.messages.nodes import (
    AssignmentFailed,
    EdgeLost,
    EdgeOpened,
    EngineState,
    StageFrame,
    WorkerExited,
    WorkerFrame,
    WorkerSessionLost,
    WorkerStacks,
)
from gllm.runtime.agent_session import AgentSession
from gllm.runtime.driver_proxies import DriverProxies
from gllm.runtime.node_events import NodeEventHandler
from gllm.runtime.node_group import NodeGroup
from gllm.runtime.node_hub import NodeHub
from gllm.runtime.remote_node import RemoteNode
from gllm.runtime.session import SessionError
from gllm.runtime.worker_channels import WorkerChannels

log = logging.getLogger(__name__)


class WorkerListener(Protocol):
    """Receiver of what the workers of other machines report, and of the state of edges."""

    def on_worker_message(self, sender: int, message: AnyMessage) -> None:
        """Handle a message of a worker."""

    def on_worker_session_lost(self, sender: int, cause: str) -> None:
        """Handle the end of a worker's session."""

    def on_edge_opened(self, generation: int, edge: int) -> None:
        """Handle an edge between nodes that is connected."""

    def on_edge_lost(self, generation: int, edge: int, cause: str) -> None:
        """Handle an edge between nodes that cannot be connected."""


class AgentMessageHandler:
    """Listener of the hub of the nodes, once the engine starts."""

    def __init__(
        self,
        hub: NodeHub,
        nodes: NodeGroup,
        channels: WorkerChannels,
        proxies: DriverProxies,
        events: NodeEventHandler,
        listener: WorkerListener,
    ) -> None:
        """Create the handler.

        Args:
            hub: of the nodes.
            nodes: of the engine.
            channels: to the workers.
            proxies: sessions with the driver in place of other machines' workers.
            events: handles nodes that join, leave or are lost.
            listener: handles the workers' reports.
        """
        self._hub = hub
        self._nodes = nodes
        self._channels = channels
        self._proxies = proxies
        self._events = events
        self._listener = listener
        self._state = EngineState("", "", 0)
        """Latest one that the agents were sent."""

    def add_members(self) -> None:
        """Add the nodes with which the engine starts."""
        for session in self._hub.sessions.values():
            self._nodes.add(RemoteNode(session))
        self._hub.listener = self

    def add_spares(self) -> None:
        """Report the other nodes that have joined, after the start of the engine."""
        for name, session in list(self._hub.sessions.items()):
            if name in self._hub.membership.spares:
                self._events.on_joined(name, session.capacity, [], is_spare=True)

    def publish_state(self, state: str, cause: str, generation: int) -> None:
        """Send the engine's state to all agents, if it has changed."""
        message = EngineState(state, cause, generation)
        if message != self._state:
            self._state = message
            self._hub.broadcast(message)

    def on_node_joined(self, session: AgentSession) -> None:
        """See NodeListener."""
        join, name = session.join, session.name
        self._nodes.add(RemoteNode(session))
        workers = join.workers if join.run == self._hub.run else []
        wanted = self._events.wanted_workers(name, session.capacity, workers, join.is_spare)
        for sender in wanted:
            self._nodes.place(sender, name)
            self._channels.expect_remote(sender, session.send)
            self._channels.on_connected(sender)
        self._hub.welcome(session, wanted)
        session.send(self._state)
        self._events.on_joined(name, session.capacity, wanted, join.is_spare)

    def on_node_message(self, session: AgentSession, message: AnyMessage) -> None:
        """See NodeListener."""
        remote = self._nodes.remotes.get(session.name)
        if remote is None or remote.session is not session:
            self._channels.drop()
            return
        match message:
            case WorkerFrame():
                self._on_worker_frame(remote, message)
            case StageFrame() if message.sender in remote.workers:
                self._proxies.on_frame(message)
            case WorkerExited(sender, description, stacks) if sender in remote.workers:
                remote.on_exited(sender, description, stacks)
            case WorkerStacks(sender, stacks):
                remote.on_stacks(sender, stacks)
            case WorkerSessionLost(sender, cause) if sender in remote.workers:
                self._listener.on_worker_session_lost(sender, cause)
            case AssignmentFailed(generation, cause):
                cause = f"node {session.name} could not assign the stages: {cause}"
                self._events.on_generation_failed(generation, cause)
            case EdgeOpened(generation, edge):
                self._listener.on_edge_opened(generation, edge)
            case EdgeLost(generation, edge, cause):
                self._listener.on_edge_lost(generation, edge, cause)
            case _:
                # About a worker that is gone, or is none of this node.
                self._channels.drop()

    def on_node_lost(
        self, session: AgentSession, cause: str, is_death: bool, has_left: bool
    ) -> None:
        """See NodeListener."""
        remote = self._nodes.remotes.get(session.name)
        if remote is None or remote.session is not session:
            return
        self._nodes.remove(remote)
        for sender in remote.workers:
            self._proxies.forget(sender)
        cause = f"node {session.name} was lost: {cause}"
        if has_left:
            self._events.on_left(session.name, cause)
        else:
            self._events.on_lost(session.name, cause, is_death)

    def _on_worker_frame(self, remote: RemoteNode, frame: WorkerFrame) -> None:
        """Handle a worker's message; one that it may not send ends the session of its node."""
        if frame.sender not in remote.workers or not self._channels.accepts(frame):
            if frame.sender not in remote.workers:
                self._channels.drop()
            return
        try:
            message = decode_for_head(frame.payload)
        except Exception as error:
            raise SessionError(f"no message that a worker may send: {error}") from error
        if isinstance(message, Hello) and message.sender != frame.sender:
            raise SessionError(f"worker {frame.sender} sent the Hello of {message.sender}")
        self._listener.on_worker_message(frame.sender, message)
