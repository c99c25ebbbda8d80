"""Servers that a command starts on this machine."""

import asyncio
from pathlib import Path

import pytest

from gllm.commands.bench.real_server import RealServer, changed_flags, pair_requests, start_server
from gllm.config.engine import EngineConfig
from gllm.engine.engine import EngineError
from gllm.observability.step_log import read_step_log
from gllm.sim.metrics.run_record import build_run_record
from gllm.sim.workloads.requests import WorkloadRequest


def test_a_server_gets_what_differs_from_the_defaults() -> None:
    config = EngineConfig.from_options(
        "demo", pipeline_parallel_size=2, threads=1, policy="sarathi", prefix_cache=False
    )
    assert changed_flags(config) == {
        "model": "demo",
        "pipeline-parallel-size": 2,
        "threads": 1,
        "policy": "sarathi",
        "prefix-cache": False,
    }


@pytest.mark.full
def test_a_real_server_serves_over_http_and_one_that_ends_is_an_error(tmp_path: Path) -> None:
    jobs = [WorkloadRequest(0.0, 16, 4), WorkloadRequest(0.01, 20, 6)]
    config = EngineConfig.from_options("demo", threads=1)

    async def serve(config: EngineConfig, log: Path) -> RealServer:
        async with start_server(config, log) as server:
            await server.serve_workload(jobs)
        return server

    served = asyncio.run(serve(config, tmp_path / "steps.jsonl")).served
    events = list(read_step_log(tmp_path / "steps.jsonl"))
    run = build_run_record(events)
    pairs = pair_requests(served, events, run)
    assert [line.num_tokens for line, _ in pairs] == [4, 6]
    for line, record in pairs:
        assert line.arrival < record.line.arrival
        assert all(map(float.__lt__, record.line.times, line.times))
    missing = EngineConfig.from_options(str(tmp_path / "missing"))
    with pytest.raises(EngineError, match=r"is measured does not start: .*missing"):
        asyncio.run(serve(missing, tmp_path / "none.jsonl"))
