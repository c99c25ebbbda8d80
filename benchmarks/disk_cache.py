"""Measure what a disk tier of the prefix cache gains after a restart, and what it costs otherwise.

Restart: a server with an empty folder computes a conversation; after its restart the same
conversation goes on. Its time to first token is compared with that of a server without a tier.
Cost: two servers, one with a tier, get the same load in turns, of prompts that nobody has seen.
Run as `python -m benchmarks.disk_cache`; it prints the figures and writes them to
docs/benchmarks/disk-cache.md.
"""

import argparse
import asyncio
import random
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import msgspec
import uvloop

from benchmarks.confidence import format_range, median_interval
from benchmarks.cpu.page import ForeignCpu, origin, page_path, write_results
from benchmarks.recovery import LoadedServer, serving
from gllm.commands.bench.client import RequestResult
from gllm.deploy.metrics_scrape import parse_metrics
from gllm.models.hub import resolve_model
from gllm.sim.metrics.report import format_table

NUM_TOKEN_IDS = 1000
"""Prompts are random token ids from 300 up to so many more, which the demo model has too."""
NUM_ANSWER_TOKENS = 32
"""Tokens of each answer of the conversation."""


class MeasuredServer:
    """A server, and its address for metrics."""

    def __init__(self, server: LoadedServer) -> None:
        self.server = server

    async def metric(self, name: str) -> float:
        """Return the value of a metric without a label of its own."""
        async with (
            aiohttp.ClientSession() as session,
            session.get(f"{self.server.url}/metrics") as answer,
        ):
            return parse_metrics(await answer.text(), 0.0).value(name)

    async def answer(self, prompt: list[int]) -> RequestResult:
        """Send one prompt. Raises RuntimeError if it fails."""
        (result,) = await self.server.send_all([make_body(prompt, NUM_ANSWER_TOKENS)])
        if result.failure:
            raise RuntimeError(f"{result.failure}: {result.detail}")
        return result

    async def wait_until_stored(self, num_blocks: int) -> None:
        """Wait until so many blocks are on disk."""
        async with asyncio.timeout(120):
            while await self.metric("kv_disk_blocks") < num_blocks:
                await asyncio.sleep(0.1)


