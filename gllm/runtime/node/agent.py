"""Agent of a machine other than the head's: runs its part of an engine's workers.

It has one session with the head at a time. Losing that costs no process and no weights: the agent
closes its stage instances, dials again and offers the workers that it has. This module imports no
torch.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import zmq

from gllm.messages import nodes
from gllm.messages.codec import AnyMessage
from gllm.options.addresses import Resolve, resolve_host
from gllm.options.exit_status import UNAVAILABLE_STATUS
from gllm.recovery.departure import Departure
from gllm.runtime.head.link_process import LinkProcess
from gllm.runtime.head.node import Node
from gllm.runtime.node.agent_workers import AgentWorkers
from gllm.runtime.node.head_session import AgentConfig, AgentStatus, FindModel, NodeReading
from gllm.runtime.node.membership import NodeMembership

log = logging.getLogger(__name__)

SERVING_STATES = frozenset({"ready", "sleeping", "draining"})
"""States of an engine in which a member without a stage is a spare."""


class Agent(NodeMembership):
    """Runs workers of a multi-node engine on this machine, as commanded by the head machine.

    It joins the engine, reports heartbeats, and reconnects when the connection is lost.
    """

    _workers: AgentWorkers

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
        super().__init__(config, facts, read_load, resolve)
        self._node = node
        self._links = links
        self._find_model = find_model
        self._engine = nodes.EngineState("", "", 0)
        self._departure = Departure(config.settle_seconds)
        self._folder: Path | None = None
        """Folder of the model that was found last."""
        self._model = ("", "")
        """Name and hash of that model."""
        self._preparing: asyncio.Task[None] | None = None
        self._waiting: list[AnyMessage] = []
        """Messages of the head until the workers are prepared."""

    def status(self) -> AgentStatus:
        """Return the present state."""
        status = super().status()
        return replace(
            status,
            cause=self._engine.cause if self._is_member else status.cause,
            engine_state=self._engine.state,
            is_ready=self._is_member and self._engine.state == "ready",
            num_stale_frames=self._workers.num_stale if self._is_running else 0,
            links=list(self._links.links),
        )

    @property
    def _num_processes(self) -> int:
        return len(self._workers.living) if self._is_running else 0

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

    def _open(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self._workers = AgentWorkers(
            context, self._node, self._dialer.send, self._clock, self._config
        )
        self._node.remote_edges = self._links

    @property
    def _state(self) -> str:
        state = super()._state
        if state != "member" or self._workers.has_stages:
            return state
        return "spare" if self._engine.state in SERVING_STATES else state

    async def _keep_membership(self, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        try:
            port = await self._links.listen()
        except OSError as error:
            self._finish(UNAVAILABLE_STATUS, str(error))
            return
        if not self._facts.data_port:
            self._facts = msgspec.structs.replace(self._facts, data_port=port)
        await super()._keep_membership(context)

    async def _before_leaving(self) -> None:
        self._cancel_preparing()

    async def _after_leaving(self) -> None:
        await self._workers.stop()
        self._links.close()

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

    def _handle(self, message: AnyMessage) -> None:
        if isinstance(message, nodes.EngineState):
            self._on_engine_state(message)
        elif self._preparing is not None:
            self._waiting.append(message)
        else:
            self._execute(message)

    def _on_welcome(self, welcome: nodes.WelcomeNode) -> None:
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
            self._execute(message)

    def _on_engine_state(self, message: nodes.EngineState) -> None:
        if message.state != self._engine.state:
            cause = f": {message.cause}" if message.cause else ""
            log.info("the engine is %s%s", message.state, cause)
        self._engine = message
        self._check_departure()

    def _execute(self, message: AnyMessage) -> None:
        """Execute a command of the head, or deliver a frame."""
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
