"""A scripted head for agents: a real hub, and what an agent with scripted workers needs."""

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import zmq

from gllm.config.engine import EngineConfig
from gllm.messages.base import WireMessage
from gllm.messages.codec import decode_for_head, decode_for_node_hub, encode
from gllm.messages.lifecycle import Hello
from gllm.messages.nodes import (
    AssignStages,
    JoinCluster,
    NodeFacts,
    NodeHeartbeat,
    NodeLoad,
    StageFrame,
    StartWorker,
    WelcomeNode,
    WorkerFrame,
)
from gllm.recovery.placement import LOCAL_NODE, Placement, RankWorker, make_placement
from gllm.runtime.head.assignment import NodeAssignment, encode_node_assignment
from gllm.runtime.head.link_process import LinkProcess
from gllm.runtime.messaging.bus import Hub
from gllm.runtime.messaging.security import Authenticator, SecretFile
from gllm.runtime.node.agent import Agent
from gllm.runtime.node.head_session import AgentConfig, FindModel
from gllm.transport.edge import Edge
from gllm.transport.link.commands import LinkPeer, OpenLinkEdge
from tests.support.nodes.scripted_node import ScriptedNode

SECONDS = 240
"""Limit of every wait."""
FACTS = NodeFacts("host-b", "Linux", "0", "127.0.0.1", 29601, "", b"", [], 2, 2**33)
M = TypeVar("M")


async def until(condition: Callable[[], Any]) -> Any:
    async with asyncio.timeout(SECONDS):
        while not (value := condition()):
            await asyncio.sleep(0.005)
    return value


class FakeHead:
    """The head's hub; answers as the test says and keeps what arrives."""

    def __init__(self, secret: Path | None = None) -> None:
        self.run = 7001
        self.welcome = WelcomeNode(self.run, "demo", "hash", b"{}", 1.0, 20.0)
        self.answer: Callable[[JoinCluster], WireMessage | None] = lambda join: self.welcome
        self.answers_heartbeats = True
        self.clock_ahead = 0.0
        """Seconds that the head's clock is ahead of the agent's."""
        self.joins: list[JoinCluster] = []
        self.messages: list[Any] = []
        """All but heartbeats and JoinCluster, of all sessions."""
        self.beats: list[NodeHeartbeat] = []
        self.agent = 0
        """Sender of the agent's present session."""
        self.num_lost = 0
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context(1)
        authenticator = None
        if secret is not None:
            authenticator = Authenticator(self._context, SecretFile(secret))
        self.hub = Hub(self._context, 0, decode_for_node_hub, authenticator, max_guests=4)
        bound = self.hub.bind("tcp://127.0.0.1:0")
        self.address = bound.removeprefix("tcp://")
        self.hub.start(self._on_messages, self._on_lost)

    def _on_lost(self, sender: int, cause: str) -> None:
        self.num_lost += 1

    def _on_messages(self, messages: list[tuple[int, Any]]) -> None:
        now = time.monotonic() + self.clock_ahead
        for sender, message in messages:
            match message:
                case Hello():
                    pass
                case JoinCluster():
                    self.agent = sender
                    self.joins.append(message)
                    if (answer := self.answer(message)) is not None:
                        self.send(answer)
                case NodeHeartbeat():
                    self.beats.append(message)
                    if self.answers_heartbeats:
                        self.send(NodeHeartbeat(now, message.sent, now))
                case _:
                    self.messages.append(message)

    def send(self, message: WireMessage) -> None:
        self.hub.send(self.agent, message)

    def send_to_worker(self, sender: int, message: WireMessage, epoch: int) -> None:
        epoch = epoch if message.is_fenced else -1
        self.send(WorkerFrame(sender, epoch, encode(message)))

    def of(self, kind: type[M]) -> list[M]:
        """Messages of a type."""
        return [each for each in self.messages if isinstance(each, kind)]

    def from_worker(self, sender: int, kind: type[M]) -> list[tuple[int, M]]:
        """Epochs and messages of a type in the frames of a worker."""
        frames = [(each, decode_for_head(each.payload)) for each in self.of(WorkerFrame)]
        return [
            (frame.epoch, message)
            for frame, message in frames
            if frame.sender == sender and isinstance(message, kind)
        ]

    def from_stage(self, sender: int) -> list[StageFrame]:
        return [each for each in self.of(StageFrame) if each.sender == sender]

    async def start_workers(self, *senders: int) -> None:
        """Start workers and wait until they have connected."""
        for sender in senders:
            self.send(StartWorker(sender, "warning", "text"))
        for sender in senders:
            await until(partial(self.from_worker, sender, Hello))

    def assign(self, placement: Placement, **fields: Any) -> None:
        config = EngineConfig.from_options("demo", dtype="float32", max_model_len=256)
        assignment = NodeAssignment(placement, config, peers=PEERS, **fields)
        self.send(AssignStages(placement.epoch, encode_node_assignment(assignment)))

    async def close(self) -> None:
        self.hub.close()
        await asyncio.to_thread(self._context.term)


