"""An engine on emulated devices, with its workers in the test's process: memory, texts, deaths."""

import asyncio
from pathlib import Path

import pytest

from gllm.config.engine import EngineConfig
from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.engine.preflight import plan_model
from gllm.runtime.emulation.deployment import build_emulated_deployment
from tests.support.engines.local_workers import LocalWorkers

PARAMS = SamplingParams(temperature=0.0, max_tokens=40)


async def generate(
    engine: Engine, prompt: list[int], has_begun: asyncio.Event | None = None
) -> list[int]:
    deltas = []
    async for delta in engine.generate(prompt, PARAMS):
        deltas.append(delta)
        if has_begun is not None:
            has_begun.set()
    assert deltas[-1].finish_reason == "length", deltas[-1].error
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("stages", [1, 2])
async def test_memory_is_that_of_the_device_and_texts_survive_a_worker(
    stages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There are as many KV blocks as in the simulator; a killed worker changes no text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    config = EngineConfig.from_options(
        "qwen2.5-7b",
        device="emulated:L20",
        pipeline_parallel_size=stages,
        max_model_len=8192,
        emulated_speed=20,
        threads=1,
    )
    plan = plan_model(config)
    layers = [len(part) for part in plan.layers]
    expected = build_emulated_deployment(config, plan.config.model, 8192, layers=layers)
    workers = LocalWorkers()
    async with Engine(config, node=workers) as engine:
        assert engine.status().num_kv_blocks == expected.scheduler.num_blocks
        prompts = [[300 + number, 301, 302] for number in range(3)]
        texts = [await generate(engine, prompt) for prompt in prompts]
        assert len({*map(tuple, texts)}) == len(prompts)
        begins = [asyncio.Event() for _ in prompts]
        running = [
            asyncio.create_task(generate(engine, prompt, has_begun))
            for prompt, has_begun in zip(prompts, begins, strict=True)
        ]
        await asyncio.gather(*(has_begun.wait() for has_begun in begins))
        workers.kill(workers.sender_of(stages - 1))
        assert await asyncio.gather(*running) == texts
        assert engine.status().num_resumed_requests == len(prompts)


@pytest.mark.full
async def test_synthetic_guesses_repeat_a_token_and_come_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Texts are one repeated token; all guesses are right, also after the death of a worker."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    speculation = {
        "method": "synthetic",
        "num_speculative_tokens": 3,
        "synthetic_acceptance_rate": 1.0,
    }
    config = EngineConfig.from_options(
        "qwen2.5-7b",
        device="emulated:L20",
        pipeline_parallel_size=2,
        max_model_len=8192,
        emulated_speed=20,
        threads=1,
        speculative_config=speculation,
    )
    workers = LocalWorkers()
    async with Engine(config, node=workers) as engine:
        prompt = [300, 301, 302]
        text = await generate(engine, prompt)
        assert (len(text), len(set(text))) == (40, 1)
        stats = engine.status().stats
        assert stats.steps < 25
        assert stats.accepted_tokens > 25
        has_begun = asyncio.Event()
        running = asyncio.create_task(generate(engine, prompt, has_begun))
        await has_begun.wait()
        workers.kill(workers.sender_of(1))
        assert await running == text
