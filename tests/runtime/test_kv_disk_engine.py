"""Engines whose prefix cache has a disk tier: kinds of attention, and the state after a restart."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gllm.config.engine import EngineConfig
from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.messages.kv_disk import KvDiskTotals
from tests.support.engines.local_workers import LocalWorkers
from tests.support.full_cases import full_but
from tests.support.models.tiny_models import save
from tests.support.text.tokenizers import byte_level
from tests.support.text.tokenizers import save as save_tokenizer

GREEDY = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
PROMPT = [5 + 3 * number % 90 for number in range(43)]
NUM_BLOCKS = 12
"""Full blocks of the prompt and its output, which lacks KV of the last token."""
SECONDS = 60.0


def start_engine(folder: Path, **options: Any) -> Engine:
    """Return an engine over local workers that has not started."""
    fixed = {"dtype": "float32", "kv_cache_memory": 2**25, "threads": 1, "kv_fetch": "always"}
    config = EngineConfig.from_options(str(folder), **fixed, **options)
    return Engine(config, node=LocalWorkers())


async def generate(engine: Engine, prompt: list[int]) -> tuple[list[int], int]:
    """Return the output of a prompt, and its cached tokens."""
    tokens: list[int] = []
    num_cached = 0
    async for delta in engine.generate(prompt, GREEDY):
        tokens += delta.token_ids
        num_cached += delta.cached_tokens
    return tokens, num_cached


async def wait_for_blocks(engine: Engine, num_blocks: int) -> KvDiskTotals:
    """Wait until so many blocks are on disk; return the counters."""
    async with asyncio.timeout(SECONDS):
        while (totals := engine.status().kv_disk) is None or totals.num_kept_blocks < num_blocks:
            await asyncio.sleep(0.02)
    return totals


CASES = [
    ("demo", 2, 1, "auto"),
    ("gemma2", 2, 1, "auto"),
    ("llama3", 1, 2, "int8"),
    ("mistral", 1, 1, "auto"),
    ("deepseek-v3", 2, 1, "auto"),
    ("deepseek-v3.2", 1, 1, "auto"),
    ("gemma4-e", 1, 1, "auto"),
    ("gpt-oss", 1, 2, "auto"),
]


@pytest.mark.parametrize(("family", "stages", "ranks", "cached"), full_but(CASES[:1], CASES))
async def test_blocks_are_found_after_a_restart_with_the_same_text(
    family: str, stages: int, ranks: int, cached: str, tmp_path: Path
) -> None:
    """Also with sliding windows, latent attention and layers that share keys and values."""
    folder = Path("demo")
    if family != "demo":
        folder = save(family, tmp_path / "model")
        save_tokenizer(folder, byte_level())
    options: dict[str, Any] = {"tensor_parallel_size": (ranks,), "kv_cache_dtype": cached}
    options |= {"pipeline_parallel_size": stages, "block_size": 4, "max_model_len": 64}
    async with start_engine(folder, **options) as engine:
        expected = (await generate(engine, PROMPT))[0]
        conversation = [*PROMPT, *expected, 7, 8, 9]
        answer = (await generate(engine, conversation))[0]
        assert engine.status().kv_disk is None
    options["kv_cache_disk"] = f"{tmp_path / 'disk'}:8MiB"
    async with start_engine(folder, **options) as engine:
        assert await generate(engine, PROMPT) == (expected, 0)
        totals = await wait_for_blocks(engine, NUM_BLOCKS)
        assert totals.num_stored_blocks == NUM_BLOCKS
    async with start_engine(folder, **options) as engine:
        assert await generate(engine, conversation) == (answer, NUM_BLOCKS * 4)
        totals = await wait_for_blocks(engine, NUM_BLOCKS)
        assert (totals.num_loads, totals.num_hit_tokens) == (1, NUM_BLOCKS * 4)
        assert engine.status().kv_transfers is None
