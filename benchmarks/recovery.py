"""Measure what a client notices when a worker is killed under load.

A server of three stages answers concurrent streams, once undisturbed and once with its middle stage
killed by SIGKILL when half of all tokens have been generated. The same prompts and seeds are sent
both times, so that the texts can be compared. The parts that a recovery cannot avoid are measured
apart: the import of torch, reading the weights from the page cache, and recomputing the tokens
whose KV blocks were not kept (the same number of tokens as fresh prompts). Run as
`python -m benchmarks.recovery`; it prints the figures and writes them to
docs/benchmarks/recovery.md.
"""

import argparse
import asyncio
import os
import random
import signal
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import msgspec
import uvloop

from benchmarks.cpu.page import ForeignCpu, origin, page_path, write_results
from benchmarks.cpu.serving import free_port
from benchmarks.cpu.startup import floor
from benchmarks.cpu.watch import tree
from gllm.commands.bench.client import RequestResult, send
from gllm.deploy.metrics_scrape import parse_metrics
from gllm.models.hub import resolve_model
from gllm.observability.latency import percentile
from gllm.sim.metrics.report import format_table

STAGES, VICTIM = 3, 1
POLL_SECONDS = 0.05
START_SECONDS = 300.0
"""Maximum time until the server is ready."""
WORDS = ("fox", "boat", "moon", "garden", "bear", "river", "stone", "bird", "winter", "lamp")


def make_prompts(count: int, num_words: int, seed: int) -> list[str]:
    """Return prompts that have nothing but their first words in common."""
    chooser = random.Random(seed)
    words = [" ".join(chooser.choices(WORDS, k=num_words)) for _ in range(count)]
    return [f"Once upon a time there was a {each}" for each in words]


def request_bodies(prompts: Sequence[str], max_tokens: int) -> list[bytes]:
    """Return JSON bodies of streamed completions, each with a seed of its own."""
    return [
        msgspec.json.encode(
            {
                "prompt": prompt,
                "max_tokens": max_tokens,
                "temperature": 0.8,
                "seed": seed,
                "ignore_eos": True,
                "stream": True,
                "stream_options": {"include_usage": True},
            }
        )
        for seed, prompt in enumerate(prompts)
    ]


class LoadedServer:
    """A server process and the streams that are sent to it."""

    def __init__(self, pid: int, url: str, session: aiohttp.ClientSession) -> None:
        self.pid = pid
        self.url = url
        self._session = session

    async def send_all(self, bodies: Sequence[bytes]) -> list[RequestResult]:
        """Send all requests at once; return their results in order."""
        url = f"{self.url}/v1/completions"
        return await asyncio.gather(*(send(self._session, url, body, 0) for body in bodies))

    async def wait_until_ready(self) -> None:
        """Poll /ready. Raises TimeoutError after START_SECONDS."""
        async with asyncio.timeout(START_SECONDS):
            while True:
                try:
                    async with self._session.get(f"{self.url}/ready") as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)

    async def count(self, counter: str) -> int:
        """Return the value of a counter of /metrics."""
        async with self._session.get(f"{self.url}/metrics") as answer:
            metrics = parse_metrics(await answer.text(), time.monotonic())
        return int(metrics.value(counter))

    async def wait_for_tokens(self, number: int) -> None:
        """Wait until a number of tokens has been generated since the start of the server."""
        while await self.count("generation_tokens_total") < number:
            await asyncio.sleep(POLL_SECONDS)

    def kill_stage(self, stage: int) -> float:
        """Kill the worker process of a stage; return the time.

        Raises:
            RuntimeError: There is not exactly one such process.
        """
        title = f"gllm-stage-{stage}".encode()
        pids = [
            pid
            for pid in tree(self.pid)
            if Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[0].split(b" ")[0] == title
        ]
        if len(pids) != 1:
            raise RuntimeError(f"processes of stage {stage}: {pids}")
        os.kill(pids[0], signal.SIGKILL)
        return time.monotonic()


