"""Agents of other nodes without workers: real sessions with the hub of the nodes."""

import asyncio
import secrets
import time
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from gllm.config.nodes import NodesConfig
from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage, decode_for_agent, encode
from gllm.messages.lifecycle import Hello
from gllm.messages.nodes import (
    PROTOCOL,
    JoinCluster,
    LeaveCluster,
    NodeFacts,
    NodeHeartbeat,
    NodeLoad,
    RefuseNode,
    WelcomeNode,
    WorkerSample,
)
from gllm.recovery.join_check import JoinFacts
from gllm.runtime.head.node_hub import NODE_RUN, AgentSession, NodeHub, NodeHubTimes
from gllm.runtime.messaging.bus import Spoke
from gllm.runtime.messaging.security import KeyPair
from gllm.runtime.messaging.session import ANY_EPOCH, SessionSender
from tests.support.network.ports import free_port

RUN = 77
"""Number of the head's start."""
CONFIG = msgspec.json.encode({"model": "demo", "pipeline_parallel_size": 2, "threads": 3})
"""Engine configuration of the head."""
HEAD_FACTS = JoinFacts(PROTOCOL, "1.0", "demo", "hash-of-demo", CONFIG)
DEFAULT_TIMES = NodeHubTimes()
NODE_FACTS = NodeFacts("host", "system", "1.0", "127.0.0.1", 29601, "", b"", [], 2, 10**9)


async def until(condition: Callable[[], object]) -> None:
    """Wait for a condition."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.005)


def make_join(name: str, rank: int | None = 1, **fields: Any) -> JoinCluster:
    """Return the first message of an agent that fits the head."""
    join = JoinCluster(
        PROTOCOL, name, secrets.randbits(62), rank, False, "hash-of-demo", CONFIG, NODE_FACTS
    )
    return msgspec.structs.replace(join, **fields)


class FakeAgent:
    """An agent's session with the head, and the messages that it has received."""

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        address: str,
        keys: KeyPair | None = None,
        join: JoinCluster | None = None,
    ) -> None:
        self.messages: list[AnyMessage] = []
        self.lost: list[str] = []
        self.spoke = Spoke(context, NODE_RUN, secrets.randbits(62), address, decode_for_agent, keys)
        self.spoke.start(self._receive, self.lost.append)
        self._beats: asyncio.Task[None] | None = None
        if join is not None:
            self.spoke.send(join)

    @property
    def is_welcome(self) -> bool:
        return any(isinstance(each, WelcomeNode) for each in self.messages)

    @property
    def refusal(self) -> RefuseNode | None:
        return next((each for each in self.messages if isinstance(each, RefuseNode)), None)

    def of(self, kind: type) -> list[Any]:
        """Return the messages of a class."""
        return [each for each in self.messages if isinstance(each, kind)]

    def send(self, message: WireMessage) -> None:
        self.spoke.send(message)

    def _receive(self, messages: list[AnyMessage]) -> None:
        self.messages.extend(messages)
        for message in messages:
            self.on_message(message)
            if isinstance(message, LeaveCluster):
                asyncio.get_running_loop().call_soon(self.close)

    def on_message(self, message: AnyMessage) -> None:
        """Handle a message; subclasses answer some."""

    def beat(self, samples: list[WorkerSample] | None = None, ahead: float = 0.0) -> None:
        """Send heartbeats until the session ends; the clock is `ahead` of the head's."""

        async def run() -> None:
            while not self.lost:
                beats = self.of(NodeHeartbeat)
                echo = beats[-1].sent if beats else 0.0
                now = time.monotonic() + ahead
                load = NodeLoad(cpu_utilization=0.5)
                self.send(NodeHeartbeat(now, echo, now, samples or [], load))
                await asyncio.sleep(0.02)

        self._beats = asyncio.create_task(run())

    def stop_beating(self) -> None:
        """Fall silent."""
        if self._beats is not None:
            self._beats.cancel()
            self._beats = None

    def close(self) -> None:
        self.stop_beating()
        self.spoke.close()


class RawPeer:
    """A connection to the hub of the nodes that sends messages, and bytes that are none."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], address: str) -> None:
        self._socket = context.socket(zmq.DEALER)
        self._socket.linger = 0
        # As of other peers, its session ends with the connection.
        self._socket.reconnect_ivl = -1
        self._socket.connect(address)
        self._session = SessionSender(NODE_RUN)
        self.send(Hello(secrets.randbits(62)))

    def send(self, message: WireMessage) -> None:
        for frame in self._session.frames(encode(message), ANY_EPOCH):
            self.send_frame(frame)

    def send_frame(self, frame: bytes) -> None:
        self._socket.send(frame)

    def close(self) -> None:
        self._socket.close()


class RecordingListener:
    """Welcomes every node and records what follows."""

    def __init__(self, hub: NodeHub) -> None:
        self.joined: list[str] = []
        self.messages: list[tuple[str, AnyMessage]] = []
        self.lost: list[tuple[str, str, bool, bool]] = []
        self.error: Exception | None = None
        self._hub = hub
        hub.listener = self

    def on_node_joined(self, session: AgentSession) -> None:
        self.joined.append(session.name)
        self._hub.welcome(session, [])

    def on_node_message(self, session: AgentSession, message: AnyMessage) -> None:
        if self.error is not None:
            raise self.error
        self.messages.append((session.name, message))

    def on_node_lost(
        self, session: AgentSession, cause: str, is_death: bool, has_left: bool
    ) -> None:
        self.lost.append((session.name, cause, is_death, has_left))


class HubUnderTest:
    """A hub on a free port of this machine, and its agents."""

    def __init__(
        self,
        secret_file: str | None = None,
        keys: KeyPair | None = None,
        times: NodeHubTimes = DEFAULT_TIMES,
        **options: Any,
    ) -> None:
        defaults: dict[str, Any] = {"nnodes": 2, "master_addr": f"127.0.0.1:{free_port()}"}
        config = NodesConfig(**(defaults | options))
        self.hub = NodeHub(config, secret_file, RUN, HEAD_FACTS, "head", times=times)
        self.context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.keys = keys
        self.agents: list[FakeAgent] = []

    def dial(self, join: JoinCluster | None = None, keys: KeyPair | None = None) -> FakeAgent:
        """Begin the session of an agent."""
        agent = FakeAgent(self.context, self.hub.address, keys or self.keys, join)
        self.agents.append(agent)
        return agent

    async def close(self) -> None:
        for agent in self.agents:
            agent.close()
        await self.hub.stop("the test is over")
        self.context.destroy(linger=0)
