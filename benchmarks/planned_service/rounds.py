"""Runs of a plan: its engines under `gllm up`, a load of `gllm bench serve`, its comparison."""

import json
import resource
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

from benchmarks.fleet_processes import ready_service
from benchmarks.planned_service.planning import (
    MAX_NUM_SEQS,
    NUM_ENGINES,
    OUTPUT_TOKENS,
    WORKLOAD,
    run_gllm,
    select_engines,
)
from gllm.plan.serving_plan import ServingPlan, write_plan

MIN_WAVES = 6
"""Requests per seat of an engine, at least, when its highest rate is measured."""
FILL_FACTOR = 2
"""Requests in progress per seat in that measurement, so that no seat is empty where the router
divides them unevenly."""
BENCH_FIGURES = ("completed", "failed", "request_throughput", "median_ttft_ms", "median_tpot_ms")
"""Figures that are kept of `gllm bench serve`."""
DETAILS = ("start_times", "ttfts", "itls")
"""Its lists of single requests."""


async def run_bench(url: str, num_requests: int, seed: int, flags: Sequence[str]) -> dict[str, Any]:
    """Load a server with `gllm bench serve`; return its figures and the cores that it used.

    Raises:
        RuntimeError: the command has failed.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = ["bench", "serve", "--base-url", url, "--workload", WORKLOAD]
        command += ["--num-warmups", "0", "--num-prompts", str(num_requests), "--seed", str(seed)]
        used = _children_cpu_seconds()
        await run_gllm([*command, "--no-progress", "--save-result", file.name, *flags])
        used = _children_cpu_seconds() - used
        result = json.loads(Path(file.name).read_bytes())
    figures = {name: result[name] for name in (*BENCH_FIGURES, *DETAILS) if name in result}
    return {**figures, "client_cores": used / result["duration"]}


def _children_cpu_seconds() -> float:
    """Return the CPU seconds of child processes that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def measure_steady_rate(
    starts: Sequence[float], ttfts: Sequence[float], itls: Sequence[Sequence[float]]
) -> float:
    """Return the tokens per second between the first token and the start of the last request.

    All seats are taken in that time. The end, when they empty one by one, does not count.

    Args:
        starts: Time of each request in seconds.
        ttfts: Time to the first token of each, in seconds.
        itls: Times between the tokens of each, in seconds.
    """
    times: list[float] = []
    for start, ttft, gaps in zip(starts, ttfts, itls, strict=True):
        times += accumulate([start + ttft, *gaps])
    begin, end = min(times), max(starts)
    return sum(begin < time <= end for time in times) / (end - begin)


async def measure_scaling(plan: ServingPlan, capacity: float, seconds: float) -> list[float]:
    """Return the highest rates of one engine and of two, in requests per second.

    Args:
        plan: Of two engines.
        capacity: Requests per second that it is expected to serve.
        seconds: Length of each load, roughly.
    """
    rates = []
    for num_engines in range(1, NUM_ENGINES + 1):
        seats = MAX_NUM_SEQS * num_engines
        count = round(seconds * capacity * num_engines / NUM_ENGINES)
        # Whole waves: a last one with empty seats would be slower per request.
        count = seats * max(MIN_WAVES, count // seats)
        async with ready_service(select_engines(plan, num_engines)) as url:
            flags = ["--max-concurrency", str(FILL_FACTOR * seats), "--save-detailed"]
            figures = await run_bench(url, count, 0, flags)
        starts, ttfts, itls = (figures[name] for name in DETAILS)
        rates.append(measure_steady_rate(starts, ttfts, itls) / OUTPUT_TOKENS)
    return rates


async def measure_round(
    plan: ServingPlan, seconds: float, seed: int, folder: Path
) -> dict[str, Any]:
    """Start a plan, load it at its rate, and return the comparison with its figures.

    Args:
        plan: The plan.
        seconds: Length of the load.
        seed: Of arrivals and prompts.
        folder: For the plan and its step logs.
    """
    assert plan.expected is not None, "gllm plan search writes figures"
    started = select_engines(plan, len(plan.engines))
    with tempfile.TemporaryDirectory(dir=folder) as own:
        path = Path(own) / "plan.yaml"
        write_plan(started, path)
        async with ready_service(started, Path(own)) as url:
            rate = plan.expected.rate
            flags = ["--request-rate", f"{rate:.6g}"]
            client = await run_bench(url, round(rate * seconds), seed, flags)
        logs = [str(Path(own) / f"{name}.jsonl") for name in started.engines]
        rows = json.loads(await run_gllm(["plan", "diff", str(path), *logs, "--json"]))
    return {**client, "figures": {row["name"]: row for row in rows}}
