"""Agent of a machine other than the head's: runs its part of an engine's workers.

It has one session with the head at a time. Losing that costs no process and no weights: the agent
closes its stage instances, dials again and offers the workers that it has. This module imports no
torch.
"""

import asyncio
import logging
import secrets
from collections.abc import Callable
from pathlib import Path

import msgspec
import zmq

from gllm.messages import nodes
from gllm.messages.codec import AnyMessage
from gllm.options.addresses import Resolve, resolve_host
from gllm.options.exit_status import UNAVAILABLE_STATUS
from gllm.recovery.clock_offset import ClockOffset
from gllm.recovery.departure import Departure
from gllm.runtime.head.link_process import LinkProcess
from gllm.runtime.head.node import Node
from gllm.runtime.messaging.owned_context import create_context
from gllm.runtime.node.agent_workers import AgentWorkers
from gllm.runtime.node.head_session import AgentConfig as AgentConfig
from gllm.runtime.node.head_session import AgentStatus as AgentStatus
from gllm.runtime.node.head_session import FindModel as FindModel
from gllm.runtime.node.head_session import HeadDialer, NodeReading

log = logging.getLogger(__name__)

SERVING_STATES = frozenset({"ready", "sleeping", "draining"})
"""States of an engine in which a member without a stage is a spare."""