@asynccontextmanager
async def serving(folder: Path, flags: Sequence[str]) -> AsyncIterator[LoadedServer]:
    """Start a server, yield it once it is ready, stop it."""
    port = free_port()
    command = [sys.executable, "-m", "gllm.serve", str(folder), "--port", str(port)]
    command += ["--pp", str(STAGES), "--log-level", "warning", *flags]
    process = await asyncio.create_subprocess_exec(*command)
    timeout = aiohttp.ClientTimeout(total=None)
    headers = {"Content-Type": "application/json"}
    connector = aiohttp.TCPConnector(limit=0)
    try:
        async with aiohttp.ClientSession(
            connector=connector, timeout=timeout, headers=headers
        ) as session:
            server = LoadedServer(process.pid, f"http://127.0.0.1:{port}", session)
            await server.wait_until_ready()
            yield server
    finally:
        process.terminate()
        await process.wait()


def resume_seconds(result: RequestResult, killed: float) -> float:
    """Return the time from the kill to the stream's next token: the end of its longest gap.

    Tokens of steps that had passed the killed stage arrive first; the gap begins after them.
    """
    gaps = [(after - before, after) for before, after in pairwise(result.timeline.times)]
    return max((gap, end) for gap, end in gaps if end > killed)[1] - killed


def summarize(
    undisturbed: Sequence[RequestResult], disturbed: Sequence[RequestResult], killed: float
) -> dict[str, Any]:
    """Return the figures of one kill."""
    going = [result for result in disturbed if not result.failure]
    running = [result for result in going if result.timeline.times[-1] > killed]
    resumed = [resume_seconds(result, killed) for result in running]
    arrivals = sorted(time for result in going for time in result.timeline.times)
    num_emitted = sum(sum(time <= killed for time in result.timeline.times) for result in running)
    return {
        "streams": len(disturbed),
        "running": len(running),
        "lost": len(disturbed) - len(going),
        "causes": sorted({result.detail for result in disturbed if result.failure}),
        "differing": sum(
            "".join(before.text_parts) != "".join(after.text_parts)
            for before, after in zip(undisturbed, disturbed, strict=True)
            if not after.failure
        ),
        "running_tokens": num_emitted + sum(result.prompt_tokens for result in running),
        "next_token_p50": percentile(resumed, 50) if resumed else None,
        "next_token_p99": percentile(resumed, 99) if resumed else None,
        "next_token_last": max(resumed, default=None),
        "pause": max(b - a for a, b in pairwise(arrivals) if b > killed),
        "undisturbed_seconds": max(line.timeline.times[-1] for line in undisturbed)
        - min(line.timeline.arrival for line in undisturbed),
    }


