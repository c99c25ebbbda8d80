"""An engine is killed: what another one has copies of is not computed again; equal texts."""

import asyncio

import pytest

from tests.e2e.test_kv_kills import EXACT
from tests.support.servers.fleet import EngineProcess
from tests.support.servers.kv_rig import KvRouter, generate

FLAGS = ("--kv-transfer", "--kv-fetch", "always", "--debug-step-seconds", "0.03")
NUM_PROMPT_TOKENS, NUM_TOKENS = 120, 110
NUM_BEFORE = 80
"""Output tokens of each request when its engine is killed."""
INTERVAL = 16
"""Tokens between two copies."""


async def lose_an_engine(kv_checkpoint: int, has_pairs: bool) -> tuple[list[list[int]], int]:
    """Kill one of two engines: that of half of the requests, or the one that decodes all.

    Returns:
        The outputs, and the number of tokens that the other engine then computes as prefill.
    """
    rig = KvRouter(has_pairs=has_pairs, kv_checkpoint=kv_checkpoint)
    rig.policy.prefill, rig.policy.decode = "B", "A"
    prompts = [[*range(300 + number, 300 + number + NUM_PROMPT_TOKENS)] for number in range(4)]
    engines: dict[str, EngineProcess] = {}
    try:
        await rig.router.start()
        for name in "AB":
            engines[name] = EngineProcess("demo", name, rig.address, *EXACT, *FLAGS)
        await rig.until(lambda: rig.able == {"A", "B"})
        tasks = [asyncio.create_task(generate(rig.router, each, NUM_TOKENS)) for each in prompts]
        streams = rig.fleet.client._streams
        await rig.until(
            lambda: (
                len(streams) == len(prompts)
                and all(stream.entry.num_output_tokens > NUM_BEFORE for stream in streams)
            )
        )
        num_lost = rig.fleet.client.num_running("A")
        assert num_lost == (4 if has_pairs else 2)

        def num_computed() -> int:
            (row,) = (row for row in rig.fleet.engines() if row.name == "B")
            return int(row.stats["prefill_tokens"])

        before = num_computed()
        assert bool(rig.fleet.totals().kv_checkpoints) == bool(kv_checkpoint)
        engines["A"].kill()
        engines.pop("A").close()
        outputs = await asyncio.gather(*tasks)
        await rig.until_empty()
        assert rig.fleet.totals().migrations == {"lost": num_lost}
        return outputs, num_computed() - before
    finally:
        for engine in engines.values():
            engine.close()
        await rig.router.stop()


@pytest.mark.full
@pytest.mark.parametrize("has_pairs", [False, True], ids=["peers", "prefill engine"])
async def test_a_lost_engine_costs_the_tokens_since_the_last_copies(has_pairs: bool) -> None:
    expected, num_without = await lose_an_engine(0, has_pairs)
    outputs, num_with = await lose_an_engine(INTERVAL, has_pairs)
    assert outputs == expected
    # The engine that prefills has the prompts in its prefix cache anyway.
    num_known = 4 * NUM_BEFORE if has_pairs else 2 * (NUM_PROMPT_TOKENS + NUM_BEFORE)
    print(f"computed again: {num_without} tokens without copies, {num_with} with them")
    assert num_without >= num_known
    assert num_with < num_without / 2
