"""Running requests that move to another engine with their KV blocks: the text stays the same."""

import asyncio
import os
import signal
import time

import pytest

from gllm.kernels.native.builds import select_build
from gllm.scheduler.output_lengths import LengthQuery
from tests.support.servers.kv_rig import KvRig, generate, kv_rig, make_prompts

NUM_TOKENS = 60
PREDICTED = 20
NUM_LONG_TOKENS = 190


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


@pytest.mark.full
async def test_running_requests_leave_an_engine_that_has_more_than_was_predicted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLLM_CPU_KERNELS", select_build().name)
    prompts = make_prompts(12, seed=6, longest=60)
    async with kv_rig(has_pairs=False, move_requests=2) as rig:
        await rig.start({"A": {"block_size": 16}, "B": {"block_size": 8}})
        expected = [await generate(rig.engines["A"], each, NUM_LONG_TOKENS) for each in prompts]
        # Both have to know what their steps cost.
        assert await generate(rig.engines["B"], prompts[0], NUM_LONG_TOKENS) == expected[0]
        await rig.router.reset_prefix_cache()
        for _ in range(64):
            query = LengthQuery(len(prompts[0]), NUM_LONG_TOKENS)
            rig.fleet._dispatcher.output_lengths.estimate(query).record(PREDICTED)
        tasks = [
            asyncio.create_task(generate(rig.router, each, NUM_LONG_TOKENS)) for each in prompts
        ]
        client = rig.fleet.client
        await rig.until(lambda: client.num_running("A") == client.num_running("B") == 6)
        begun = {stream.entry.engine: stream for stream in client._streams}
        await rig.until(lambda: begun["B"].entry.num_output_tokens >= 3)
        rig.fleet.on_tick()
        on_b = [
            list(stream.entry.prompt) for stream in client._streams if stream.entry.engine == "B"
        ]
        for task, prompt in zip(tasks, prompts, strict=True):
            if prompt in on_b:
                task.cancel()

        def has_moved() -> bool:
            rig.fleet._rebalancing.on_tick(time.monotonic())
            return rig.fleet.totals().migrations.get("rebalanced", 0) >= 1

        await rig.until(has_moved)
        outputs = await asyncio.gather(*tasks, return_exceptions=True)
        left = [index for index, prompt in enumerate(prompts) if prompt not in on_b]
        assert len(left) == 6
        assert [outputs[index] for index in left] == [expected[index] for index in left]
        assert all(report.is_ok for _, report in rig.watches["B"].ended)
        assert rig.watches["B"].ended
        await rig.until_empty()
