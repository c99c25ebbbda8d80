"""A request that kills each worker that computes it ends alone; all others end undisturbed."""

import asyncio
import threading
from typing import Any

import pytest
import torch

from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.engine.interface import PoisonRequestError
from gllm.runtime.worker.batch import Batch
from gllm.runtime.worker.cpu.executor import CpuExecutor
from tests.support.engines.local_workers import LocalWorkers, local_engine

POISON = 777
"""A token that nobody survives."""
GREEDY = SamplingParams(temperature=0, max_tokens=60, ignore_eos=True)


def let_die(workers: LocalWorkers, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kill the first stage whenever it computes the token."""
    compute, loop = CpuExecutor.compute, asyncio.get_running_loop()

    def compute_step(self: CpuExecutor, batch: Batch, hidden: torch.Tensor | None) -> Any:
        if self.layers.start == 0 and POISON in batch.inputs.token_ids.tolist():
            killed = threading.Event()

            def kill() -> None:
                workers.kill(workers.sender_of(0))
                killed.set()

            loop.call_soon_threadsafe(kill)
            assert killed.wait(60)
        return compute(self, batch, hidden)

    monkeypatch.setattr(CpuExecutor, "compute", compute_step)


async def run(engine: Engine, prompt: list[int]) -> tuple[list[int], str, str]:
    """Return the tokens, the end and the kind of error of a request."""
    tokens: list[int] = []
    async for delta in engine.generate(prompt, GREEDY):
        tokens += delta.token_ids
        reason, kind = delta.finish_reason, delta.error_kind
    return tokens, str(reason), kind


@pytest.mark.parametrize("stages", [1, pytest.param(2, marks=pytest.mark.full)])
async def test_a_request_that_kills_workers_ends_alone(
    stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with local_engine(stages, max_restarts=2) as (engine, workers):
        let_die(workers, monkeypatch)
        others = [asyncio.create_task(run(engine, [5, i])) for i in range(4)]
        while engine.status().stats.steps < 5:
            await asyncio.sleep(0)
        assert (await run(engine, [5, POISON]))[1:] == ("error", "poison")
        results = [await other for other in others]
        assert [(len(tokens), reason) for tokens, reason, _ in results] == [(60, "length")] * 4
        assert engine.status().recoveries == {"killed": 3}
        with pytest.raises(PoisonRequestError):
            await run(engine, [5, POISON])
        assert (await run(engine, [5, 6]))[1] == "length"
        assert engine.status().state == "ready"
