"""One prefill and one decode engine against two mixed ones, under the same load."""

import argparse
import asyncio
import os
from collections.abc import Callable
from statistics import median
from typing import Any

import aiohttp

from benchmarks.cpu.watch import cpu_seconds
from benchmarks.disaggregation.engines import ROLES, Fleet, read_metrics, running_fleet
from benchmarks.fleet_processes import open_session
from gllm.commands.bench.client import RequestResult, request_body, run_load, send
from gllm.commands.bench.load import PlannedRequest, plan_load
from gllm.commands.bench.options import LoadConfig, ServeConfig
from gllm.commands.bench.report import summarize

TRACE, LENGTH_SCALE, LONGEST = "azure-conv", 0.2, 1000
"""Lengths of the requests; the demo model's context is 1,024 tokens."""
LINK_GIGABYTES = 0.02
"""GB/s of the imitated link between the engines; the page says what that is to a larger model."""
LOAD_SHARE = 0.6
"""Rate of the requests, as a share of what two mixed engines serve."""
VOCABULARY = 1000
Row = dict[str, Any]


def plan(count: int, rate: float, seed: int) -> tuple[ServeConfig, list[PlannedRequest]]:
    """Return the requests of a round."""
    lengths = LoadConfig(TRACE, count, scale_length=LENGTH_SCALE, max_length=LONGEST, seed=seed)
    config = ServeConfig(load=lengths, request_rate=rate, progress=False)
    return config, plan_load(config, VOCABULARY)


async def measure_load(options: argparse.Namespace, progress: Callable[[str], None]) -> list[Row]:
    """Return a row per round and setup, in alternating order."""
    rate = await _measure_capacity(options.requests) * LOAD_SHARE
    progress(f"load: {rate:.1f} requests/s")
    rows = []
    for turn in range(options.rounds):
        for setup in list(ROLES) if turn % 2 == 0 else list(reversed(ROLES)):
            async with (
                open_session() as session,
                running_fleet(session, setup, f"mock:{LINK_GIGABYTES}") as fleet,
            ):
                await _send_all(session, fleet, *plan(20, rate, 1000 + turn))
                row = await _measure(session, fleet, setup, plan(options.requests, rate, turn))
            rows.append({**row, "rate": rate, "turn": turn})
            progress(
                f"load: {setup}: p99 TTFT {row['p99_ttft_ms']:.0f} ms, "
                f"p99 TPOT {row['p99_tpot_ms']:.1f} ms, {row['failed']} failed"
            )
    return rows


async def _measure_capacity(count: int) -> float:
    """Return the requests per second that two mixed engines serve when all arrive at once."""
    async with (
        open_session() as session,
        running_fleet(session, "mixed", f"mock:{LINK_GIGABYTES}") as fleet,
    ):
        await _send_all(session, fleet, *plan(20, 100.0, 998))
        _, seconds = await _send_all(session, fleet, *plan(count, 1e5, 999))
    return count / seconds


async def _measure(
    session: aiohttp.ClientSession,
    fleet: Fleet,
    setup: str,
    planned: tuple[ServeConfig, list[PlannedRequest]],
) -> Row:
    """Return the figures of one round."""
    before = [await read_metrics(session, engine) for engine in fleet.engines]
    cpu = [each.cpu_seconds for each in (fleet.router, *fleet.engines)]
    own = cpu_seconds([os.getpid()])
    outcomes, seconds = await _send_all(session, fleet, *planned)
    own = cpu_seconds([os.getpid()]) - own
    cpu = [
        each.cpu_seconds - begin
        for each, begin in zip((fleet.router, *fleet.engines), cpu, strict=True)
    ]
    after = [await read_metrics(session, engine) for engine in fleet.engines]

    def total(name: str, outcome: str = "") -> float:
        key = name, outcome
        return sum(new[key] - old[key] for new, old in zip(after, before, strict=True))

    return {
        "setup": setup,
        **summarize(outcomes, seconds, (50.0, 99.0)),
        "client_cores": own / seconds,
        "router_cores": cpu[0] / seconds,
        "engine_cores": [each / seconds for each in cpu[1:]],
        "num_fetched": total("fetches_total", "complete"),
        "num_failed_fetches": total("fetches_total", "failed"),
        "num_fetched_tokens": total("fetched_tokens_total"),
        "fetched_bytes": total("fetched_bytes_total"),
        "fetch_seconds": total("fetch_seconds_total"),
        "held_blocks": sum(each["held_blocks", ""] for each in after),
    }


async def _send_all(
    session: aiohttp.ClientSession,
    fleet: Fleet,
    config: ServeConfig,
    load: list[PlannedRequest],
) -> tuple[list[RequestResult], float]:
    """Send requests to the router at their times; return the results and the duration."""
    url = fleet.router.url + config.endpoint
    bodies = [request_body(config, "demo", *each) for each in enumerate(load)]

    async def send_one(place: int) -> RequestResult:
        return await send(session, url, bodies[place], load[place].prompt_tokens)

    result = await run_load([each.arrival for each in load], send_one, None, False)
    await asyncio.sleep(0.5)
    return [result.outcomes[place] for place in sorted(result.outcomes)], result.seconds


def median_of(rows: list[Row], key: str) -> float:
    """Return the median over rounds."""
    return median(row[key] for row in rows)
