"""Measure what a router costs: added latency, tokens per second, CPU time with 100 engines.

Four parts: one engine asked by its own frontend and through a router, in turns; a router with 100
idle engines; the same with 100 busy ones; one decision of each policy. The 100 engines are fake:
they speak the fleet's messages and compute nothing. Run as `python -m benchmarks.router`; it prints
the figures and writes them to a page of docs/benchmarks.
"""

import argparse
import asyncio
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import aiohttp
import msgspec
import uvloop

from benchmarks.cpu.page import ForeignCpu, origin, page_path, write_results
from benchmarks.cpu.serving import free_port
from benchmarks.fleet_processes import FleetProcess, open_session, started
from benchmarks.frontend import one_connection
from gllm.commands.bench.client import RequestResult, send
from gllm.observability.latency import collect_latencies, percentile
from gllm.routing.policy_registry import POLICIES, make_policy
from gllm.routing.prefix_index import PromptBlockHashes
from gllm.routing.state import EngineSnapshot, RoutingRequest
from gllm.scheduler.plan import SchedulerStats
from gllm.scheduler.step_cost import StepCostCoefficients
from gllm.sim.metrics.report import format_table

PATHS = ("engine", "router")
"""Ways to the engine."""
IDLE_CORES_AIM = 0.1


@asynccontextmanager
async def fake_engines(hub: int, count: int) -> AsyncIterator[None]:
    """Attach fake engines to a router; end them at the end."""
    command = [sys.executable, "-m", "benchmarks.fake_engines", f"127.0.0.1:{hub}"]
    process = await asyncio.create_subprocess_exec(
        *command, "--count", str(count), stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        if b"attached" not in await asyncio.wait_for(process.stdout.readline(), 120):
            raise RuntimeError("the fake engines have ended")
        yield
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


# One engine, directly and through a router.


def request_body(tokens: int, prompt_words: int, seed: int) -> bytes:
    """Return a streamed completion with a prompt of its own."""
    prompt = " ".join(Random(seed).choices(("fox", "boat", "moon", "bear", "lamp"), k=prompt_words))
    fields = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    stream = {"stream": True, "stream_options": {"include_usage": True}}
    return msgspec.json.encode(fields | stream)


async def measure_latency(
    session: aiohttp.ClientSession, urls: dict[str, str], count: int
) -> dict[str, list[RequestResult]]:
    """Send short requests one at a time, to each URL in turn."""
    results: dict[str, list[RequestResult]] = {name: [] for name in urls}
    for number in range(-5, count):
        for name, url in urls.items():
            body = request_body(16, 20, number)
            result = await send(session, f"{url}/v1/completions", body, 20)
            if result.failure:
                raise RuntimeError(f"{name}: {result.failure}: {result.detail}")
            if number >= 0:
                results[name].append(result)
    return results


async def measure_throughput(
    session: aiohttp.ClientSession, url: str, streams: int, tokens: int, seed: int
) -> float:
    """Return the tokens per second of concurrent streams."""
    bodies = [request_body(tokens, 20, 1000 * seed + number) for number in range(streams)]
    begin = time.monotonic()
    results = await asyncio.gather(
        *(send(session, f"{url}/v1/completions", body, 20) for body in bodies)
    )
    if failed := [each.detail for each in results if each.failure]:
        raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")
    return streams * tokens / (time.monotonic() - begin)


async def measure_one_engine(options: argparse.Namespace) -> dict[str, Any]:
    """Return latencies and throughput of one engine, directly and through a router."""
    hub = free_port()
    async with AsyncExitStack() as stack:
        session = await stack.enter_async_context(open_session())
        router = await stack.enter_async_context(
            started("gllm.commands.router", free_port(), ["--hub", str(hub)])
        )
        flags = ["--router", f"127.0.0.1:{hub}", "--name", "e0", "--threads", "1"]
        engine = await stack.enter_async_context(started("gllm.serve", free_port(), flags))
        await engine.wait_until(session, "/ready")
        await router.wait_until(session, "/engines", 1)
        await router.wait_until(session, "/ready")
        urls = {"engine": engine.url, "router": router.url}
        results = await measure_latency(session, urls, options.requests)
        rates: dict[str, list[float]] = {name: [] for name in urls}
        for seed in range(-1, options.rounds):
            for name, url in urls.items():
                rate = await measure_throughput(
                    session, url, options.streams, options.tokens, seed + 2
                )
                if seed >= 0:
                    rates[name].append(rate)
    latencies = {
        name: collect_latencies([each.timeline for each in values])
        for name, values in results.items()
    }
    return {
        "latency": {
            name: {
                f"{metric}_p{percent}": percentile(values[metric], percent)
                for metric in ("ttft", "e2el")
                for percent in (50, 99)
            }
            for name, values in latencies.items()
        },
        "tokens_per_second": rates,
    }


# Many fake engines.


async def measure_idle(router: FleetProcess, seconds: float) -> float:
    """Return the cores that a router uses while nothing is requested."""
    begin, cpu = time.monotonic(), router.own_cpu_seconds
    await asyncio.sleep(seconds)
    return (router.own_cpu_seconds - cpu) / (time.monotonic() - begin)


async def measure_busy(router: FleetProcess, options: argparse.Namespace) -> dict[str, float]:
    """Return requests and tokens per second, and per CPU second of the router."""
    tokens, connections = options.fake_tokens, options.connections
    await one_connection(router.port, "completions", tokens, 1)
    begin, cpu = time.monotonic(), router.own_cpu_seconds
    await asyncio.gather(
        *(
            one_connection(router.port, "completions", tokens, options.fake_rounds)
            for _ in range(connections)
        )
    )
    seconds, cpu = time.monotonic() - begin, router.own_cpu_seconds - cpu
    requests = connections * options.fake_rounds
    return {
        "requests_per_second": requests / seconds,
        "requests_per_core": requests / cpu,
        "tokens_per_core": requests * tokens / cpu,
        "cores": cpu / seconds,
    }


async def measure_many_engines(options: argparse.Namespace) -> dict[str, Any]:
    """Return the figures of a router with fake engines, idle and busy."""
    idle, busy = [], []
    async with open_session() as session:
        for _ in range(options.rounds):
            hub = free_port()
            # The host that `one_connection` names.
            flags = ["--hub", str(hub), "--allowed-hosts", "x"]
            async with started("gllm.commands.router", free_port(), flags) as router:
                await router.wait_until(session, "/health")
                async with fake_engines(hub, options.engines):
                    await router.wait_until(session, "/engines", options.engines)
                    await router.wait_until(session, "/ready")
                    await asyncio.sleep(2.0)
                    idle.append(await measure_idle(router, options.idle_seconds))
                    busy.append(await measure_busy(router, options))
    return {
        "idle_cores": idle,
        **{key: [each[key] for each in busy] for key in busy[0]},
    }


# One decision.


def decision_seconds(policy: str, num_engines: int, num_decisions: int = 200) -> float:
    """Return the median time in which a policy chooses one of so many busy engines."""
    rng = Random(0)
    prompt = list(range(1000))
    chain = list(PromptBlockHashes(prompt, 16))
    chosen = make_policy(policy, rng)
    engines = []
    for number in range(num_engines):
        name = f"e{number}"
        chosen.prefixes.on_events(name, 0, chain[: rng.randrange(len(chain))], [], is_cleared=True)
        stats = SchedulerStats(
            running=rng.randrange(32),
            waiting=rng.randrange(4),
            waiting_tokens=rng.randrange(2000),
            decode_context_tokens=rng.randrange(20_000),
        )
        costs = StepCostCoefficients(0.02, 1e-4, 0.0, 1e-5, 1e-8)
        engines.append(EngineSnapshot(name, "mixed", "ready", stats, costs, 4096))
    times = []
    for _ in range(num_decisions):
        request = RoutingRequest(len(prompt), PromptBlockHashes(prompt, 16), session="s")
        begin = time.perf_counter()
        chosen.choose(request, engines)
        times.append(time.perf_counter() - begin)
    return median(times)


# The page.


def format_page(results: dict[str, Any], options: argparse.Namespace, head: str) -> str:
    """Format the figures in words and tables."""
    latency, rates = results["one"]["latency"], results["one"]["tokens_per_second"]
    columns = ("ttft_p50", "ttft_p99", "e2el_p50", "e2el_p99")
    rows = [
        [
            name,
            *(f"{1e3 * latency[name][key]:.2f}" for key in columns),
            f"{median(rates[name]):,.0f}",
        ]
        for name in PATHS
    ]
    added = [f"{1e3 * (latency['router'][key] - latency['engine'][key]):+.2f}" for key in columns]
    share = median(
        through / direct for through, direct in zip(rates["router"], rates["engine"], strict=True)
    )
    rows.append(["difference", *added, f"{share:.2f} x"])
    many = {key: median(values) for key, values in results["many"].items()}
    decisions = [
        [name, *(f"{1e6 * seconds:.0f}" for seconds in values)]
        for name, values in results["decisions"].items()
    ]
    return "\n\n".join(
        [
            head,
            f"## One engine\n\n{options.requests} requests of 16 tokens one at a time, by the "
            f"engine's own frontend and through a router in turns; then {options.streams} streams "
            f"of {options.tokens} tokens, medians of {options.rounds} rounds. Client, router and "
            "engine share the cores.",
            format_table(
                ["asked", "TTFT p50, ms", "TTFT p99", "E2EL p50", "E2EL p99", "tokens/s"], rows
            ),
            f"## {options.engines} engines\n\nThe router alone uses {many['idle_cores']:.3f} cores "
            f"while all are idle (aim: below {IDLE_CORES_AIM}). Busy with {options.connections} "
            f"connections and answers of {options.fake_tokens} tokens it serves "
            f"{many['requests_per_second']:,.0f} requests/s with {many['cores']:.2f} cores: "
            f"{many['requests_per_core']:,.0f} requests/s and {many['tokens_per_core']:,.0f} "
            f"tokens/s per core. Medians of {options.rounds} rounds.",
            "## One decision\n\nMedian time in which a policy chooses an engine for a prompt of "
            "1,000 tokens, in us; the hashes of the prompt's blocks included.",
            format_table(["policy", "3 engines", "100 engines"], decisions),
        ]
    )


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure all parts."""
    return {
        "one": uvloop.run(measure_one_engine(options)),
        "many": uvloop.run(measure_many_engines(options)),
        "decisions": {
            name: [decision_seconds(name, count) for count in (3, 100)] for name in POLICIES
        },
    }


def main() -> None:
    """Measure, print the figures and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--requests", type=int, default=300, help="to measure latency")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=200, help="per stream")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--engines", type=int, default=100, help="fake engines")
    parser.add_argument("--idle-seconds", type=float, default=20.0)
    parser.add_argument("--connections", type=int, default=200, help="to busy fake engines")
    parser.add_argument("--fake-tokens", type=int, default=32, help="per request to them")
    parser.add_argument("--fake-rounds", type=int, default=10, help="requests per connection")
    parser.add_argument("--output", type=page_path, default=Path("docs/benchmarks/router.md"))
    options = parser.parse_args()
    foreign = ForeignCpu()
    results = measure(options)
    head = f"{origin('benchmarks.router')} Others used {foreign.cores():.2f} cores."
    page = format_page(results, options, head)
    write_results(options.output, "What a router costs", page, results)


if __name__ == "__main__":
    main()
