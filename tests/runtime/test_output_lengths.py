"""The scheduler of the next generation begins with the output lengths that it has learned."""

import asyncio
from pathlib import Path
from typing import Any

from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.observability.step_log import RestartEvent, read_step_log
from gllm.sim.replay import replay_calls
from tests.support.engines.local_workers import LocalWorkers, local_engine


def lengths_of(engine: Engine, workers: LocalWorkers) -> dict[int, list[int]]:
    """Output lengths that the driver's scheduler knows, without those of warm-ups."""
    instance: Any = workers.workers[engine._supervisor.senders[0]].instance
    admission = instance._driver.scheduler._admission
    return {key: each for key, each in admission.output_lengths.recent_lengths.items() if key > 1}


async def generate(engine: Engine, max_tokens: int, **params: Any) -> None:
    options = {"temperature": 0, "ignore_eos": True, **params}
    async for _ in engine.generate([5, 6], SamplingParams(max_tokens=max_tokens, **options)):
        pass


async def test_lengths_survive_a_recovery(tmp_path: Path) -> None:
    log = tmp_path / "steps.jsonl"
    async with local_engine(2, step_log=str(log)) as (engine, workers):
        for max_tokens in (3, 20, 30):
            await generate(engine, max_tokens)
        await generate(engine, 70, stop=("e",))
        assert lengths_of(engine, workers) == {2: [3], 5: [20, 30]}
        running = asyncio.create_task(generate(engine, 21))
        steps = engine.status().stats.steps
        while engine.status().stats.steps < steps + 3:
            await asyncio.sleep(0)
        workers.kill(engine._supervisor.senders[0])
        await running
        assert engine.status().recoveries == {"killed": 1}
        assert lengths_of(engine, workers) == {2: [3], 5: [20, 30, 21]}
    events = list(read_step_log(log))
    (restart,) = [event for event in events if isinstance(event, RestartEvent)]
    assert restart.output_lengths == {1: [1], 2: [3], 5: [20, 30]}
    agreement = replay_calls(events)
    assert agreement.num_equal == agreement.num_plans > 0
