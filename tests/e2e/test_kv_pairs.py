"""KV blocks between engines of any stages and ranks: the same bytes, and the same text."""

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest

from gllm.messages.kv_transfer import FetchKv, KvFetched
from tests.support.engines.local_workers import LocalWorkers
from tests.support.gpu.device_stage import host_as_gpu
from tests.support.servers.kv_rig import KvRig, KvWatch, generate, kv_rig, make_prompts

Cut = tuple[int, int]
"""Stages and ranks."""
CUTS: list[Cut] = [(1, 1), (2, 1), (1, 2), (2, 2)]
BLOCK_SIZES = {(1, 1): 16, (2, 1): 8, (1, 2): 32, (2, 2): 16}


def options_of(cut: Cut, backend: str = "auto") -> dict[str, Any]:
    stages, ranks = cut
    return {
        "pipeline_parallel_size": stages,
        "tensor_parallel_size": (ranks,),
        "block_size": BLOCK_SIZES[cut],
        "kv_transfer": backend,
    }


def compare(source: KvWatch, target: KvWatch, fetch: FetchKv, report: KvFetched) -> None:
    """Check that the blocks of both engines have the same bytes, if both still have them."""
    assert report.is_ok, report.cause
    fetched, served = target.read_fetched(fetch), source.read_served(fetch)
    if served is None:
        return
    target.num_compared += 1
    assert sorted(fetched) == sorted(served)
    assert len(fetched) == 12, "six layers of two KV heads"
    assert fetched == served
    assert all(any(run) for run in fetched.values())
    assert report.num_bytes == sum(map(len, fetched.values()))


async def check_pair(
    rig: KvRig, prefill: str, decode: str, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    """Check that prompts have the expected output through a pair, by fetched blocks alone."""
    rig.policy.prefill, rig.policy.decode = prefill, decode
    source, target = rig.watches[prefill], rig.watches[decode]
    target.ended.clear()
    target.num_compared = 0
    target.on_fetched = partial(compare, source, target)
    outputs = await asyncio.gather(*(generate(rig.router, prompt) for prompt in prompts))
    assert outputs == expected, (prefill, decode)
    assert [report.is_ok for _, report in target.ended] == [True] * len(prompts)
    assert target.num_compared, "no engine keeps the blocks of a fetch until it has ended"
    assert sum(fetch.num_tokens for fetch, _ in target.ended) == sum(map(len, prompts))
    await rig.until_empty()


async def check_pairs(prefills: Sequence[Cut], decodes: Sequence[Cut]) -> None:
    """Check all pairs of engines that prefill and engines that decode, one after another."""
    backends = dict(zip(CUTS, ("shm", "tcp", "shm", "tcp"), strict=True))
    prompts = make_prompts(8, seed=5, longest=60)
    async with kv_rig() as rig:
        options = {f"P{cut}": options_of(cut) for cut in prefills}
        await rig.start(options | {f"D{cut}": options_of(cut, backends[cut]) for cut in decodes})
        first = rig.engines[f"P{prefills[0]}"]
        expected = [await generate(first, each) for each in prompts]
        for cut in prefills:
            for other in decodes:
                await rig.router.reset_prefix_cache()
                await check_pair(rig, f"P{cut}", f"D{other}", prompts, expected)


@pytest.mark.full
async def test_bytes_and_text_are_the_same_for_other_stages_and_ranks() -> None:
    await check_pairs([(2, 1), (1, 2)], [(1, 1), (2, 1)])


@pytest.mark.long
async def test_bytes_and_text_are_the_same_for_all_pairs() -> None:
    await check_pairs(CUTS, CUTS)


@pytest.mark.full
async def test_blocks_of_devices_pass_through_staging_blocks() -> None:
    """Workers of this process whose device is the CPU; the movers are real."""
    prompts = make_prompts(8, seed=5, longest=60)
    with host_as_gpu():
        async with kv_rig() as rig:
            cuts = {"P": (2, 1), "D": (1, 1)}
            options = {
                name: options_of(cut) | {"node": LocalWorkers()} for name, cut in cuts.items()
            }
            await rig.start(options)
            expected = [await generate(rig.engines["P"], each) for each in prompts]
            await rig.router.reset_prefix_cache()
            await check_pair(rig, "P", "D", prompts, expected)
