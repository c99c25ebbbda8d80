"""A burst that is four times as large as the KV cache of the engine that decodes."""

import asyncio
from collections import Counter

import pytest

from gllm.messages.kv_transfer import FetchKv, KvFetched
from tests.support.servers.kv_rig import KvWatch, generate, kv_rig, make_prompts

BLOCK_SIZE, NUM_BLOCKS = 16, 20
"""Of the engine that decodes."""
BLOCK_BYTES = 6 * 2 * 256 * BLOCK_SIZE
"""Six layers of two KV heads, with keys and values of 32 numbers."""
PROMPT_TOKENS, MAX_TOKENS = 64, 16


class BlockCount:
    """Blocks of the engine that decodes, by the commands to its mover."""

    def __init__(self, source: KvWatch, target: KvWatch) -> None:
        self.most_waiting_tokens = 0
        """Most tokens at the other engine that were waiting to be fetched at a time."""
        self._source, self._target = source, target
        target.on_fetched = self._on_fetched

    def _on_fetched(self, fetch: FetchKv, report: KvFetched) -> None:
        assert report.is_ok, report.cause
        running = [fetch, *self._target.fetches.values()]
        used = Counter(block for each in running for block in each.block_ids)
        assert max(used.values()) == 1, "no block belongs to two sequences"
        assert max(used) < NUM_BLOCKS
        fetched = {each.ticket for each, _ in self._target.ended}
        fetched |= {each.ticket for each in running}
        waiting = [each for ticket, each in self._source.served.items() if ticket not in fetched]
        num_tokens = sum(each.num_tokens for each in waiting)
        self.most_waiting_tokens = max(self.most_waiting_tokens, num_tokens)


@pytest.mark.full
async def test_a_burst_waits_at_the_engine_that_prefills() -> None:
    num_requests = 4 * NUM_BLOCKS * BLOCK_SIZE // (PROMPT_TOKENS + MAX_TOKENS)
    prompts = [each[:PROMPT_TOKENS] for each in make_prompts(200, 9, 120)]
    prompts = [each for each in prompts if len(each) == PROMPT_TOKENS][:num_requests]
    assert len(prompts) == num_requests == 16
    async with kv_rig() as rig:
        small = {"kv_cache_memory": NUM_BLOCKS * BLOCK_BYTES, "block_size": BLOCK_SIZE}
        await rig.start({"P": {}, "D": small | {"debug_step_seconds": 0.02}})
        assert rig.engines["D"].status().num_kv_blocks == NUM_BLOCKS
        rig.policy.prefill, rig.policy.decode = "P", "D"
        expected = [await generate(rig.engines["P"], each, MAX_TOKENS) for each in prompts]
        await rig.router.reset_prefix_cache()
        count = BlockCount(rig.watches["P"], rig.watches["D"])
        outputs = await asyncio.gather(
            *(generate(rig.router, prompt, MAX_TOKENS) for prompt in prompts)
        )
        assert outputs == expected
        assert count.most_waiting_tokens > NUM_BLOCKS * BLOCK_SIZE, "more than D can hold"
        await rig.until_empty()
