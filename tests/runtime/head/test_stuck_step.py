"""A worker whose step never ends is replaced, although its heartbeats go on."""

import asyncio
import threading
import time
from typing import Any

import pytest
import torch

from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.recovery.liveness import ProcessSample
from gllm.runtime.worker.batch import Batch
from tests.support.engines.local_workers import LocalWorkers, local_config

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)
STAGE_THREADS = ("_compute_steps", "_sample_steps")
"""Names of the threads of a stage."""


class SampledWorkers(LocalWorkers):
    """Workers whose CPU time is that of the threads that compute: they share the test's process."""

    def __init__(self) -> None:
        super().__init__()
        self.was_killed = threading.Event()

    def sample(self, sender: int) -> ProcessSample | None:
        threads = [each for each in threading.enumerate() if each.name in STAGE_THREADS]
        clocks = [time.pthread_getcpuclockid(each.ident) for each in threads if each.ident]
        return ProcessSample(False, sum(map(time.clock_gettime, clocks)))

    def kill(self, sender: int) -> None:
        self.was_killed.set()
        super().kill(sender)


async def generate(engine: Engine) -> list[int]:
    """Return the tokens of a request."""
    deltas = [delta async for delta in engine.generate([5, 6, 7], GREEDY)]
    assert deltas[-1].error == ""
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.full), 1])
async def test_a_worker_whose_step_does_not_end_is_replaced(
    stage: int, caplog: pytest.LogCaptureFixture
) -> None:
    workers, may_block = SampledWorkers(), threading.Event()
    async with Engine(local_config(2, freeze_timeout=0.3), node=workers) as engine:
        expected = await generate(engine)
        executor = workers.executors[stage]
        compute = executor.compute

        def compute_step(batch: Batch, hidden: torch.Tensor | None) -> Any:
            if may_block.is_set():
                may_block.clear()
                assert workers.was_killed.wait(60)
            return compute(batch, hidden)

        executor.compute = compute_step
        stuck = workers.sender_of(stage)
        may_block.set()
        assert await asyncio.wait_for(generate(engine), 60) == expected
        assert engine.status().recoveries == {"frozen": 1}
        assert stuck not in workers.workers
    assert f"stage {stage} is frozen: its step" in caplog.text
