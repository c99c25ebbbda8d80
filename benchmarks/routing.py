"""Compare routing policies on three small engines.

Two pools: one of equal engines, and one in which the engines take 1, 2 and 4 times as long for a
step. Steps take a minimum time by sleeping, so that three engines fit on two cores. The load is
conversations with shared system prompts, at 0.7 of the requests per second that the pool serves
with all its seats taken. Each engine's cache holds a third of all conversations. Run as
`python -m benchmarks.routing`, or with `--simulate` in simulated time: the same policies and the
same scheduler with a cost model in place of the model.
"""

import argparse
import asyncio
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, NamedTuple

import aiohttp
import uvloop

from benchmarks.cpu.page import ForeignCpu, origin, page_path, write_results
from benchmarks.cpu.serving import free_port
from benchmarks.fleet_processes import FleetProcess, open_session, started
from gllm.commands.bench.client import RequestResult, request_body, run_load, send
from gllm.commands.bench.load import plan_load
from gllm.commands.bench.options import LoadConfig, ServeConfig
from gllm.observability.latency import RequestTimeline, collect_latencies, percentile
from gllm.routing.policy_registry import POLICIES, make_policy
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.cluster.cluster import simulate_cluster
from gllm.sim.cluster.router import PolicyRouter
from gllm.sim.costs.base import ConstantCostModel
from gllm.sim.deployment import Deployment
from gllm.sim.metrics.report import format_table
from gllm.sim.workloads.requests import make_workload

POOLS = {"equal": (0.03, 0.03, 0.03), "unequal": (0.02, 0.04, 0.08)}
"""Seconds of a step on each engine."""
WORKLOAD = "sessions:64,6,4,256,40,40"
LOAD_SHARE = 0.7
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS, CACHE_TOKENS, CONTEXT = 8, 64, 12 * 1024, 1024
TOKEN_BYTES = 6 * 2 * 2 * 32 * 4
"""Bytes of a token in the KV cache of the demo model in float32."""
VOCABULARY = 2048
CAPACITY_POLICY = "least-requests"
AIM_POOL, AIM_POLICY = "unequal", "predict"


class Figures(NamedTuple):
    """Figures of one load."""

    ttft_mean: float
    """Seconds."""
    ttft_p99: float
    tpot_mean: float
    tokens_per_second: float
    hit_share: float
    """Prompt tokens found in a prefix cache, 0 to 1."""
    requests: list[int]
    """Requests by engine."""


def summarize(
    lines: Sequence[RequestTimeline], hits: int, queries: int, requests: list[int]
) -> Figures:
    """Return the figures of finished requests."""
    latencies = collect_latencies(lines)
    begin, end = min(each.arrival for each in lines), max(each.times[-1] for each in lines)
    return Figures(
        fmean(latencies["ttft"]),
        percentile(latencies["ttft"], 99),
        fmean(latencies["tpot"]),
        sum(each.num_tokens for each in lines) / (end - begin),
        hits / max(1, queries),
        requests,
    )


# In simulated time.


