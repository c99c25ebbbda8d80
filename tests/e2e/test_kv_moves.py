"""Running requests that move to another engine with their KV blocks: the text stays the same."""

import asyncio
import os
import signal

import pytest

from gllm.kernels.native.builds import select_build
from tests.support.servers.kv_rig import KvRig, generate, kv_rig, make_prompts

NUM_TOKENS = 60


async def drain_amid_outputs(
    rig: KvRig, prompts: list[list[int]], kills_mover: bool
) -> list[list[int]]:
    """Drain engine A once all requests run, and return the outputs.

    kills_mover: end the process that has the blocks of A to give.
    """
    tasks = [asyncio.create_task(generate(rig.router, each, NUM_TOKENS)) for each in prompts]
    client = rig.fleet.client

    def are_running() -> bool:
        streams = list(client._streams)
        return len(streams) == len(prompts) and all(
            stream.entry.num_output_tokens >= 3 for stream in streams
        )

    await rig.until(are_running)
    num_moved = rig.fleet.client.num_running("A")
    assert num_moved
    rig.fleet.drain_engine("A", migrates=True)
    if kills_mover:
        number = rig.watches["A"].mover.process_id
        assert number is not None
        os.kill(number, signal.SIGKILL)
    outputs = await asyncio.gather(*tasks)
    assert rig.fleet.totals().migrations == {"moved": num_moved}
    return outputs


@pytest.mark.full
@pytest.mark.parametrize("kills_mover", [False, True], ids=["fetched", "blocks lost"])
async def test_a_drained_engine_hands_its_running_requests_off(
    kills_mover: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Engines that measure their kernels may choose differently, and exchange no requests then.
    monkeypatch.setenv("GLLM_CPU_KERNELS", select_build().name)
    prompts = make_prompts(6, seed=5, longest=60)
    async with kv_rig(has_pairs=False) as rig:
        await rig.start({"A": {"block_size": 16}, "B": {"block_size": 8}})
        expected = [await generate(rig.engines["A"], each, NUM_TOKENS) for each in prompts]
        await rig.router.reset_prefix_cache()
        assert await drain_amid_outputs(rig, prompts, kills_mover) == expected
        if not kills_mover:
            fetches = rig.watches["B"].ended
            assert fetches
            assert all(report.is_ok for _, report in fetches)
            # With the KV of their outputs so far.
            assert min(fetch.num_tokens for fetch, _ in fetches) > min(map(len, prompts))
        rig.fleet.undrain_engine("A")
        await rig.until_empty()
