"""An engine whose stages have several ranks: errors of one of them, as workers of one process."""

import asyncio
from typing import Any

import pytest
import torch

from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.runtime.batch import Batch
from gllm.runtime.cpu.executor import CpuExecutor
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


@pytest.mark.parametrize(("stages", "degrees"), [(1, (2,)), (2, (1, 2))], ids=str)
async def test_a_step_that_one_rank_cannot_prepare_ends_its_requests_alone(
    stages: int, degrees: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    bad: set[int] = set()
    build = CpuExecutor._build_batch

    def build_batch(self: CpuExecutor, plan: StepPlan) -> Batch:
        if self._rank == 1 and plan.step in bad:
            raise InjectedError(f"rank 1 cannot prepare step {plan.step}")
        return build(self, plan)

    monkeypatch.setattr(CpuExecutor, "_build_batch", build_batch)
    async with local_engine(stages, tensor_parallel_size=degrees) as (engine, _):
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


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize(("stages", "degrees"), [(1, (2,)), (2, (2, 1))], ids=str)
async def test_an_error_in_the_middle_of_a_step_is_a_pause(
    stages: int, degrees: tuple[int, ...], rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One rank raises while the other waits for its part: the stage cannot go on."""
    bad: set[int] = set()
    compute = CpuExecutor.compute

    def compute_step(self: CpuExecutor, batch: Batch, hidden: torch.Tensor | None) -> torch.Tensor:
        if self.is_first and self._rank == rank and batch.step in bad:
            bad.clear()
            raise InjectedError("compute")
        return compute(self, batch, hidden)

    monkeypatch.setattr(CpuExecutor, "compute", compute_step)
    async with local_engine(stages, tensor_parallel_size=degrees) as (engine, _):
        expected = await ask(engine)
        bad.add(engine.status().stats.steps + 8)
        assert (await ask(engine))[:2] == expected[:2]
        assert not bad
        assert dict(engine.status().recoveries) == {"failed": 1}
