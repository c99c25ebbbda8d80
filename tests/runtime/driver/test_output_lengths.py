"""The scheduler of the next epoch begins with the output lengths that it has learned."""

import asyncio
from pathlib import Path
from typing import Any

from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.observability.step_log import RestartEvent, read_step_log
from gllm.sim.replay import replay_calls
from tests.support.engines.local_workers import local_engine


async def generate(engine: Engine, max_tokens: int, **params: Any) -> None:
    options = {"temperature": 0, "ignore_eos": True, **params}
    async for _ in engine.generate([5, 6], SamplingParams(max_tokens=max_tokens, **options)):
        pass


async def test_lengths_survive_recoveries(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    async with local_engine(2, step_log=str(log)) as (engine, workers):
        for max_tokens in (3, 20, 30):
            await generate(engine, max_tokens)
        await generate(engine, 70, stop=("e",))
        for num_deaths, max_tokens in enumerate((21, 22), start=1):
            running = asyncio.create_task(generate(engine, max_tokens))
            steps = engine.status().stats.steps
            while engine.status().stats.steps < steps + 3:
                await asyncio.sleep(0)
            workers.kill(workers.sender_of(0))
            await running
            assert engine.status().recoveries == {"killed": num_deaths}
    events = list(read_step_log(log))
    first, second = [event for event in events if isinstance(event, RestartEvent)]
    # That of the warm-up is 1; the request that is resumed has not ended.
    assert first.output_lengths == {1: [1], 2: [3], 5: [20, 30]}
    assert second.output_lengths == {1: [1, 1], 2: [3], 5: [20, 30, 21]}
    agreement = replay_calls(events)
    assert agreement.num_equal == agreement.num_plans > 0
