"""A server around a fake engine."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from gllm.config.server import ServerConfig
from gllm.frontend.app import make_app
from gllm.frontend.connection import Connection, ConnectionRunner
from gllm.text.chat.template import ChatTemplate
from gllm.text.tokenizer import Tokenizer
from tests.support.http.fake_engine import FakeEngine
from tests.support.http.schema_check import SchemaCheck
from tests.support.http.sse import events_of
from tests.support.text import tokenizers as some

CONFIG = ServerConfig(
    max_choices=8,
    max_num_queued_requests=64,
    max_body_bytes=2**18,
    profile_dir="/profiles",
    allowed_hosts=("x",),  # tests that write requests by hand send `Host: x`
)
CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}]}
TEXT = {"prompt": "Hi"}
CHAT_PATH, TEXT_PATH = "/v1/chat/completions", "/v1/completions"


@dataclass
class Answer:
    """An answer, read to its end."""

    status: int
    json: Any
    headers: Any

    @property
    def error(self) -> Any:
        return self.json["error"]


@dataclass
class Server:
    """The engine, and a client of the server around it."""

    engine: FakeEngine
    client: TestClient
    schemas: SchemaCheck = field(default_factory=SchemaCheck)

    async def post(self, path: str, body: object, **more: Any) -> Answer:
        """Post JSON values, or bytes as they are."""
        given = {"data": body} if isinstance(body, bytes) else {"json": body}
        async with self.client.post(path, **given, **more) as response:
            return Answer(response.status, await response.json(), response.headers)

    async def chat(self, **fields: object) -> Answer:
        return await self.post(CHAT_PATH, {**CHAT, **fields})

    async def complete(self, **fields: object) -> Answer:
        return await self.post(TEXT_PATH, {**TEXT, **fields})

    async def idle(self) -> None:
        """Wait until the engine has nothing to do, which has to be soon."""
        async with asyncio.timeout(5):
            while self.engine.num_requests:
                await asyncio.sleep(0.005)

    @property
    def connections(self) -> list[Connection]:
        """The connections that are open."""
        handler: Any = self.client.server.handler
        opened: list[Connection] = handler.connections
        return opened

    async def stream(self, path: str, **fields: object) -> list[Any]:
        """The events of a stream, `[DONE]` checked and left out."""
        first = CHAT if path == CHAT_PATH else TEXT
        async with self.client.post(path, json={**first, "stream": True, **fields}) as response:
            assert response.status == 200, await response.text()
            assert response.headers["Content-Type"] == "text/event-stream"
            events = events_of(await response.read())
            self.schemas.events(path, events)
            return events


class RealServer(TestServer):
    """A test's server, run as a user's is."""

    def __init__(
        self, engine: FakeEngine, config: ServerConfig, checks_schemas: bool = True
    ) -> None:
        super().__init__(make_app(engine, config))
        self.schemas = SchemaCheck()
        if checks_schemas:
            self.schemas.install(self.app)
        self._config = config

    async def _make_runner(self, **_: Any) -> ConnectionRunner:
        return ConnectionRunner(self.app, self._config)


@asynccontextmanager
async def serving(
    engine: FakeEngine, *, checks_schemas: bool = True, **options: Any
) -> AsyncIterator[Server]:
    """Serve with other options than the usual ones.

    Args:
        engine: Answers the requests.
        checks_schemas: Check that requests and answers fit the OpenAPI document, which takes time
            on the event loop.
        options: Fields of ServerConfig.
    """
    real = RealServer(engine, replace(CONFIG, **options), checks_schemas)
    async with TestClient(real) as client:
        yield Server(engine, client, real.schemas)
    assert real.schemas.complaints == []


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(some.byte_level(), ChatTemplate(some.CHATML, {}))


@pytest.fixture
def engine(tokenizer: Tokenizer) -> FakeEngine:
    return FakeEngine(tokenizer)


@pytest.fixture
async def server(engine: FakeEngine) -> AsyncIterator[Server]:
    async with serving(engine) as made:
        yield made
