"""A real master with its HTTP server, and nodes whose processes are scripted."""

import asyncio
import itertools
import secrets
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import zmq
from aiohttp.test_utils import TestClient, TestServer
from jsonschema import Draft202012Validator

from gllm import __version__
from gllm.config.cluster import ClusterConfig
from gllm.config.server import ServerConfig
from gllm.deploy.cluster.master import Master
from gllm.frontend.cluster_server import make_cluster_app
from gllm.frontend.connection import ConnectionRunner
from gllm.frontend.openapi import build_openapi_document
from gllm.frontend.routes.cluster_registry import CLUSTER_ENDPOINTS
from gllm.messages.base import WireMessage
from gllm.messages.codec import AnyMessage, decode_for_service_node
from gllm.messages.nodes import (
    PROTOCOL,
    JoinCluster,
    LeaveCluster,
    NodeFacts,
    NodeHeartbeat,
    NodeLoad,
    RefuseNode,
    WelcomeNode,
)
from gllm.messages.services import (
    EndServiceProcess,
    ServiceProcessExited,
    ServiceProcessStarted,
    ServiceReading,
    ServiceReport,
    StartServiceProcess,
)
from gllm.runtime.head.node_hub import NODE_RUN
from gllm.runtime.messaging.bus import Spoke
from tests.support.network.ports import free_port

FACTS = NodeFacts("host", "Linux 6", __version__, "127.0.0.1", 29601, "", b"", ["GPU X"], 8, 2**33)
LOAD = NodeLoad(0.25, 2**32, [0.5], 150.0, 61.5)
KEY = "key-of-the-cluster"
DOCUMENT = build_openapi_document(CLUSTER_ENDPOINTS)
SECONDS = 30.0
"""Limit of every wait."""


async def until(condition: Callable[[], Any]) -> Any:
    async with asyncio.timeout(SECONDS):
        while not (value := condition()):
            await asyncio.sleep(0.005)
    return value


class ScriptedServiceNode:
    """A node that obeys the master at once, and has no processes."""

    def __init__(self, context: Any, address: str, name: str, **facts: Any) -> None:
        self.name = name
        self.messages: list[AnyMessage] = []
        self.lost: list[str] = []
        self.living: dict[int, StartServiceProcess] = {}
        self.obeys = True
        self._spoke = Spoke(
            context, NODE_RUN, secrets.randbits(62), address, decode_for_service_node
        )
        self._spoke.start(self._receive, self.lost.append)
        own_facts = msgspec.structs.replace(FACTS, **facts)
        self.send(
            JoinCluster(
                PROTOCOL, name, secrets.randbits(62), None, False, "", b"", own_facts,
                runs_services=True,
            )
        )  # fmt: skip
        self._beats = asyncio.create_task(self._beat())

    def of(self, kind: type) -> list[Any]:
        return [each for each in self.messages if isinstance(each, kind)]

    def send(self, message: WireMessage) -> None:
        self._spoke.send(message)

    def report(self, reading: ServiceReading) -> None:
        """Send a reading of each head."""
        for number, command in self.living.items():
            if command.node_rank == 0:
                self.send(ServiceReport(number, reading))

    def exit(self, cause: str) -> None:
        """Let all processes exit."""
        for number in list(self.living):
            del self.living[number]
            self.send(ServiceProcessExited(number, cause))

    def leave(self) -> None:
        self.send(LeaveCluster("a signal"))
        self.close()

    def close(self) -> None:
        self._beats.cancel()
        self._spoke.close()

    def _receive(self, messages: list[AnyMessage]) -> None:
        self.messages += messages
        for message in messages if self.obeys else []:
            match message:
                case StartServiceProcess(number):
                    self.living[number] = message
                    if message.node_rank == 0:
                        self.send(ServiceProcessStarted(number, "1.2.3.4:1", "http://1.2.3.4:2"))
                case EndServiceProcess(number):
                    self.living.pop(number, None)
                    self.send(ServiceProcessExited(number, "it exited with 0"))
                case LeaveCluster():
                    self.close()

    async def _beat(self) -> None:
        for number in itertools.count(1):
            self.send(NodeHeartbeat(float(number), 0.0, 0.0, [], LOAD))
            await asyncio.sleep(0.05)


class ClusterUnderTest:
    """A master, its HTTP server, and its nodes."""

    def __init__(self, master: Master, client: TestClient, context: Any) -> None:
        self.master = master
        self.nodes: dict[str, ScriptedServiceNode] = {}
        self.client = client
        self._context = context

    @property
    def members(self) -> list[str]:
        """Names of the nodes that the master knows."""
        return [each.report.name for each in self.master.nodes()]

    async def join(self, name: str, **facts: Any) -> ScriptedServiceNode:
        node = ScriptedServiceNode(self._context, self.master.address, name, **facts)
        self.nodes[name] = node
        await until(lambda: node.of(WelcomeNode) or node.of(RefuseNode))
        return node

    async def call(
        self, method: str, path: str, body: Any = None, schema: str = "", key: str = KEY
    ) -> tuple[int, Any]:
        """Return status and JSON of a request; the answer has to fit the OpenAPI document."""
        headers = {"Authorization": f"Bearer {key}"} if key else {}
        async with self.client.request(method, path, json=body, headers=headers) as answer:
            value = await answer.json()
            name = schema if answer.status == 200 else "ErrorResponse"
            if name:
                validate(name, value)
            return answer.status, value

    async def deploy(self, name: str = "chat", **fields: Any) -> tuple[int, Any]:
        body = {"service_name": name, "model_name": "demo", **fields}
        return await self.call("POST", "/services", body, "ServiceResponse")

    async def status(self, name: str = "chat") -> Any:
        status, body = await self.call("GET", f"/services/{name}", None, "ServiceResponse")
        return body if status == 200 else body["error"]["code"]

    async def reach(self, state: str, name: str = "chat") -> Any:
        """Wait for a state of a service; its status."""
        async with asyncio.timeout(SECONDS):
            while True:
                body = await self.status(name)
                if (body if isinstance(body, str) else body["state"]) == state:
                    return body
                await asyncio.sleep(0.005)

    async def free_nodes(self) -> set[str]:
        _, body = await self.call("GET", "/nodes", None, "ClusterNodeListResponse")
        return {row["name"] for row in body["nodes"] if row["service"] is None}


def validate(name: str, value: Any) -> None:
    schemas = DOCUMENT["components"]["schemas"]
    reference = {"$ref": f"#/components/schemas/{name}", "components": {"schemas": schemas}}
    Draft202012Validator(reference).validate(value)


class _Server(TestServer):
    """A test's server, run as a user's is."""

    def __init__(self, master: Master, config: ServerConfig) -> None:
        super().__init__(make_cluster_app(master, config))
        self._config = config

    async def _make_runner(self, **_: Any) -> ConnectionRunner:
        return ConnectionRunner(self.app, self._config)


@asynccontextmanager
async def running_cluster(**options: Any) -> AsyncIterator[ClusterUnderTest]:
    hub = f"127.0.0.1:{free_port()}"
    master = Master(ClusterConfig(hub=hub, node_timeout=2.0, **options), 0.0)
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    master.start()
    try:
        async with TestClient(_Server(master, ServerConfig(api_key=(KEY,)))) as client:
            cluster = ClusterUnderTest(master, client, context)
            yield cluster
    finally:
        await master.stop()
        for node in cluster.nodes.values():
            node.close()
        context.destroy(linger=0)
