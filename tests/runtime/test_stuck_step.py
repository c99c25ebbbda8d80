"""A worker whose step never ends is replaced, although its heartbeats go on."""

import asyncio
import threading
import time
from typing import Any

import pytest
import torch

from gllm.cluster.liveness import ProcessSample
from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.runtime import liveness_watch
from gllm.runtime import worker as worker_module
from gllm.runtime.batch import Batch
from gllm.runtime.cpu.executor import CpuExecutor
from tests.support.engines.local_workers import LocalWorkers, local_engine

GREEDY = SamplingParams(temperature=0, max_tokens=30, ignore_eos=True)


def sample_threads(workers: LocalWorkers, sender: int) -> ProcessSample | None:
    """State of a worker by the threads that compute: they share the process with the test."""
    worker = workers.workers.get(sender)
    if worker is None or worker.instance is None or worker.instance._resources.runner is None:
        return None
    threads = worker.instance._resources.runner._threads
    clocks = [time.pthread_getcpuclockid(thread.ident) for thread in threads if thread.ident]
    return ProcessSample(False, sum(map(time.clock_gettime, clocks)))


async def generate(engine: Engine) -> list[int]:
    """Return the tokens of a request."""
    deltas = [delta async for delta in engine.generate([5, 6, 7], GREEDY)]
    assert deltas[-1].error == ""
    return [token for delta in deltas for token in delta.token_ids]


@pytest.mark.parametrize("stage", [0, 1])
async def test_a_worker_whose_step_does_not_end_is_replaced(
    stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_module, "CHECK_SECONDS", 0.02)
    monkeypatch.setattr(liveness_watch, "DUMP_SECONDS", 0.02)
    monkeypatch.setattr(LocalWorkers, "sample", sample_threads)
    compute, kill = CpuExecutor.compute, LocalWorkers.kill
    may_block, was_killed = threading.Event(), threading.Event()

    def compute_step(self: CpuExecutor, batch: Batch, hidden: torch.Tensor | None) -> Any:
        if (self.layers.start > 0) == stage and may_block.is_set():
            may_block.clear()
            assert was_killed.wait(60)
        return compute(self, batch, hidden)

    def kill_worker(self: LocalWorkers, sender: int) -> None:
        was_killed.set()
        kill(self, sender)

    monkeypatch.setattr(CpuExecutor, "compute", compute_step)
    monkeypatch.setattr(LocalWorkers, "kill", kill_worker)
    async with local_engine(2, freeze_timeout=0.3) as (engine, workers):
        expected = await generate(engine)
        stuck = engine._supervisor.senders[stage]
        may_block.set()
        assert await asyncio.wait_for(generate(engine), 60) == expected
        status = engine.status()
        assert status.recoveries == {"frozen": 1}
        assert stuck not in workers.workers
        assert f"stage {stage} is frozen: its step" in engine._supervisor.deaths.cause