def simulated_pool(pool: str) -> dict[str, Deployment]:
    """Return the engines of a pool as the simulator's deployments."""
    scheduler = SchedulerConfig(
        max_num_seqs=MAX_NUM_SEQS, max_num_batched_tokens=MAX_NUM_BATCHED_TOKENS
    )
    resolved = scheduler.resolve(1, CACHE_TOKENS // scheduler.block_size, CONTEXT)
    return {
        f"e{number}": Deployment("demo", [6], ConstantCostModel(seconds), resolved)
        for number, seconds in enumerate(POOLS[pool])
    }


def simulate(pool: str, policy: str, rate: float, count: int, seed: int) -> Figures:
    """Return the figures of one load in simulated time."""
    jobs = make_workload(WORKLOAD, count, rate, seed=seed)
    router = PolicyRouter(make_policy(policy, Random(seed)))
    runs = simulate_cluster(simulated_pool(pool), jobs, router).engines.values()
    return summarize(
        [each.line for run in runs for each in run.record.requests.values()],
        sum(run.stats.prefix_hits for run in runs),
        sum(run.stats.prefix_queries for run in runs),
        [len(run.record.requests) for run in runs],
    )


def simulated_capacity(pool: str, count: int, seed: int) -> float:
    """Return the sum of the requests per second that each engine serves alone, all queued."""
    total = 0.0
    for name, engine in simulated_pool(pool).items():
        jobs = make_workload(WORKLOAD, count // len(POOLS[pool]), 1.0, "static", seed)
        router = PolicyRouter(make_policy(CAPACITY_POLICY, Random(0)))
        record = simulate_cluster({name: engine}, jobs, router).engines[name].record
        total += len(jobs) / (record.end_time() - record.begin_time())
    return total


# With processes.


class RealPool:
    """Engine processes of a pool, and the router of one policy after the other."""

    def __init__(self, pool: str, session: aiohttp.ClientSession) -> None:
        self._pool = pool
        self._session = session
        self._hub = free_port()
        self._port = free_port()

    async def start_engines(self, stack: AsyncExitStack) -> None:
        """Start the engines; they dial the router until it is there."""
        engines = []
        for number, seconds in enumerate(POOLS[self._pool]):
            flags = ["--router", f"127.0.0.1:{self._hub}", "--name", f"e{number}"]
            flags += ["--debug-step-seconds", str(seconds), "--threads", "1", "--dtype", "float32"]
            flags += ["--max-num-seqs", str(MAX_NUM_SEQS)]
            flags += ["--max-num-batched-tokens", str(MAX_NUM_BATCHED_TOKENS)]
            flags += ["--kv-cache-memory", str(CACHE_TOKENS * TOKEN_BYTES)]
            engines.append(
                await stack.enter_async_context(started("gllm.serve", free_port(), flags))
            )
        for engine in engines:
            # Not /ready: the router starts later.
            await engine.wait_until(self._session, "/health")

    async def measure(self, policy: str, rate: float | None, count: int, seed: int) -> Figures:
        """Return the figures of one load; without a rate with all seats taken all the time."""
        flags = ["--hub", str(self._hub), "--policy", policy]
        async with started("gllm.commands.router", self._port, flags) as router:
            await router.wait_until(self._session, "/engines", len(POOLS[self._pool]))
            await router.wait_until(self._session, "/ready")
            async with self._session.post(f"{router.url}/reset_prefix_cache") as response:
                response.raise_for_status()
            before = await self._rows(router)
            results = await self._send_load(router, rate, count, seed)
            await asyncio.sleep(1.5)
            after = await self._rows(router)
        if failed := [each.detail for each in results if each.failure]:
            raise RuntimeError(f"{len(failed)} requests failed: {failed[0]}")

        def growth(key: str) -> list[int]:
            return [after[name]["stats"][key] - before[name]["stats"][key] for name in after]

        return summarize(
            [each.timeline for each in results],
            sum(growth("prefix_hits")),
            sum(growth("prefix_queries")),
            [after[name]["num_dispatched"] - before[name]["num_dispatched"] for name in after],
        )

    async def _send_load(
        self, router: FleetProcess, rate: float | None, count: int, seed: int
    ) -> list[RequestResult]:
        load = LoadConfig(WORKLOAD, count, seed=seed)
        config = ServeConfig(load=load, request_rate=rate or float("inf"), temperature=0.0)
        planned = plan_load(config, VOCABULARY)
        bodies = [request_body(config, "demo", *each) for each in enumerate(planned)]
        url = f"{router.url}/v1/completions"

        async def send_one(index: int) -> RequestResult:
            each = planned[index]
            body = bodies[index]
            return await send(self._session, url, body, each.prompt_tokens, each.session)

        concurrency = None if rate else 3 * MAX_NUM_SEQS * len(POOLS[self._pool]) // 2
        result = await run_load([each.arrival for each in planned], send_one, concurrency, False)
        return [result.outcomes[index] for index in range(count)]

    async def _rows(self, router: FleetProcess) -> dict[str, dict[str, Any]]:
        """Return the router's rows of engines by name, with their statistics by name."""
        async with self._session.get(f"{router.url}/engines") as response:
            rows = (await response.json())["engines"]
        return {row["name"]: row for row in sorted(rows, key=lambda row: str(row["name"]))}


Rounds = dict[str, dict[str, list[Figures]]]
"""Figures of all rounds by pool and policy."""


def measure_simulated(options: argparse.Namespace) -> tuple[Rounds, dict[str, list[float]]]:
    """Simulate all rounds; return their figures and the capacities by pool."""
    figures: Rounds = {pool: {name: [] for name in options.policies} for pool in options.pools}
    capacities: dict[str, list[float]] = {pool: [] for pool in options.pools}
    for pool in options.pools:
        for seed in range(options.rounds):
            capacity = simulated_capacity(pool, options.requests, seed)
            capacities[pool].append(capacity)
            for policy in options.policies:
                each = simulate(pool, policy, LOAD_SHARE * capacity, options.requests, seed)
                figures[pool][policy].append(each)
    return figures, capacities


async def measure_real(options: argparse.Namespace) -> tuple[Rounds, dict[str, list[float]]]:
    """Measure all rounds; return their figures and the capacities by pool."""
    figures: Rounds = {pool: {name: [] for name in options.policies} for pool in options.pools}
    capacities: dict[str, list[float]] = {pool: [] for pool in options.pools}
    for pool in options.pools:
        async with AsyncExitStack() as stack:
            session = await stack.enter_async_context(open_session())
            engines = RealPool(pool, session)
            await engines.start_engines(stack)
            for seed in range(options.rounds):
                full = await engines.measure(CAPACITY_POLICY, None, options.requests, seed)
                capacity = full.tokens_per_second / mean_output_tokens(options.requests, seed)
                capacities[pool].append(capacity)
                for policy in options.policies:
                    each = await engines.measure(
                        policy, LOAD_SHARE * capacity, options.requests, seed
                    )
                    figures[pool][policy].append(each)
                    print(pool, seed, policy, each, flush=True)
    return figures, capacities


def mean_output_tokens(count: int, seed: int) -> float:
    """Return the mean output tokens per request of the load."""
    return fmean(job.num_output_tokens for job in make_workload(WORKLOAD, count, seed=seed))


HEADER = (
    "policy", "TTFT mean, ms", "of each round", "TTFT p99, ms", "TPOT mean, ms", "tokens/s",
    "cached, %", "requests by engine",
)  # fmt: skip


def format_row(policy: str, rounds: Sequence[Figures]) -> list[str]:
    """Return the row of a policy: medians over its rounds."""
    middle = sorted(rounds, key=lambda each: each.ttft_mean)[len(rounds) // 2]
    return [
        policy,
        f"{1e3 * median(each.ttft_mean for each in rounds):,.0f}",
        " ".join(f"{1e3 * each.ttft_mean:,.0f}" for each in rounds),
        f"{1e3 * median(each.ttft_p99 for each in rounds):,.0f}",
        f"{1e3 * median(each.tpot_mean for each in rounds):.1f}",
        f"{median(each.tokens_per_second for each in rounds):,.0f}",
        f"{100 * median(each.hit_share for each in rounds):.0f}",
        " ".join(map(str, middle.requests)),
    ]


def count_wins(figures: Mapping[str, Sequence[Figures]], policy: str) -> int:
    """Return the number of rounds in which a policy has the lowest mean TTFT."""
    return sum(
        mine.ttft_mean <= min(others[index].ttft_mean for others in figures.values())
        for index, mine in enumerate(figures[policy])
    )


def format_page(figures: Rounds, capacities: Mapping[str, Sequence[float]], head: str) -> str:
    """Format the figures in words and tables."""
    parts = [
        f"{head} Conversations `{WORKLOAD}` at {LOAD_SHARE} of capacity with Poisson arrivals; "
        f"{MAX_NUM_SEQS} seats, {MAX_NUM_BATCHED_TOKENS} tokens per step and {CACHE_TOKENS:,} "
        "tokens of KV cache per engine. Rows are medians over the rounds, requests by engine those "
        "of the round with the median TTFT."
    ]
    for pool, policies in figures.items():
        rates = ", ".join(f"{LOAD_SHARE * each:.1f}" for each in capacities[pool])
        steps = ", ".join(f"{1e3 * each:.0f}" for each in POOLS[pool])
        rows = [format_row(policy, rounds) for policy, rounds in policies.items()]
        parts.append(f"## {pool} engines: steps of {steps} ms, {rates} requests/s")
        parts.append(format_table(list(HEADER), rows))
        if pool == AIM_POOL and AIM_POLICY in policies:
            rounds = len(policies[AIM_POLICY])
            parts.append(
                f"`{AIM_POLICY}` has the lowest mean TTFT in {count_wins(policies, AIM_POLICY)} of "
                f"{rounds} rounds (aim: all)."
            )
    return "\n\n".join(parts)


def main() -> None:
    """Measure, print the figures and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--simulate", action="store_true", help="in simulated time")
    parser.add_argument("--requests", type=int, default=300, help="per policy and round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pools", nargs="+", choices=POOLS, default=list(POOLS))
    parser.add_argument("--policies", nargs="+", choices=POLICIES, default=list(POLICIES))
    parser.add_argument("--output", type=page_path)
    options = parser.parse_args()
    foreign = ForeignCpu()
    if options.simulate:
        figures, capacities = measure_simulated(options)
    else:
        figures, capacities = uvloop.run(measure_real(options))
    head = origin("benchmarks.routing")
    if not options.simulate:
        head += f" Others used {foreign.cores():.2f} cores."
    page = "routing-simulated" if options.simulate else "routing"
    output = options.output or Path(f"docs/benchmarks/{page}.md")
    results = {
        "capacities": capacities,
        "figures": {
            pool: {name: [each._asdict() for each in rounds] for name, rounds in policies.items()}
            for pool, policies in figures.items()
        },
    }
    title = "Routing policies" + (", simulated" if options.simulate else "")
    write_results(output, title, format_page(figures, capacities, head), results)


if __name__ == "__main__":
    main()
