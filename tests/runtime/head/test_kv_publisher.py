"""Published KV cache events: a subscriber rebuilds the cache, lost batches are replayed."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from random import Random
from typing import Any

import pytest
import zmq
import zmq.asyncio

from gllm.config.kv_events import KvEventsConfig
from gllm.runtime.head.kv_events import KvEventPublisher, KvEventSource
from gllm.scheduler.block_pool import chain_hash, root_hash
from tests.support.engines.kv_driver import BLOCK_SIZE, TOKEN, KvDriver
from tests.support.engines.kv_subscriber import Subscriber, request_replay

TOPIC = "kv@127.0.0.1:8000@demo"


class Engine:
    """A driver whose cache is published."""

    def __init__(self, **fields: Any) -> None:
        options: dict[str, Any] = {
            "enable_kv_cache_events": True,
            "endpoint": "tcp://127.0.0.1:0",
            "topic": TOPIC,
        }
        self._source = KvEventSource()
        self.publisher = KvEventPublisher(
            KvEventsConfig(**options | fields), BLOCK_SIZE, self._source
        )
        self.publisher.start()
        self._known: dict[bytes, tuple[str, tuple[int, ...]]] = {}
        """Salt and tokens of every hash that was in the cache ever."""
        self.restart()

    def restart(self) -> None:
        """Begin the next epoch."""
        self._source.detach()
        self.driver = KvDriver(self._source)
        self.driver.attach()

    def run(self, prompt: list[int], max_tokens: int = 1, salt: str = "") -> None:
        """Run a request."""
        self.driver.run(prompt, max_tokens, salt)
        tokens, parent = [*prompt, *[TOKEN] * max_tokens], root_hash(salt)
        for begin in range(0, len(tokens) - BLOCK_SIZE + 1, BLOCK_SIZE):
            end = begin + BLOCK_SIZE
            parent = chain_hash(parent, tokens[begin:end])
            self._known[parent] = salt, tuple(tokens[:end])

    def prefixes(self) -> set[tuple[str, tuple[int, ...]]]:
        """Salt and tokens of what is in the cache."""
        return {self._known[digest] for digest in self.driver.digests}


@pytest.fixture
async def engines() -> AsyncIterator[list[Engine]]:
    """Engines that are stopped after the test."""
    engines: list[Engine] = []
    yield engines
    for engine in engines:
        await engine.publisher.stop()


@pytest.fixture
async def subscriber() -> AsyncIterator[Subscriber]:
    context = zmq.asyncio.Context()
    yield Subscriber(context, TOPIC, BLOCK_SIZE)
    context.destroy(linger=0)


async def join(subscriber: Subscriber, engine: Engine) -> None:
    """Wait until the subscriber gets batches; it begins with an empty cache."""
    async with asyncio.timeout(20):
        while not subscriber.numbers:
            engine.driver.reset()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(subscriber.read(), 0.01)


async def catch_up(subscriber: Subscriber, engine: Engine) -> None:
    """Read all batches."""
    async with asyncio.timeout(20):
        while subscriber.numbers[-1] != engine.publisher.num_batches - 1:
            await subscriber.read()


async def test_a_subscriber_rebuilds_the_cache(
    engines: list[Engine], subscriber: Subscriber
) -> None:
    engine, rng = Engine(), Random(2)
    engines.append(engine)
    subscriber.connect(engine.publisher.endpoint)
    await join(subscriber, engine)
    for turn in range(100):
        prompt = [1] * rng.randrange(20) + [rng.randrange(50) for _ in range(rng.randint(1, 20))]
        engine.run(prompt, rng.randint(1, 10), rng.choice(["", "salt"]))
        if turn % 40 == 20:
            engine.driver.reset()
        if turn % 40 == 39:
            engine.restart()
        if turn % 10 == 0:
            await catch_up(subscriber, engine)
            assert subscriber.prefixes() == engine.prefixes()
    await catch_up(subscriber, engine)
    assert subscriber.prefixes() == engine.prefixes() != set()
    first = subscriber.numbers[0]
    assert subscriber.numbers == list(range(first, first + len(subscriber.numbers)))


async def test_lost_batches_are_replayed(engines: list[Engine], subscriber: Subscriber) -> None:
    engine = Engine(replay_endpoint="tcp://127.0.0.1:0", buffer_steps=100)
    engines.append(engine)
    for token in range(1, 40):
        engine.run([token] * 9, 2, "salt")
    address = engine.publisher.replay_endpoint
    batches = await request_replay(address, (0).to_bytes(8, "big"))
    assert [number for number, _ in batches] == list(range(engine.publisher.num_batches))
    for number, payload in batches:
        subscriber.apply(number, payload)
    assert subscriber.prefixes() == engine.prefixes() != set()
    last = engine.publisher.num_batches - 1
    assert await request_replay(address, last.to_bytes(8, "big")) == batches[-1:]
    assert await request_replay(address, (last + 1).to_bytes(8, "big")) == []
    for token in range(100, 160):
        engine.run([token] * 9)
    kept = await request_replay(address, (0).to_bytes(8, "big"))
    assert len(kept) == 100, "only so many are kept"
    assert kept[-1][0] == engine.publisher.num_batches - 1


async def test_requests_for_replays_that_cannot_be_read_are_ignored(engines: list[Engine]) -> None:
    engine = Engine(replay_endpoint="tcp://127.0.0.1:0")
    engines.append(engine)
    address = engine.publisher.replay_endpoint
    for frames in ([], [b"12"], [b"\xff" * 8, b"more"], [b"x" * 5000]):
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.DEALER)
        socket.connect(address)
        await socket.send_multipart([b"", *frames])
        await asyncio.sleep(0.01)
        context.destroy(linger=0)
    assert len(await request_replay(address, (0).to_bytes(8, "big"))) == 1


async def test_an_engine_connects_to_a_subscriber_with_a_name(
    engines: list[Engine], subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The name of a host that surely has one would be bound.
    monkeypatch.setattr("gllm.runtime.head.kv_events.is_bound", lambda address: False)
    engine = Engine(endpoint=subscriber.bind())
    engines.append(engine)
    await join(subscriber, engine)
    engine.run([1] * 9)
    await catch_up(subscriber, engine)
    assert subscriber.prefixes() == engine.prefixes() != set()


async def test_an_address_in_use_is_an_error(engines: list[Engine]) -> None:
    engines.append(Engine())
    address = engines[0].publisher.endpoint
    with pytest.raises(ValueError, match=f"^endpoint of --kv-events-config: {address}"):
        Engine(endpoint=address)
    with pytest.raises(ValueError, match=r"^replay_endpoint of --kv-events-config"):
        Engine(replay_endpoint=address)
