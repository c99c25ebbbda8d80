"""An engine whose stages have several ranks: errors of one of them, as workers of one process."""

import asyncio
from typing import Any

import pytest
import torch

from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.runtime.worker.batch import Batch
from gllm.scheduler.plan import StepPlan
from tests.support.engines.local_workers import InjectedError, local_engine

PATIENCE = 120.0
"""Seconds: a request that takes longer waits for something that does not come."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=1)
PROMPT = [11, 20, 21, 22, 5]


async def ask(engine: Engine) -> tuple[list[int], str, str]:
    """Tokens, finish reason and error of a request."""

    async def collect() -> list[Any]:
        return [delta async for delta in engine.generate(PROMPT, GREEDY)]

    deltas = await asyncio.wait_for(collect(), PATIENCE)
    tokens = [token for delta in deltas for token in delta.token_ids]
    return tokens, deltas[-1].finish_reason, deltas[-1].error


@pytest.mark.parametrize(
    ("stages", "degrees"),
    [(1, (2,)), pytest.param(2, (1, 2), marks=pytest.mark.full)],
    ids=str,
)
async def test_a_step_that_one_rank_cannot_prepare_ends_its_requests_alone(
    stages: int, degrees: tuple[int, ...]
) -> None:
    bad: set[int] = set()
    async with local_engine(stages, tensor_parallel_size=degrees) as (engine, workers):
        executor = workers.executors[-1]
        prepare = executor.prepare

        def prepare_step(plan: StepPlan) -> Batch:
            batch: Batch = prepare(plan)
            if plan.step in bad:
                raise InjectedError(f"rank 1 cannot prepare step {plan.step}")
            return batch

        executor.prepare = prepare_step
        expected = await ask(engine)
        assert expected[1] == "length"
        first = engine.status().stats.steps + 5
        bad.update(range(first, first + 2))
        _, reason, error = await ask(engine)
        assert reason == "error"
        assert "rank 1 cannot prepare" in error
        bad.clear()
        assert await ask(engine) == expected
        assert engine.status().recoveries == {}


@pytest.mark.parametrize(
    ("stages", "degrees", "rank"),
    [
        (2, (2, 1), 1),
        pytest.param(2, (2, 1), 0, marks=pytest.mark.full),
        pytest.param(1, (2,), 0, marks=pytest.mark.full),
        pytest.param(1, (2,), 1, marks=pytest.mark.full),
    ],
    ids=str,
)
async def test_an_error_in_the_middle_of_a_step_is_a_pause(
    stages: int, degrees: tuple[int, ...], rank: int
) -> None:
    """One rank raises while the other waits for its part: the stage cannot go on."""
    bad: set[int] = set()
    async with local_engine(stages, tensor_parallel_size=degrees) as (engine, workers):
        executor = workers.executors[rank]
        compute = executor.compute

        def compute_step(batch: Batch, hidden: torch.Tensor | None) -> torch.Tensor:
            if batch.step in bad:
                bad.clear()
                raise InjectedError("compute")
            output: torch.Tensor = compute(batch, hidden)
            return output

        executor.compute = compute_step
        expected = await ask(engine)
        bad.add(engine.status().stats.steps + 8)
        assert (await ask(engine))[:2] == expected[:2]
        assert not bad
        assert dict(engine.status().recoveries) == {"failed": 1}
