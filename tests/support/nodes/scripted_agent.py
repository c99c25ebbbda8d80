"""Agents with scripted workers, and an engine on several machines within the test's process."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import zmq

from gllm.config.engine import EngineConfig
from gllm.config.nodes import NodesConfig
from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage, decode_for_worker, encode
from gllm.messages.lifecycle import (
    CloseEpoch,
    EpochClosed,
    Hello,
    InitializeCache,
    Shutdown,
    StageLoaded,
    StageReady,
)
from gllm.messages.nodes import (
    AssignStages,
    EdgeOpened,
    EndWorker,
    LinkState,
    StageFrame,
    StartWorker,
    WelcomeNode,
    WorkerExited,
    WorkerFrame,
)
from gllm.observability.logs import DEFAULT_LOG_CONFIG
from gllm.recovery.partition import StageCosts
from gllm.recovery.placement import EdgeSpec
from gllm.runtime.head.assignment import NodeAssignment, decode_node_assignment
from gllm.runtime.head.cluster_head import ClusterHead
from gllm.runtime.head.layer_planner import LayerPlanner
from gllm.runtime.head.link_process import LinkProcess
from gllm.runtime.head.node_group import remote_edges
from gllm.runtime.head.supervisor import Supervisor
from tests.support.network.ports import free_port
from tests.support.nodes.fake_agent import HEAD_FACTS, FakeAgent, make_join, until
from tests.support.nodes.scripted_node import ScriptedNode


class ScriptedAgent(FakeAgent):
    """An agent whose workers do what the head commands."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        name: str,
        rank: int | None = None,
        **fields: Any,
    ) -> None:
        self.name = name
        self.workers: set[int] = set()
        """Living workers."""
        self.assignments: list[NodeAssignment] = []
        self.opens_edges = True
        super().__init__(context, address, None, make_join(name, rank, **fields))
        self.beat()

    @property
    def edges(self) -> list[EdgeSpec]:
        """Edges to this node in the latest epoch."""
        placement = self.assignments[-1].placement
        own = {number for number, pair in remote_edges(placement).items() if pair[1] == self.name}
        return [edge for edge in placement.edges if edge.number in own]

    def say(self, sender: int, message: WireMessage) -> None:
        """Send a message of a worker."""
        epoch = self.assignments[-1].placement.epoch if message.is_fenced else -1
        self.send(WorkerFrame(sender, epoch, encode(message)))

    def open_edges(self) -> None:
        """Report that the edges to this node are connected."""
        epoch = self.assignments[-1].placement.epoch
        for edge in self.edges:
            self.send(EdgeOpened(epoch, edge.number))

    def exit(self, sender: int, how: str = "was killed by SIGKILL") -> None:
        """Let a worker exit."""
        if sender in self.workers:
            self.workers.discard(sender)
            self.send(WorkerExited(sender, f"process {sender} {how}", "Thread of a remote worker"))

    def on_message(self, message: AnyMessage) -> None:
        match message:
            case WelcomeNode():
                self.workers = set(message.workers)
            case StartWorker(sender):
                self.workers.add(sender)
                self.say(sender, Hello(sender))
            case EndWorker(sender):
                self.exit(sender)
            case AssignStages(_, content):
                self.assignments.append(decode_node_assignment(content))
                for worker in self.assignments[-1].placement.workers_on(self.name):
                    self.say(worker.sender, StageLoaded(worker.stage, 100, 10))
                if self.opens_edges:
                    self.open_edges()
            case WorkerFrame(sender, _, payload) if sender in self.workers:
                self._on_command(sender, decode_for_worker(payload))

    def _on_command(self, sender: int, message: AnyMessage) -> None:
        match message:
            case InitializeCache():
                placement = self.assignments[-1].placement
                self.send(StageFrame(sender, placement.epoch, b""))
                place = placement.place_of(sender)
                assert place is not None
                self.say(sender, StageReady(place.stage))
            case CloseEpoch():
                self.say(sender, EpochClosed())
            case Shutdown():
                self.exit(sender, "exited with 0")


class FakeLinks(LinkProcess):
    """Data mover of the head that connects nothing."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.links: list[LinkState] = []
        self.refused: dict[str, int] = {}
        self.opened: list[Any] = []

    def begin_run(self, run: int, on_opened: Any, on_lost: Any) -> None:
        pass

    def open(self, command: Any, edge: Any) -> None:
        self.opened.append(command)

    def close_edges(self, epoch: int) -> None:
        pass

    def close(self) -> None:
        pass


class ClusterUnderTest:
    """An engine with scripted workers on this machine and on those of agents."""

    def __init__(self, num_stages: int, nodes: NodesConfig, **options: Any) -> None:
        config = EngineConfig.from_options(
            "demo", pipeline_parallel_size=num_stages, max_model_len=256, layers="even", **options
        )
        layers = [range(stage, stage + 1) for stage in range(num_stages)]
        planner = LayerPlanner(config, layers, StageCosts((1.0,) * num_stages))
        self.supervisor = Supervisor(config, planner, lambda done, total: None, nodes)
        self.cluster = ClusterHead(
            nodes, None, HEAD_FACTS, config.stage_degrees, make_links=FakeLinks
        )
        self.node = ScriptedNode()
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.agents: list[ScriptedAgent] = []
        self.has_started = False
        """True once all agents have joined and the supervisor starts."""

    async def dial(self, name: str, rank: int | None = None, **fields: Any) -> ScriptedAgent:
        """Add an agent."""
        await until(lambda: self.cluster.hub.address)
        agent = ScriptedAgent(self.context, self.cluster.hub.address, name, rank, **fields)
        self.agents.append(agent)
        return agent

    async def start(self) -> None:
        """Wait for the agents and start the engine."""
        names = await self.cluster.form()
        self.has_started = True
        self.supervisor.set_nodes(names, self.cluster.machines)
        await self.supervisor.start(Path("demo"), self.node, DEFAULT_LOG_CONFIG, self.cluster)

    async def close(self) -> None:
        await self.supervisor.stop()
        for agent in self.agents:
            agent.close()
        self.context.destroy(linger=0)


@asynccontextmanager
async def cluster_of(
    num_nodes: int = 2, num_stages: int = 2, **options: Any
) -> AsyncIterator[ClusterUnderTest]:
    """An engine that has not started, and one agent for each node but the first."""
    nodes = NodesConfig(
        nnodes=num_nodes,
        master_addr=f"127.0.0.1:{free_port()}",
        data_port=0,
        **{name: options.pop(name) for name in list(options) if name.startswith("node_")},
    )
    under_test = ClusterUnderTest(num_stages, nodes, **options)
    try:
        yield under_test
    finally:
        if under_test.has_started:
            await under_test.close()
        else:
            await under_test.cluster.stop("the test is over")
