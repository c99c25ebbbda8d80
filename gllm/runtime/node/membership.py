"""Membership of a machine: its session with a head or a master, from the start to the end.

`Agent` runs workers of an engine, `gllm.deploy.cluster.member.ClusterMember` processes of services.
"""

import asyncio
import logging
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable

import zmq

from gllm.messages.codec import AnyMessage, decode_for_agent
from gllm.messages.nodes import (
    JoinCluster,
    LeaveCluster,
    NodeFacts,
    NodeLoad,
    WelcomeNode,
)
from gllm.options.addresses import Resolve, resolve_host
from gllm.recovery.clock_offset import ClockOffset
from gllm.runtime.messaging.bus_socket import Decode
from gllm.runtime.messaging.owned_context import create_context
from gllm.runtime.node.head_session import AgentConfig, AgentStatus, HeadDialer, NodeReading

log = logging.getLogger(__name__)


class NodeMembership(ABC):
    """Membership of this machine: joins, stays connected, and leaves when one side ends it.

    Subclasses have the processes that the machine runs as a member.

    Args:
        config: options of the membership; `head` is the address of the head or the master.
        facts: version, devices and addresses of this machine, announced to the peer.
        read_load: returns the current load of this machine.
        resolve: resolution of host names.
        decode: decoder of the messages that the peer may send.

    Raises:
        ValueError: the peer's address or the secret file cannot be used.
    """

    _finished: "asyncio.Future[tuple[int, str]]"
    """Exit status and its cause."""
    _group = "engine"
    """Name in logs of that which the machine joins."""
    _peer = "head"
    """Name in logs of the process that accepts members."""

    def __init__(
        self,
        config: AgentConfig,
        facts: NodeFacts,
        read_load: Callable[[], NodeLoad] = NodeLoad,
        resolve: Resolve = resolve_host,
        decode: Decode = decode_for_agent,
    ) -> None:
        self._config = config
        self._facts = facts
        self._read_load = read_load
        self._load = NodeLoad()
        self._dialer = HeadDialer(
            config, resolve, self._make_join, self._on_message, self._read_node, decode
        )
        self._agent = secrets.randbits(63)
        """Number of this process among those that have had its name."""
        self._num_sessions = 0
        self._is_running = self._has_ended = False
        self._is_dismissed = False
        """True if the peer has ended the membership."""
        self._end_cause = ""

    def status(self) -> AgentStatus:
        """Return the present state."""
        clock = self._clock()
        return AgentStatus(
            self._config.name,
            self._config.head,
            self._state,
            "" if self._is_member else self._end_cause or self._dialer.cause,
            is_healthy=not self._has_ended,
            is_ready=self._is_member,
            load=self._load,
            num_workers=self._num_processes,
            num_sessions=self._num_sessions,
            clock_offset_seconds=None if clock is None else clock.seconds,
            round_trip_seconds=None if clock is None else clock.round_trip_seconds,
        )

    @property
    def is_refused_by_master(self) -> bool:
        """True if the peer is the master of a cluster, which has services instead of a model."""
        return self._dialer.is_refused_by_master

    def leave(self, cause: str) -> None:
        """Notify the peer and end all processes; `run` then returns 0."""
        if self._is_running:
            self._finish(0, cause)
        else:
            self._end_cause = cause

    async def run(self) -> int:
        """Run until the membership ends; return the exit status of the process.

        0 after `leave`, or when the peer ends the membership; 1 if the engine failed, or the peer
        was unreachable for too long; 2 if this machine cannot be a member, such as without the
        model; 75 if its data port is in use.
        """
        self._finished = asyncio.get_running_loop().create_future()
        context = create_context(self)
        self._open(context)
        self._is_running = True
        if self._end_cause:
            self._finish(0, self._end_cause)
        task = asyncio.create_task(self._keep_membership(context))
        task.add_done_callback(self._on_task_done)
        try:
            # Shielded, so that a cancelled task still ends everything below.
            await asyncio.shield(self._finished)
        except BaseException:
            self._finish(1, "it was interrupted")
            raise
        finally:
            task.cancel()
            self._has_ended = True
            status, self._end_cause = self._finished.result()
            await self._before_leaving()
            if not self._is_dismissed:
                await self._dialer.leave(LeaveCluster(self._end_cause, status != 0))
            self._dialer.close(self._end_cause)
            await self._after_leaving()
            # Closed sockets may still send what is queued, for half a second.
            await asyncio.to_thread(context.term)
        level = logging.ERROR if status else logging.INFO
        if self.is_refused_by_master and self._config.rank is None:
            # The process joins the cluster by another membership.
            level = logging.DEBUG
        log.log(level, "node %s ends: %s", self._config.name, self._end_cause)
        return status

    async def _keep_membership(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._finish(*await self._dialer.run(context, self._on_session_lost))

    def _finish(self, status: int, cause: str) -> None:
        """End the membership, unless it ends already."""
        if not self._finished.done():
            self._finished.set_result((status, cause))

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        """End the membership after an error that nothing handles."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the agent failed", exc_info=error)
            self._finish(1, f"the agent failed: {type(error).__name__}: {error}")

    def _on_message(self, message: AnyMessage) -> None:
        if self._has_ended:
            return
        match message:
            case WelcomeNode():
                self._num_sessions += 1
                name, head = self._config.name, self._config.head
                log.info("node %s is a member of the %s at %s", name, self._group, head)
                self._on_welcome(message)
            case LeaveCluster(cause, is_failure):
                self._is_dismissed = True
                self._finish(int(is_failure), f"the {self._peer} ends this node: {cause}")
            case _:
                self._handle(message)

    @property
    def _is_member(self) -> bool:
        return self._dialer.is_member and not self._has_ended

    @property
    def _state(self) -> str:
        """State for `AgentStatus`."""
        if self._has_ended:
            return "ended"
        if not self._dialer.is_member:
            return "disconnected" if self._num_sessions else "joining"
        return "member"

    def _clock(self) -> ClockOffset | None:
        session = self._dialer.session
        return None if session is None else session.clock

    @property
    @abstractmethod
    def _num_processes(self) -> int:
        """Number of processes that the machine runs as a member."""

    @abstractmethod
    def _make_join(self) -> JoinCluster:
        """Return the first message of a session."""

    @abstractmethod
    def _read_node(self) -> NodeReading:
        """Return the state of this machine for a heartbeat, and keep its load."""

    @abstractmethod
    def _on_welcome(self, welcome: WelcomeNode) -> None:
        """Handle the beginning of a session."""

    @abstractmethod
    def _handle(self, message: AnyMessage) -> None:
        """Handle another message of the peer."""

    async def _on_session_lost(self) -> None:  # noqa: B027
        """Handle the end of a session; the peer may return."""

    def _open(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:  # noqa: B027
        """Create what needs the context, before the first attempt to join."""

    async def _before_leaving(self) -> None:  # noqa: B027
        """End what has to end while the peer still listens."""

    async def _after_leaving(self) -> None:  # noqa: B027
        """End the rest, after the session."""
