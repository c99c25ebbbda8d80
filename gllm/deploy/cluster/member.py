"""Membership of a machine in a cluster: a session with its master, and the processes of services.

Unlike the agent of an engine (`gllm.runtime.node.agent`) it has no workers of its own: each process
of a service has them. A lost session costs no process for as long as the master may return.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable

from gllm.deploy.cluster.service_processes import MakeCommand, ServiceMachine, ServiceProcesses
from gllm.messages.codec import AnyMessage, decode_for_service_node
from gllm.messages.nodes import (
    PROTOCOL,
    JoinCluster,
    LeaveCluster,
    NodeFacts,
    NodeLoad,
    WelcomeNode,
)
from gllm.messages.services import DrainServiceNode, EndServiceProcess, StartServiceProcess
from gllm.options.addresses import resolve_host
from gllm.runtime.messaging.owned_context import create_context
from gllm.runtime.node.head_session import AgentConfig, AgentStatus, HeadDialer, NodeReading

log = logging.getLogger(__name__)


class ClusterMember:
    """Membership of this machine in a cluster: runs processes of engines for the master."""

    _finished: "asyncio.Future[tuple[int, str]]"
    """Exit status and its cause."""

    def __init__(
        self,
        config: AgentConfig,
        facts: NodeFacts,
        machine: ServiceMachine,
        read_load: Callable[[], NodeLoad] = NodeLoad,
        make_command: MakeCommand | None = None,
    ) -> None:
        """Create a node that has not started.

        Args:
            config: options of the membership; `head` is the address of the master.
            facts: version, devices and addresses of this machine, announced to the master.
            machine: address and configuration that the processes of services share.
            read_load: returns the current load of this machine.
            make_command: returns program and arguments of a process of a service; None for this
                Python.

        Raises:
            ValueError: the master's address or the secret file cannot be used.
        """
        self._config = config
        self._facts = facts
        self._read_load = read_load
        self._load = NodeLoad()
        self._agent = secrets.randbits(63)
        self._run = 0
        """Run of the master in the last session."""
        self._num_sessions = 0
        self._is_running = self._has_ended = self._is_dismissed = False
        self._end_cause = ""
        self._dialer = HeadDialer(
            config,
            resolve_host,
            self._make_join,
            self._on_message,
            lambda: NodeReading([], self._read(), []),
            decode_for_service_node,
        )
        self._processes = ServiceProcesses(machine, self._dialer.send, make_command)

    def status(self) -> AgentStatus:
        """Return the state of the membership."""
        is_member = self._dialer.is_member and not self._has_ended
        session = self._dialer.session
        clock = None if session is None else session.clock
        if self._has_ended:
            state = "ended"
        elif is_member:
            state = "member"
        else:
            state = "disconnected" if self._num_sessions else "joining"
        return AgentStatus(
            self._config.name,
            self._config.head,
            state,
            "" if is_member else self._end_cause or self._dialer.cause,
            is_healthy=not self._has_ended,
            is_ready=is_member,
            load=self._load,
            num_workers=len(self._processes.living),
            num_sessions=self._num_sessions,
            clock_offset_seconds=None if clock is None else clock.seconds,
            round_trip_seconds=None if clock is None else clock.round_trip_seconds,
        )

    def leave(self, cause: str) -> None:
        """Notify the master and end all processes; `run` then returns 0."""
        if self._is_running:
            self._finish(0, cause)
        else:
            self._end_cause = cause

    async def run(self) -> int:
        """Run until the membership ends; return the exit status of the process.

        0 after `leave`, or when the master ends the membership; 1 if the master was unreachable for
        too long; 2 if this machine cannot be a member.
        """
        self._finished = asyncio.get_running_loop().create_future()
        context = create_context(self)
        self._is_running = True
        if self._end_cause:
            self._finish(0, self._end_cause)
        membership = asyncio.create_task(self._dialer.run(context, self._on_session_lost))
        membership.add_done_callback(self._on_membership_done)
        try:
            status, self._end_cause = await asyncio.shield(self._finished)
        finally:
            self._has_ended = True
            membership.cancel()
            await self._processes.close()
            if not self._is_dismissed:
                await self._dialer.leave(LeaveCluster(self._end_cause or "it was interrupted"))
            self._dialer.close(self._end_cause)
            # Closed sockets may still send what is queued, for half a second.
            await asyncio.to_thread(context.term)
        level = logging.ERROR if status else logging.INFO
        log.log(level, "node %s ends: %s", self._config.name, self._end_cause)
        return status

    def _finish(self, status: int, cause: str) -> None:
        """End the membership, unless it ends already."""
        if not self._finished.done():
            self._finished.set_result((status, cause))

    def _on_membership_done(self, task: "asyncio.Task[tuple[int, str]]") -> None:
        if task.cancelled():
            return
        if (error := task.exception()) is not None:
            log.error("the membership failed", exc_info=error)
            self._finish(1, f"the membership failed: {type(error).__name__}: {error}")
        else:
            self._finish(*task.result())

    def _make_join(self) -> JoinCluster:
        return JoinCluster(
            PROTOCOL,
            self._config.name,
            self._agent,
            None,
            False,
            "",
            b"",
            self._facts,
            self._processes.living,
            self._run,
            runs_services=True,
        )

    def _read(self) -> NodeLoad:
        self._load = self._read_load()
        return self._load

    async def _on_session_lost(self) -> None:
        """Keep the processes: the master may return."""

    def _on_message(self, message: AnyMessage) -> None:
        if self._has_ended:
            return
        match message:
            case WelcomeNode():
                self._num_sessions += 1
                self._run = message.run
                log.info(
                    "node %s is a member of the cluster at %s",
                    self._config.name, self._config.head,
                )  # fmt: skip
                self._processes.kill_all_except(message.workers)
            case LeaveCluster(cause):
                self._is_dismissed = True
                self._finish(0, f"the master ends this node: {cause}")
            case StartServiceProcess():
                self._processes.start(message)
            case DrainServiceNode(number, node):
                self._processes.drain_node(number, node)
            case EndServiceProcess(number):
                self._processes.end(number)
