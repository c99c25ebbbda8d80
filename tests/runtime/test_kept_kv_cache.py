"""KV blocks that outlive workers: what the next epoch computes again, and damage in between."""

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from gllm.recovery.kept_blocks import contains_block
from gllm.scheduler.intact_slots import NO_SLOTS
from tests.support.engines.local_workers import LocalWorkers
from tests.support.nodes.scripted_head import Head, head_of

PROMPT = [5, 9, 3, 7] * 20
"""Five blocks."""
NUM_BLOCKS = 64
NUM_TOKENS = 8
Damage = Callable[[LocalWorkers], None]


async def serve_and_die(head: Head, node: LocalWorkers, victims: list[int]) -> list[int]:
    """Serve a request, then lose the workers of some stages; the next ones have their places.

    Returns:
        The tokens of the request.
    """
    tokens = await head.generate(PROMPT, NUM_TOKENS)
    for stage in victims:
        sender = head.senders[stage]
        node.kill(sender)
        await head.until(partial(head.exits.__contains__, sender))
        head.hub.forget(sender)
    survivors = [sender for stage, sender in enumerate(head.senders) if stage not in victims]
    await head.close_epoch(survivors)
    for stage in victims:
        head.senders[stage] = 10 * head.epoch + stage
        await head.spawn(head.senders[stage])
    return tokens


async def count_prefill(head: Head) -> tuple[list[int], int]:
    """Return the tokens of the same request, and the prompt tokens that were computed for it."""
    tokens = await head.generate(PROMPT, NUM_TOKENS)
    return tokens, head.stats.prefill_tokens


@pytest.mark.parametrize("victims", [[1], [0], [0, 1]], ids=str)
async def test_the_next_epoch_computes_the_last_block_only(victims: list[int]) -> None:
    """Also if the driver has died, or all."""
    node = LocalWorkers()
    async with head_of(node, 2) as head:
        head.assign()
        await head.initialize(NUM_BLOCKS)
        assert head.adopt() == NO_SLOTS
        for _ in range(3):
            expected = await serve_and_die(head, node, victims)
            head.assign(keeps_kv_cache=True)
            await head.initialize(NUM_BLOCKS)
            assert head.adopt().full
            tokens, num_computed = await count_prefill(head)
            assert tokens == expected
            assert num_computed == 16, "the last block of the prompt is always computed"


def flip_bits(node: LocalWorkers) -> None:
    """Damage the first block of stage 1."""
    descriptor = node._kv_files[1, 0]
    size = os.fstat(descriptor).st_size
    page = os.sysconf("SC_PAGE_SIZE")
    # The first page has the header, the next ones the checksums and what they count.
    pages = range(3 * page, size, page)
    offset = next(begin for begin in pages if any(os.pread(descriptor, page, begin)))
    byte = os.pread(descriptor, 1, offset)
    os.pwrite(descriptor, bytes([byte[0] ^ 64]), offset)


def truncate(node: LocalWorkers) -> None:
    """Cut the file of stage 0."""
    descriptor = node._kv_files[0, 0]
    os.ftruncate(descriptor, os.fstat(descriptor).st_size // 2)


def lose_hashes(node: LocalWorkers) -> None:
    """Empty the file of the hashes."""
    assert node._hash_file is not None
    os.ftruncate(node._hash_file, 0)


def lose_file(node: LocalWorkers) -> None:
    """Lose the file of stage 1, as if its machine had been restarted."""
    os.close(node._kv_files.pop((1, 0)))


@pytest.mark.parametrize("damage", [flip_bits, truncate, lose_hashes, lose_file])
async def test_damage_is_computed_again(damage: Damage) -> None:
    node = LocalWorkers()
    async with head_of(node, 2) as head:
        head.assign()
        await head.initialize(NUM_BLOCKS)
        expected = await serve_and_die(head, node, [1])
        damage(node)
        head.assign(keeps_kv_cache=True)
        await head.initialize(NUM_BLOCKS)
        head.adopt()
        tokens, num_computed = await count_prefill(head)
        assert tokens == expected
        assert num_computed > 16, "something was computed again"
        # The epoch after that has it all again.
        assert await serve_and_die(head, node, [1]) == expected
        head.assign(keeps_kv_cache=True)
        await head.initialize(NUM_BLOCKS)
        assert head.adopt().full
        assert await count_prefill(head) == (expected, 16)


@pytest.mark.parametrize("change", ["number of blocks", "layers", "another epoch"])
async def test_another_cache_is_not_used(change: str) -> None:
    node = LocalWorkers()
    async with head_of(node, 2) as head:
        head.assign()
        await head.initialize(NUM_BLOCKS)
        expected = await serve_and_die(head, node, [1])
        layers = None
        if change == "layers":
            middle = head.layers[0].stop - 1
            layers = [range(middle), range(middle, head.layers[1].stop)]
        # Even if the head were wrong about the layers.
        head.assign(layers, keeps_kv_cache=change != "another epoch")
        await head.initialize(NUM_BLOCKS + (change == "number of blocks"))
        assert head.adopt() == NO_SLOTS
        assert await count_prefill(head) == (expected, len(PROMPT))


def scheduler_of(head: Head, node: LocalWorkers) -> Any:
    """Return the scheduler of the present driver."""
    instance: Any = node.workers[head.senders[0]].instance
    return instance._driver.scheduler


async def test_a_driver_begins_with_what_the_one_before_had_published() -> None:
    """A worker reports every block that it has computed, the driver those of committed steps."""
    node = LocalWorkers()
    async with head_of(node, 2) as head:
        head.assign()
        await head.initialize(NUM_BLOCKS)
        running = head.submit(PROMPT, 100)
        await head.until(lambda: len(head.tokens(running)) > 20)
        expected = head.tokens(running)[:20]
        before = scheduler_of(head, node).kv_cache.block_pool
        await serve_and_die(head, node, [1])
        published = dict(before._by_hash)
        assert len(published) > len(PROMPT) // 16
        head.assign(keeps_kv_cache=True)
        await head.initialize(NUM_BLOCKS)
        kept = head.adopt()
        assert all(contains_block(kept.full, block) for block in published.values())
        pool = scheduler_of(head, node).kv_cache.block_pool
        await head.until(lambda: pool.digests)
        assert pool._by_hash == published
        assert (await head.generate(PROMPT, 20)) == expected
