"""Messages and events of the agents, passed on to what handles those of this machine's workers."""

import logging
import time
from collections.abc import Callable, Sequence

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
from gllm.recovery.placement import LOCAL_NODE
from gllm.runtime.head.action_executor import ActionExecutor
from gllm.runtime.head.agent_session import AgentSession
from gllm.runtime.head.death_handler import DeathHandler
from gllm.runtime.head.edge_gate import REPEAT_SECONDS
from gllm.runtime.head.machine_speeds import Machine
from gllm.runtime.head.node_admission import configured_threads
from gllm.runtime.head.node_events import NodeEventHandler
from gllm.runtime.head.node_hub import NodeHub
from gllm.runtime.head.remote_node import RemoteNode
from gllm.runtime.messaging.session import SessionError

log = logging.getLogger(__name__)


class AgentMessageHandler:
    """Listener of the hub of the nodes, once the engine starts."""

    def __init__(
        self,
        hub: NodeHub,
        executor: ActionExecutor,
        events: NodeEventHandler,
        death_handler: DeathHandler,
        on_messages: Callable[[list[tuple[int, AnyMessage]]], None],
        num_workers: int,
    ) -> None:
        """Create the handler.

        Args:
            hub: of the nodes.
            executor: has the nodes, the channels to the workers and the edges.
            events: handles nodes that join, leave or are lost.
            death_handler: handles workers whose session has ended.
            on_messages: handles messages of workers, with their senders.
            num_workers: of the engine.
        """
        self._hub = hub
        self._executor = executor
        self._nodes = executor.connections.nodes
        self._channels = executor.connections.channels
        self._events = events
        self._death_handler = death_handler
        self._on_messages = on_messages
        self._num_workers = num_workers
        self._state = EngineState("", "", 0)
        """Latest one that the agents were sent."""

    def add_members(self) -> None:
        """Add the nodes with which the engine starts."""
        for session in self._hub.sessions.values():
            self._nodes.add(RemoteNode(session))
        self._hub.listener = self

    def add_spares(self, members: Sequence[str]) -> None:
        """Report the other nodes that have joined, after the start of the engine.

        members: nodes with which it starts; some may have been lost since they joined.
        """
        for name, session in list(self._hub.sessions.items()):
            if name not in members:
                self._on_joined(session, [])
        for name in members:
            if name not in self._hub.sessions:
                self._events.on_lost(name, f"node {name} was lost", is_death=False)

    def publish_state(self, state: str, cause: str, generation: int) -> None:
        """Send the engine's state to all agents, if it has changed."""
        stages, membership = self._events.node_stages, self._hub.membership
        membership.draining = self._events.draining
        for name, reason in self._events.drain_errors.items():
            membership.note_cause(name, f"it was not drained: {reason}")
        for name in self._hub.sessions if stages else ():
            membership.set_spare(name, name not in stages)
        message = EngineState(state, cause, generation)
        if message != self._state:
            self._state = message
            self._hub.broadcast(message)

    def on_node_joined(self, session: AgentSession) -> None:
        """See NodeListener."""
        join, name = session.join, session.name
        self._nodes.add(RemoteNode(session))
        workers = join.workers if join.run == self._hub.run else []
        capacity = session.capacity(self._num_workers)
        wanted = self._events.wanted_workers(name, capacity, workers)
        for sender in wanted:
            self._nodes.place(sender, name)
            self._channels.expect_remote(sender, session.send)
            self._channels.on_connected(sender)
        self._hub.welcome(session, wanted)
        session.send(self._state)
        self._on_joined(session, wanted)

    def _on_joined(
        self, session: AgentSession, workers: Sequence[int], is_spare: bool = False
    ) -> None:
        """Report a node that has joined, with the workers that it keeps."""
        join = session.join
        threads = configured_threads(self._hub.facts.config, join.config)
        self._events.on_joined(
            session.name,
            session.capacity(self._num_workers),
            workers,
            Machine(join.facts, threads),
            join.is_spare or is_spare,
        )

    def on_node_message(self, session: AgentSession, message: AnyMessage) -> None:
        """See NodeListener."""
        remote = self._nodes.remotes.get(session.name)
        if remote is None or remote.session is not session:
            self._channels.drop()
            return
        match message:
            case WorkerFrame():
                self._on_worker_frame(remote, message)
            case StageFrame() if message.sender in remote.workers and self._nodes.proxies:
                self._nodes.proxies.on_frame(message)
            case WorkerExited(sender, description, stacks) if sender in remote.workers:
                remote.on_exited(sender, description, stacks)
            case WorkerStacks(sender, stacks):
                remote.on_stacks(sender, stacks)
            case WorkerSessionLost(sender, cause) if sender in remote.workers:
                self._death_handler.on_session_lost(sender, cause)
            case AssignmentFailed(generation, cause) if self._events.is_preparing(generation):
                self._events.on_preparation_failed(generation, f"node {session.name}: {cause}")
            case AssignmentFailed(generation, cause) if session.name in self._events.node_stages:
                cause = f"node {session.name} could not assign the stages: {cause}"
                self._events.on_generation_failed(generation, cause)
            case EdgeOpened(generation, edge) if self._executor.edges.has_end(edge, session.name):
                self._executor.on_edge_opened(generation, edge)
            case EdgeLost(generation, edge, cause) if self._executor.edges.has_end(
                edge, session.name
            ):
                self.on_edge_lost(generation, edge, cause)
            case _:
                # About a worker or an edge that is gone, or is none of this node.
                self._channels.drop()

    def on_node_lost(
        self, session: AgentSession, cause: str, is_death: bool, has_left: bool
    ) -> None:
        """See NodeListener."""
        remote = self._nodes.remotes.get(session.name)
        if remote is None or remote.session is not session:
            return
        self._nodes.remove(remote)
        node = f"node {session.name} ({session.address})"
        if has_left:
            self._events.on_left(session.name, f"{node} has left: {cause}")
        else:
            self._events.on_lost(session.name, f"{node} was lost: {cause}", is_death)

    def on_edge_lost(self, generation: int, edge: int, cause: str) -> None:
        """Handle an edge between nodes that stays disconnected: the generation ends."""
        lost = self._executor.edges.on_lost(generation, edge, time.monotonic())
        if lost is None:
            return
        (source, target), is_repeated = lost
        name = source if target == LOCAL_NODE else target
        head = self._nodes.local_peer.node
        source, target = (head if each == LOCAL_NODE else each for each in (source, target))
        cause = f"the data connection from node {source} to node {target} was lost: {cause}"
        if is_repeated:
            log.warning(
                "nodes %s and %s have lost their data connection twice within %g seconds: check "
                "the network between them",
                source,
                target,
                REPEAT_SECONDS,
            )
        if not (is_repeated and self._exchange(name, cause)):
            self._events.on_generation_failed(generation, cause)

    def _exchange(self, name: str, cause: str) -> bool:
        """Give the stages of a node that is not lost to spares; return False if there are none.

        It becomes a spare itself. Its workers end, because the spare's are other ones.
        """
        session = self._hub.sessions.get(name)
        if session is None or not set(self._hub.membership.spares) - {name}:
            return False
        log.warning("a spare node takes the stages of node %s", name)
        remote = self._nodes.remotes[name]
        for sender in sorted(remote.workers):
            remote.kill(sender)
        self._nodes.remove(remote)
        self._nodes.add(RemoteNode(session))
        self._events.on_left(name, cause)
        # Not one that gets stages again as soon as possible.
        self._on_joined(session, [], is_spare=True)
        return True

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
        self._on_messages([(frame.sender, message)])