def make_body(prompt: list[int], max_tokens: int) -> bytes:
    """Return the JSON body of a greedy streamed completion."""
    return msgspec.json.encode(
        {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0.0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    )


def make_prompt(num_tokens: int, seed: str) -> list[int]:
    """Return random token ids."""
    choice = random.Random(seed)
    return [300 + choice.randrange(NUM_TOKEN_IDS) for _ in range(num_tokens)]


async def measure_restart(
    folder: Path, flags: list[str], num_tokens: int, number: int
) -> dict[str, float | bool]:
    """Measure one conversation, cold and after a restart with its blocks on disk."""
    # The computed tokens have taught the driver the cost of a step, as in a server that runs.
    warm_up = [make_prompt(600, f"warm-up {number} {index}") for index in range(3)]
    prompt = make_prompt(num_tokens, f"conversation {number}")
    async with serving(folder, flags) as started:
        cold = MeasuredServer(started)
        for each in warm_up:
            await cold.answer(each)
        expected = await cold.answer(prompt)
    with tempfile.TemporaryDirectory() as disk:
        with_disk = [*flags, "--kv-cache-disk", f"{disk}:8GiB"]
        async with serving(folder, with_disk) as started:
            first = MeasuredServer(started)
            await first.answer(prompt)
            await first.wait_until_stored(num_tokens // 16)
        async with serving(folder, with_disk) as started:
            second = MeasuredServer(started)
            for each in warm_up:
                await second.answer(each)
            again = await second.answer(prompt)
            seconds = await second.metric("kv_disk_read_seconds_total")
            num_bytes = await second.metric("kv_disk_read_bytes_total")
            num_hits = await second.metric("external_prefix_cache_hits_total")
    assert expected.timeline.ttft is not None
    assert again.timeline.ttft is not None
    return {
        "cold_ttft": expected.timeline.ttft,
        "warm_ttft": again.timeline.ttft,
        "read_seconds": seconds,
        "read_bytes": num_bytes,
        "hit_tokens": num_hits,
        "is_same_text": expected.text_parts == again.text_parts,
    }


async def measure_cost(folder: Path, flags: list[str], options: argparse.Namespace) -> list[Any]:
    """Return the tokens per second of both servers in each round, without and with a tier."""
    rounds = []
    with tempfile.TemporaryDirectory() as disk:
        with_disk = [*flags, "--kv-cache-disk", f"{disk}:{options.disk_size}"]
        async with serving(folder, flags) as off, serving(folder, with_disk) as on:
            for number in range(-1, options.cost_rounds):
                row = {}
                servers = [("off", off), ("on", on)]
                for name, server in servers if number % 2 else reversed(servers):
                    bodies = [
                        make_body(
                            make_prompt(options.input_tokens, f"{number}-{index}"),
                            options.output_tokens,
                        )
                        for index in range(options.streams)
                    ]
                    begin = time.monotonic()
                    results = await server.send_all(bodies)
                    elapsed = time.monotonic() - begin
                    if any(result.failure for result in results):
                        raise RuntimeError("a request has failed")
                    num_tokens = options.input_tokens + options.output_tokens
                    row[name] = options.streams * num_tokens / elapsed
                    await asyncio.sleep(0.5)
                if number >= 0:
                    rounds.append(row)
            stored = await MeasuredServer(on).metric("kv_disk_stored_blocks_total")
            dropped = await MeasuredServer(on).metric("kv_disk_dropped_blocks_total")
    return [rounds, stored, dropped]


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure both."""
    folder = resolve_model(options.model)
    flags = ["--pp", str(options.stages), *options.server_flag]
    foreign = ForeignCpu()
    restarts = [
        uvloop.run(measure_restart(folder, flags, options.tokens, number))
        for number in range(options.rounds)
    ]
    rounds, stored, dropped = [], 0.0, 0.0
    if options.cost_rounds:
        rounds, stored, dropped = uvloop.run(measure_cost(folder, flags, options))
    return {
        "restarts": restarts,
        "cost": rounds,
        "stored_blocks": stored,
        "dropped_blocks": dropped,
        "foreign_cores": foreign.cores(),
    }


def format_page(results: dict[str, Any], options: argparse.Namespace) -> str:
    """Format the figures in words and tables."""
    rows = [
        [
            f"{row['cold_ttft']:.2f}",
            f"{row['warm_ttft']:.3f}",
            f"{row['warm_ttft'] / row['cold_ttft']:.3f}",
            f"{row['hit_tokens']:,.0f}",
            f"{row['read_bytes'] / 2**20:,.0f}",
            f"{row['read_bytes'] / 1e9 / row['read_seconds']:.2f}" if row["read_seconds"] else "-",
            "yes" if row["is_same_text"] else "no",
        ]
        for row in results["restarts"]
    ]
    header = ["cold TTFT, s", "TTFT after a restart, s", "ratio", "tokens read", "MiB", "GB/s"]
    text = (
        f"{origin('benchmarks.disk_cache')} {options.stages} stage(s); others used "
        f"{results['foreign_cores']:.2f} cores.\n\nA conversation of {options.tokens:,} tokens:\n\n"
        f"{format_table([*header, 'same text'], rows)}"
    )
    if results["cost"]:
        ratios = [row["on"] / row["off"] for row in results["cost"]]
        low, high = median_interval(ratios)
        text += (
            f"\n\nWith nothing to gain, {options.streams} streams of {options.input_tokens} + "
            f"{options.output_tokens} tokens, {len(ratios)} rounds in turns: tokens/s "
            f"{format_range([row['off'] for row in results['cost']], 0)} without a tier, "
            f"{format_range([row['on'] for row in results['cost']], 0)} with one; ratio of a "
            f"round {median(ratios):.3f}, 95 % interval of the median {low:.3f} to {high:.3f}. "
            f"{results['stored_blocks']:,.0f} blocks were stored, {results['dropped_blocks']:,.0f} "
            "dropped."
        )
    return text


def main() -> None:
    """Measure, print the figures and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo", help="a Hugging Face folder, or a packaged one")
    parser.add_argument("--tokens", type=int, default=8000, help="tokens of the conversation")
    parser.add_argument("--rounds", type=int, default=3, help="restarts")
    parser.add_argument("--stages", type=int, default=1)
    parser.add_argument("--cost-rounds", type=int, default=15)
    parser.add_argument("--streams", type=int, default=8)
    parser.add_argument("--input-tokens", type=int, default=512)
    parser.add_argument("--output-tokens", type=int, default=128)
    parser.add_argument("--disk-size", default="8GiB")
    parser.add_argument("--server-flag", action="append", default=[])
    parser.add_argument("--output", type=page_path, default=Path("docs/benchmarks/disk-cache.md"))
    options = parser.parse_args()
    results = measure(options)
    title = "Disk tier of the prefix cache"
    write_results(options.output, title, format_page(results, options), results)


if __name__ == "__main__":
    main()