async def measure_kill(folder: Path, flags: Sequence[str], bodies: list[bytes]) -> dict[str, Any]:
    """Return the figures of a server whose middle stage is killed halfway."""
    async with serving(folder, flags) as server:
        await server.send_all(bodies[:4])
        before = await server.count("generation_tokens_total")
        undisturbed = await server.send_all(bodies)
        after = await server.count("generation_tokens_total")
        streams = asyncio.ensure_future(server.send_all(bodies))
        await server.wait_for_tokens(after + (after - before) // 2)
        killed = server.kill_stage(VICTIM)
        figures = summarize(undisturbed, await streams, killed)
        await server.wait_until_ready()
        num_computed = await server.count("resumed_tokens_computed_total")
        return figures | {"computed_tokens": num_computed}


async def measure_recompute(folder: Path, num_streams: int, num_tokens: int) -> float:
    """Return the seconds to compute `num_tokens` tokens as prompts of `num_streams` streams."""
    async with serving(folder, ["--no-prefix-cache"]) as server:
        chooser = random.Random(1)
        # Ids that are in every vocabulary and no special tokens.
        prompts = [
            [chooser.randrange(300, 1000) for _ in range(num_tokens // num_streams)]
            for _ in range(num_streams)
        ]
        bodies = [
            msgspec.json.encode({"prompt": ids, "max_tokens": 1, "stream": True}) for ids in prompts
        ]
        await server.send_all(bodies[:4])
        begin = time.monotonic()
        results = await server.send_all(bodies)
        if any(result.failure for result in results):
            raise RuntimeError(f"a prompt failed: {results}")
        return time.monotonic() - begin


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure kills with each number of standby workers in turns, then the unavoidable parts."""
    folder = resolve_model(options.model)
    bodies = request_bodies(
        make_prompts(options.streams, options.words, seed=0), options.output_tokens
    )
    foreign = ForeignCpu()
    kills: dict[str, list[dict[str, Any]]] = {str(count): [] for count in options.standby}
    floors = []
    for _ in range(options.rounds):
        for count, figures in kills.items():
            flags = ["--standby-workers", count, *options.server_flag]
            figures.append(uvloop.run(measure_kill(folder, flags, bodies)))
        floors.append(floor(sorted(folder.glob("*.safetensors"))))
    runs = [each for rows in kills.values() for each in rows]
    tokens = max(options.streams, int(median(each["computed_tokens"] for each in runs)))
    return {
        "kills": kills,
        "import_seconds": median(imported for imported, _ in floors),
        "read_seconds": median(read for _, read in floors) / STAGES,
        "recompute_seconds": uvloop.run(measure_recompute(folder, options.streams, tokens)),
        "computed_tokens": tokens,
        "running_tokens": int(median(each["running_tokens"] for each in runs)),
        "foreign_cores": foreign.cores(),
    }


HEADER = (
    "standby workers",
    "requests lost",
    "texts that differ",
    "pause, s",
    "next token p50, s",
    "p99, s",
    "last stream, s",
    "limit, s",
)


def format_row(count: str, rounds: Sequence[dict[str, Any]], results: dict[str, Any]) -> list[str]:
    """Return the row of a number of standby workers: sums of losses, medians of times."""

    def seconds(key: str) -> str:
        values = [each[key] for each in rounds if each[key] is not None]
        return f"{median(values):.2f}" if values else "-"

    limit = results["read_seconds"] + results["recompute_seconds"]
    if count == "0":
        limit += results["import_seconds"]
    streams = sum(each["running"] for each in rounds)
    times = ("pause", "next_token_p50", "next_token_p99", "next_token_last")
    return [
        count,
        f"{sum(each['lost'] for each in rounds)} of {streams}",
        f"{sum(each['differing'] for each in rounds)} of {streams}",
        *map(seconds, times),
        f"{limit:.2f}",
    ]


def format_page(results: dict[str, Any], options: argparse.Namespace) -> str:
    """Format the figures in words and a table."""
    rows = [format_row(count, kills, results) for count, kills in results["kills"].items()]
    return (
        f"{origin('benchmarks.recovery')} {options.streams} streams of {options.output_tokens} "
        f"tokens at --pp {STAGES}, stage {VICTIM} killed halfway; {options.rounds} rounds, sums "
        f"and medians; others used {results['foreign_cores']:.2f} cores.\n\n"
        f"{format_table(list(HEADER), rows)}\n\n"
        f"Limit of a recovery: {results['import_seconds']:.2f} s to import torch (without a "
        f"standby worker), {results['read_seconds']:.3f} s to read a stage's weights from the "
        f"page cache, {results['recompute_seconds']:.2f} s to compute the "
        f"{results['computed_tokens']:,} of the {results['running_tokens']:,} tokens of all "
        "running streams that were not kept, as fresh prompts."
    )


def main() -> None:
    """Measure, print the figures and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo", help="a Hugging Face folder, or demo")
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--words", type=int, default=20, help="words per prompt")
    parser.add_argument("--output-tokens", type=int, default=200)
    parser.add_argument("--standby", type=int, nargs="+", default=[0, 1])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--server-flag", action="append", default=[])
    parser.add_argument("--output", type=page_path, default=Path("docs/benchmarks/recovery.md"))
    options = parser.parse_args()
    results = measure(options)
    title = "Recovery from the death of a worker"
    write_results(options.output, title, format_page(results, options), results)


if __name__ == "__main__":
    main()
