"""Engines on this machine that serve workloads for an experiment and return their step logs."""

import asyncio
from collections.abc import Callable

from gllm.commands.bench.real import RoundRobinLock, run_logged, serve_workload
from gllm.config.engine import EngineConfig
from gllm.engine.engine import Engine
from gllm.observability.step_log import StepLogEvent
from gllm.sim.workloads.requests import WorkloadRequest

WAKE_UP = WorkloadRequest(0.0, 16, 8)
"""Short request that wakes an engine up before its turn."""


async def serve_round_robin(
    engine: Engine, workloads: list[list[WorkloadRequest]], turns: RoundRobinLock
) -> None:
    """Serve workloads, each in a turn of its own and after a request that wakes the engine up.

    An engine that has waited for seconds while others worked finds its caches cold.
    """
    await turns.start()
    for seed, jobs in enumerate(workloads):
        async with turns:
            await serve_workload(engine, [WAKE_UP])
            await serve_workload(engine, jobs, seed)


LoggedServer = Callable[[EngineConfig, list[WorkloadRequest]], list[StepLogEvent]]
"""Serves jobs with an engine; returns the step log."""


def serve_logged(config: EngineConfig, jobs: list[WorkloadRequest]) -> list[StepLogEvent]:
    """Serve jobs with an engine of their own; the step log. For callers without an event loop."""

    async def work(engine: Engine) -> None:
        await serve_workload(engine, jobs)

    return asyncio.run(run_logged(config, work))
