"""Jobs for a real engine on this machine.

Turns a workload into requests of random tokens and sends them on time. The engine's step log has
the measurements.
"""

import asyncio
import random
import tempfile
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

from gllm.config.engine import EngineConfig
from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.observability.step_log import StepLogEvent, read_step_log
from gllm.sim.workloads.requests import WorkloadRequest

LOG_DRAIN_SECONDS = 1.2
"""Seconds to wait for the stages' last step times before the log is read."""


async def serve_workload(
    engine: Engine,
    jobs: list[WorkloadRequest],
    seed: int = 0,
    served: Callable[[], None] = lambda: None,
) -> list[list[int]]:
    """Send requests with random prompts to an engine in this process; return their output tokens.

    Each request is sent at its arrival time. Outputs are greedy and have exactly the requested
    length.

    Args:
        engine: the running engine.
        jobs: arrival times, prompt lengths and output lengths.
        seed: seed of the random prompts.
        served: called after each finished request.

    Raises:
        RuntimeError: a request fails.
    """
    rng = random.Random(seed)
    loop = asyncio.get_running_loop()
    begin = loop.time()

    async def serve_one(job: WorkloadRequest, prompt: list[int]) -> list[int]:
        await asyncio.sleep(begin + job.arrival_seconds - loop.time())
        params = SamplingParams(temperature=0, max_tokens=job.num_output_tokens, ignore_eos=True)
        tokens: list[int] = []
        async with aclosing(engine.generate(prompt, params)) as deltas:
            async for delta in deltas:
                if delta.error:
                    raise RuntimeError(f"a request failed: {delta.error}")
                tokens += delta.token_ids
        served()
        return tokens

    prompts = [rng.choices(range(engine.model.vocab_size), k=job.num_prompt_tokens) for job in jobs]
    return await asyncio.gather(
        *(serve_one(job, tokens) for job, tokens in zip(jobs, prompts, strict=True))
    )


class RoundRobinLock:
    """Asyncio lock by which several engines run one at a time, in a fixed order.

    The load of other programs on a shared machine therefore affects all engines alike. An engine
    runs while it is in an `async with` block of the lock; no block is entered before all engines
    have called `start`.
    """

    def __init__(self, engines: int) -> None:
        self._barrier = asyncio.Barrier(engines)
        self._lock = asyncio.Lock()  # first come, first served

    async def start(self) -> None:
        """Wait until all engines have called this method."""
        await self._barrier.wait()

    async def end(self) -> None:
        """Wait until all engines have called this method: nothing disturbs their last turns."""
        await self._barrier.wait()

    async def __aenter__(self) -> None:
        await self._lock.acquire()

    async def __aexit__(self, *_: object) -> None:
        self._lock.release()


async def run_logged(
    config: EngineConfig, work: Callable[[Engine], Awaitable[None]]
) -> list[StepLogEvent]:
    """Start an engine, call `work` with it, and return the events of the engine's step log."""
    with tempfile.TemporaryDirectory(prefix="gllm-") as folder:
        log = Path(folder) / "steps.jsonl"
        async with Engine(replace(config, step_log=str(log))) as engine:
            await work(engine)
            await asyncio.sleep(LOG_DRAIN_SECONDS)
        return list(read_step_log(log))
