"""Engines and servers on this machine that serve workloads and return their step logs."""

import asyncio
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from gllm.commands.bench.real import RoundRobinLock, run_logged, serve_workload
from gllm.commands.bench.real_server import ClientRequest, start_server
from gllm.config.engine import EngineConfig
from gllm.engine.engine import Engine
from gllm.observability.step_log import StepLogEvent, read_step_log
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
    await turns.end()


class ServedLoad(NamedTuple):
    """Load that a server has served: its step log, and the requests as the client saw them."""

    events: list[StepLogEvent]
    requests: list[ClientRequest]


async def serve_over_http(
    config: EngineConfig, workloads: list[list[WorkloadRequest]], turns: RoundRobinLock
) -> ServedLoad:
    """Serve workloads with a server of their own, as `serve_round_robin` does with an engine."""
    with tempfile.TemporaryDirectory(prefix="gllm-") as folder:
        log = Path(folder) / "steps.jsonl"
        async with start_server(config, log) as server:
            await turns.start()
            for seed, jobs in enumerate(workloads):
                async with turns:
                    await server.serve_workload([WAKE_UP])
                    await server.serve_workload(jobs, seed)
            await turns.end()
        return ServedLoad(list(read_step_log(log)), server.served)


LoggedServer = Callable[[EngineConfig, list[WorkloadRequest]], list[StepLogEvent]]
"""Serves jobs with an engine; returns the step log."""


def serve_logged(config: EngineConfig, jobs: list[WorkloadRequest]) -> list[StepLogEvent]:
    """Serve jobs with an engine of their own; the step log. For callers without an event loop."""

    async def work(engine: Engine) -> None:
        await serve_workload(engine, jobs)

    return asyncio.run(run_logged(config, work))