PEERS = {
    LOCAL_NODE: LinkPeer(LOCAL_NODE, "127.0.0.1:1", b""),
    "b": LinkPeer("b", "127.0.0.1:2", b""),
}


def two_stages(epoch: int, sender: int = 2, num_layers: int = 2) -> Placement:
    """Placement with the second stage on node b."""
    layers = [(0, num_layers // 2), (num_layers // 2, num_layers)]
    return make_placement(epoch, layers, [RankWorker(1), RankWorker(sender, "b")])


class RecordingLinks(LinkProcess):
    """Edges to other machines that nobody connects."""

    def __init__(self) -> None:
        super().__init__("b", "")
        self.opened: list[OpenLinkEdge] = []
        self.closed: list[int] = []
        self.run = 0

    def begin_run(self, run: int, on_opened: Any, on_lost: Any) -> None:
        self.run, self.on_opened, self.on_lost = run, on_opened, on_lost

    def open(self, command: OpenLinkEdge, edge: Edge) -> None:
        self.opened.append(command)

    def close_edges(self, epoch: int) -> None:
        self.closed.append(epoch)


class RunningAgent:
    """An agent, by default with scripted workers."""

    def __init__(self, fake: FakeHead, /, node: Any = None, **options: Any) -> None:
        self.node = ScriptedNode() if node is None else node
        self.node.node_name = "b"
        self.folder = Path("folder")
        self.links = RecordingLinks()
        self.lookups: list[tuple[str, str]] = []
        self.find_error: Exception | None = None
        self.find_model: FindModel = lambda name, digest: self.folder
        self.read_load: Callable[[], NodeLoad] = NodeLoad
        options = {
            "head": fake.address,
            "name": "b",
            "rank": 1,
            "join_timeout": 20.0,
            "settle_seconds": 0.0,
            **options,
        }
        self.agent = Agent(
            AgentConfig(**options),
            FACTS,
            self.node,
            self.links,
            self._find_model,
            lambda: self.read_load(),
        )
        self.task = asyncio.create_task(self.agent.run())

    def _find_model(self, name: str, digest: str) -> Path:
        self.lookups.append((name, digest))
        if self.find_error is not None:
            raise self.find_error
        return self.find_model(name, digest)

    @property
    def state(self) -> str:
        return self.agent.status().state

    async def ended(self) -> int:
        """Wait for the end; the exit status."""
        async with asyncio.timeout(SECONDS):
            return await self.task


@contextlib.asynccontextmanager
async def head_and_agent(
    secret: Path | None = None, **options: Any
) -> AsyncIterator[tuple[FakeHead, RunningAgent]]:
    """A head, and an agent that is a member."""
    head = FakeHead(secret)
    path = None if secret is None else str(secret)
    agent = RunningAgent(head, node_secret_file=path, **options)
    try:
        await until(lambda: agent.state == "member" or agent.task.done())
        yield head, agent
    finally:
        agent.agent.leave("the test ends")
        await agent.ended()
        await head.close()
