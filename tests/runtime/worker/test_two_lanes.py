"""A whole engine with two lanes: every request gets what it gets with one lane."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from gllm.config.engine import EngineConfig
from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.observability.step_log import CommitEvent, ScheduleEvent, read_step_log
from gllm.options.field_types import FieldError
from gllm.sim.replay import replay_calls
from tests.runtime.head.test_engine_deaths import ChoiceResult, Readers
from tests.support.engines.local_workers import LocalWorkers, local_engine

pytestmark = pytest.mark.usefixtures("compiled_kernels")

PROMPTS = [
    [3 + seq * 7 + position * 11 % 90 for position in range(10 + 17 * seq)] for seq in range(8)
]
OPTIONS: dict[str, Any] = {"max_prefill_tokens": 24, "min_prefill_tokens": 8}


async def greedy_tokens(engine: Engine, prompt: list[int]) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    return [token async for delta in engine.generate(prompt, params) for token in delta.token_ids]


async def run_all(engine: Engine) -> tuple[dict[str, list[ChoiceResult]], list[list[int]]]:
    """Requests of all kinds, and greedy outputs, all at the same time."""
    greedy = asyncio.gather(*(greedy_tokens(engine, prompt) for prompt in PROMPTS))
    return await Readers(engine).run_all(), await greedy


@pytest.mark.parametrize("stages", [2, pytest.param(3, marks=pytest.mark.long)])
async def test_results_are_those_of_one_lane(stages: int, tmp_path: Path) -> None:
    """Seeds, penalties, grammars, choices and scores too; and the calls can be replayed."""
    path = tmp_path / "steps.jsonl"
    async with local_engine(stages, lanes="1", **OPTIONS) as (engine, _):
        expected = await run_all(engine)
    options = OPTIONS | {"lanes": "2", "step_log": str(path), "max_in_flight": 2 * stages}
    async with local_engine(stages, **options) as (engine, _):
        assert await run_all(engine) == expected
    events = list(read_step_log(path))
    agreement = replay_calls(events)
    assert agreement.num_equal == agreement.num_plans > 0
    plans = [each.plan for each in events if isinstance(each, ScheduleEvent) and each.plan]
    assert {plan.lane for plan in plans} == {0, 1}
    committed = [each.result.step for each in events if isinstance(each, CommitEvent)]
    assert sorted(committed) == [plan.step for plan in plans]
    assert committed != sorted(committed), "nothing has overtaken"


@pytest.mark.long
async def test_a_death_is_recovered_with_both_lanes_in_flight() -> None:
    async with local_engine(2, lanes="1", **OPTIONS) as (engine, _):
        expected = await run_all(engine)
    async with local_engine(2, lanes="2", max_restarts=10, **OPTIONS) as (engine, workers):
        assert isinstance(workers, LocalWorkers)
        running = asyncio.create_task(run_all(engine))
        begin = engine.status().stats.steps
        for _ in range(2):
            while engine.status().state != "ready" or engine.status().stats.steps < begin + 10:
                await asyncio.sleep(0.001)
            workers.kill(max(workers.workers))
            while engine.status().state == "ready":
                await asyncio.sleep(0.001)
            begin = 0
        assert await asyncio.wait_for(running, 240) == expected


def test_two_lanes_need_stages_of_one_rank() -> None:
    with pytest.raises(FieldError, match="lanes is 2, but tensor_parallel_size"):
        EngineConfig.from_options(
            "demo", pipeline_parallel_size=2, tensor_parallel_size=(2, 1), lanes="2"
        )
    EngineConfig.from_options("demo", pipeline_parallel_size=2, tensor_parallel_size=2)