class Agent:
    """Runs workers of a multi-node engine on this machine, as commanded by the head machine.

    It joins the engine, reports heartbeats, and reconnects when the connection is lost.
    """

    _workers: AgentWorkers
    _finished: "asyncio.Future[tuple[int, str]]"
    """Exit status and its cause."""

    def __init__(
        self,
        config: AgentConfig,
        facts: nodes.NodeFacts,
        node: Node,
        links: LinkProcess,
        find_model: FindModel,
        read_load: Callable[[], nodes.NodeLoad] = nodes.NodeLoad,
        resolve: Resolve = resolve_host,
    ) -> None:
        """Create an agent that has not started.

        Args:
            config: membership.
            facts: about this machine; a data port of 0 is replaced by that of `links`.
            node: runs the workers; its `node_name` is the name of the machine.
            links: connects edges to other machines.
            find_model: finds the model on this machine.
            read_load: reads the load of this machine.
            resolve: resolution of host names.

        Raises:
            ValueError: the head's address or the secret file cannot be used.
        """
        self._config = config
        self._facts = facts
        self._node = node
        self._links = links
        self._find_model = find_model
        self._read_load = read_load
        self._dialer = HeadDialer(
            config, resolve, self._make_join, self._on_message, self._read_node
        )
        self._agent = secrets.randbits(63)
        self._engine = nodes.EngineState("", "", 0)
        self._departure = Departure(config.settle_seconds)
        self._end_cause = ""
        self._load = nodes.NodeLoad()
        self._num_sessions = 0
        self._is_running = self._has_ended = False
        self._is_dismissed = False
        """True if the head has ended the membership."""
        self._folder: Path | None = None
        """Folder of the model that was found last."""
        self._model = ("", "")
        """Name and hash of that model."""
        self._preparing: asyncio.Task[None] | None = None
        self._waiting: list[AnyMessage] = []
        """Messages of the head until the workers are prepared."""

    def status(self) -> AgentStatus:
        """Return the present state."""
        clock = self._clock()
        workers = self._workers if self._is_running else None
        is_member = self._dialer.is_member and not self._has_ended
        cause = self._engine.cause if is_member else self._end_cause or self._dialer.cause
        return AgentStatus(
            self._config.name,
            self._config.head,
            self._state,
            cause,
            self._engine.state,
            is_healthy=not self._has_ended,
            is_ready=is_member and self._engine.state == "ready",
            load=self._load,
            num_workers=0 if workers is None else len(workers.living),
            num_sessions=self._num_sessions,
            num_stale_frames=0 if workers is None else workers.num_stale,
            links=list(self._links.links),
            clock_offset_seconds=None if clock is None else clock.seconds,
            round_trip_seconds=None if clock is None else clock.round_trip_seconds,
        )

    @property
    def is_refused_by_master(self) -> bool:
        """True if the peer is the master of a cluster, which has services instead of a model."""
        return self._dialer.is_refused_by_master

    def leave(self, cause: str) -> None:
        """Leave the cluster and end the workers, once no request needs them; `run` then returns 0.

        See `Departure`: if the whole engine ends, its head drains first.
        """
        self._end_cause = self._end_cause or cause
        if not self._is_running:
            return
        loop = asyncio.get_running_loop()
        self._departure.request(loop.time())
        self._check_departure()
        if not self._finished.done():
            log.info("node %s got %s: it stays while the engine drains", self._config.name, cause)
            loop.call_at(self._departure.settles_at, self._check_departure)

    def _check_departure(self) -> None:
        """Leave if that was requested and no request needs this machine any more."""
        now = asyncio.get_running_loop().time()
        has_stages = self._dialer.is_member and self._workers.has_stages
        if self._departure.may_leave(now, has_stages, self._engine.state):
            self._finish(0, self._end_cause)

    async def run(self) -> int:
        """Serve until the membership ends; return the exit status of the process.

        0 after `leave`, or when the head ends the engine; 1 if the engine failed, or no head was
        there for too long; 2 if this machine cannot be a member, such as without the model; 75 if
        its data port is in use.
        """
        self._finished = asyncio.get_running_loop().create_future()
        context = create_context(self)
        self._workers = AgentWorkers(
            context, self._node, self._dialer.send, self._clock, self._config
        )
        self._node.remote_edges = self._links
        self._is_running = True
        if self._end_cause:
            self._finish(0, self._end_cause)
        membership = asyncio.create_task(self._keep_membership(context))
        membership.add_done_callback(self._on_task_done)
        try:
            # Shielded, so that a cancelled task still ends everything below.
            status, cause = await asyncio.shield(self._finished)
        except BaseException:
            self._finish(1, "it was interrupted")
            raise
        finally:
            membership.cancel()
            await self._stop()
            # Closed sockets may still send what is queued, for half a second.
            await asyncio.to_thread(context.term)
        level = logging.ERROR if status else logging.INFO
        if self.is_refused_by_master and self._config.rank is None:
            # The process joins the cluster by another agent.
            level = logging.DEBUG
        log.log(level, "node %s ends: %s", self._config.name, cause)
        return status

    @property
    def _state(self) -> str:
        if self._has_ended:
            return "ended"
        if not self._dialer.is_member:
            return "disconnected" if self._num_sessions else "joining"
        has_stages = self._workers.has_stages
        return "spare" if not has_stages and self._engine.state in SERVING_STATES else "member"

    async def _keep_membership(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        try:
            port = await self._links.listen()
        except OSError as error:
            self._finish(UNAVAILABLE_STATUS, str(error))
            return
        if not self._facts.data_port:
            self._facts = msgspec.structs.replace(self._facts, data_port=port)
        self._finish(*await self._dialer.run(context, self._on_session_lost))

    async def _stop(self) -> None:
        """End the membership, the workers and gllm-link."""
        self._has_ended = True
        status, self._end_cause = self._finished.result()
        self._cancel_preparing()
        if not self._is_dismissed:
            await self._dialer.leave(nodes.LeaveCluster(self._end_cause, status != 0))
        self._dialer.close(self._end_cause)
        await self._workers.stop()
        self._links.close()

    def _finish(self, status: int, cause: str) -> None:
        """End the agent, unless it ends already."""
        if not self._finished.done():
            self._finished.set_result((status, cause))

    def _on_task_done(self, task: "asyncio.Task[None]") -> None:
        """End the agent after an error that nothing handles."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("the agent failed", exc_info=error)
            self._finish(1, f"the agent failed: {type(error).__name__}: {error}")

    def _make_join(self) -> nodes.JoinCluster:
        config, workers = self._config, self._workers
        return nodes.JoinCluster(
            nodes.PROTOCOL,
            config.name,
            self._agent,
            config.rank,
            config.is_spare,
            config.model_hash,
            b"" if config.rank is None else config.engine_config,
            self._facts,
            workers.idle,
            workers.run,
        )

    def _read_node(self) -> NodeReading:
        self._load = self._read_load()
        return NodeReading(self._workers.sample(), self._load, list(self._links.links))

    def _clock(self) -> ClockOffset | None:
        session = self._dialer.session
        return None if session is None else session.clock

    async def _on_session_lost(self) -> None:
        """Close the stages; processes and weights stay."""
        self._cancel_preparing()
        self._engine = nodes.EngineState("", "", 0)
        self._check_departure()
        await self._workers.close_stages()

    def _cancel_preparing(self) -> None:
        self._waiting.clear()
        if self._preparing is not None:
            self._preparing.cancel()
            self._preparing = None

    def _on_message(self, message: AnyMessage) -> None:
        if self._has_ended:
            return
        match message:
            case nodes.WelcomeNode():
                self._on_welcome(message)
            case nodes.EngineState():
                self._on_engine_state(message)
            case nodes.LeaveCluster(cause, is_failure):
                self._is_dismissed = True
                self._finish(int(is_failure), f"the head ends this node: {cause}")
            case _ if self._preparing is not None:
                self._waiting.append(message)
            case _:
                self._handle(message)

    def _on_welcome(self, welcome: nodes.WelcomeNode) -> None:
        self._num_sessions += 1
        log.info("node %s is a member of the engine at %s", self._config.name, self._config.head)
        self._links.begin_run(
            welcome.run,
            lambda epoch, edge: self._dialer.send(nodes.EdgeOpened(epoch, edge)),
            lambda epoch, edge, cause: self._dialer.send(nodes.EdgeLost(epoch, edge, cause)),
        )
        self._preparing = asyncio.create_task(self._prepare(welcome))
        self._preparing.add_done_callback(self._on_task_done)

    async def _prepare(self, welcome: nodes.WelcomeNode) -> None:
        """Prepare workers and model, then handle the messages that have arrived meanwhile."""
        await self._workers.begin_session(welcome.run, welcome.workers)
        model = welcome.model, welcome.model_hash
        if self._folder is None or model != self._model:
            try:
                self._folder = await asyncio.to_thread(self._find_model, *model)
            except (OSError, ValueError) as error:
                self._finish(2, f"the model {welcome.model!r} is not available here: {error}")
                return
            self._model = model
        self._preparing = None
        waiting, self._waiting = self._waiting, []
        for message in waiting:
            self._handle(message)

    def _on_engine_state(self, message: nodes.EngineState) -> None:
        if message.state != self._engine.state:
            cause = f": {message.cause}" if message.cause else ""
            log.info("the engine is %s%s", message.state, cause)
        self._engine = message
        self._check_departure()

    def _handle(self, message: AnyMessage) -> None:
        """Handle a command or a frame of the head."""
        workers = self._workers
        match message:
            case nodes.WorkerFrame():
                workers.deliver(message)
            case nodes.StageFrame():
                workers.deliver_to_stage(message)
            case nodes.StartWorker():
                workers.start(message)
            case nodes.EndWorker(sender):
                self._node.kill(sender)
            case nodes.DumpStacks(sender):
                workers.dump_stacks(sender)
            case nodes.AssignStages():
                assert self._folder is not None, "the model was found"
                workers.assign(message, self._folder)
            case nodes.EpochReady(epoch) if epoch == workers.epoch:
                self._node.on_epoch_ready()
            case nodes.OpenKvMachine():
                workers.open_kv(message)
            case nodes.RestartKvMover(epoch) if epoch == workers.epoch:
                workers.restart_kv()
