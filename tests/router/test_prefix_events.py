"""The prefix cache of an engine as a router knows it, by events over a real session."""

from functools import partial
from random import Random

from gllm.messages.kv_cache import KvCacheEvents, WatchKvCache
from gllm.routing.prefix_index import PrefixIndex, PromptBlockHashes
from tests.support.engines.kv_driver import BLOCK_SIZE, KvDriver
from tests.support.routing.links import Links, TestRouter, until


class IndexedRouter:
    """The index of a router with one engine."""

    def __init__(self, router: TestRouter) -> None:
        self.index = PrefixIndex()
        self._router = router
        self._num_read = 0

    def num_cached_blocks(self, prompt: list[int], cache_salt: str = "") -> int:
        """Return the blocks of a prompt that the engine has cached, after the latest events."""
        messages = self._router.messages[self._num_read :]
        self._num_read += len(messages)
        for message in messages:
            if isinstance(message, KvCacheEvents):
                stored = [digest for blocks in message.stored for digest in blocks.digests]
                assert all(not blocks.token_ids for blocks in message.stored)
                assert self.index.on_events(
                    "one", message.number, stored, message.removed, message.is_cleared
                )
        hashes = PromptBlockHashes(prompt, BLOCK_SIZE, cache_salt)
        return self.index.cached_blocks(hashes).get("one", 0)

    def has_one_block(self, prompt: list[int]) -> bool:
        return self.num_cached_blocks(prompt) == 1


async def test_a_router_knows_how_much_of_a_prompt_is_cached(links: Links) -> None:
    router, engine, _ = await links.pair()
    indexed, rng = IndexedRouter(router), Random(4)
    driver = KvDriver(engine.kv_events)
    driver.attach()
    driver.run([9] * 9)
    router.link().send(WatchKvCache(True))
    await until(lambda: indexed.num_cached_blocks([9] * 9) == 2)
    prompts = [[i] * rng.randint(4, 30) + [rng.randrange(50)] for i in range(6)]
    salts = ["", "salt"]
    for turn in range(60):
        if turn == 20:
            driver.reset()
        if turn == 30:
            # A recovery: the next driver has an empty cache.
            engine.kv_events.detach()
            driver = KvDriver(engine.kv_events)
            driver.attach()
        if turn == 40:
            # Its events are numbered from 0 again and begin with the state.
            router.link().send(WatchKvCache(True))
        driver.run(rng.choice(prompts), rng.randint(1, 5), rng.choice(salts))
        # A block that is stored last tells that all events have arrived.
        mark = [100 + turn] * BLOCK_SIZE
        driver.run([*mark, 0])
        await until(partial(indexed.has_one_block, mark))
        for prompt in prompts:
            for salt in salts:
                hashes = PromptBlockHashes(prompt, BLOCK_SIZE, salt)
                cached = driver.scheduler.kv_cache.block_pool.find_cached_blocks(hashes)
                assert indexed.num_cached_blocks(prompt, salt) == len(cached)
    assert indexed.index.num_blocks == {"one": len(driver.digests)}
    router.link().send(WatchKvCache(False))
    await until(lambda: not driver.is_watched)
