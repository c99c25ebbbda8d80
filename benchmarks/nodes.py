"""Measure an engine on two nodes over loopback TCP against one node with shared memory.

Three engines of two stages serve the same requests in turns on the same cores: both stages on one
node, on two nodes in the clear, and on two nodes with a secret (CURVE for control, TLS 1.3 for
activations). Loopback has no delay and plenty of bandwidth, so the figures are the cost of the
processes between the stages, not of a network. Run as `python -m benchmarks.nodes`; it prints the
figures and writes them to docs/benchmarks/nodes.md.
"""

import argparse
import asyncio
import os
import socket
import tempfile
import threading
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import uvloop

from benchmarks.confidence import format_range
from benchmarks.cpu.page import ForeignCpu, origin, page_path, write_results
from benchmarks.fleet_processes import open_session
from benchmarks.node_engines import ROLES, NodeEngine, make_secret, running_engine
from benchmarks.recovery import make_prompts, request_bodies
from gllm.commands.bench.client import RequestResult, send
from gllm.observability.latency import percentile
from gllm.sim.metrics.report import format_table

NAMES = ("one node", "two nodes, plain", "two nodes, CURVE and TLS")
MAX_ENCRYPTION_RATIO = 1.05
"""Limit of the time per output token with encryption over that in the clear."""
LOOPBACK_BYTES = 2 * 2**30
"""Bytes that are sent to measure the bandwidth of the loopback device."""
CHUNK_BYTES = 2**20


@dataclass
class Rounds:
    """Figures of an engine, one entry per round."""

    tokens_per_second: list[float] = field(default_factory=list)
    tpot_ms: list[float] = field(default_factory=list)
    """Median over the streams."""
    ttft_ms: list[float] = field(default_factory=list)
    cpu: dict[str, list[float]] = field(default_factory=lambda: {role: [] for role in ROLES})
    """CPU seconds per 1,000 output tokens, by role of the processes."""


async def run_round(engine: NodeEngine, session: Any, bodies: list[bytes], rounds: Rounds) -> None:
    """Send all requests at once and add the figures.

    Raises:
        RuntimeError: a request failed.
    """
    cpu_before, begin = engine.cpu_seconds(), time.monotonic()
    results: list[RequestResult] = await asyncio.gather(
        *(send(session, f"{engine.url}/v1/completions", body, 0) for body in bodies)
    )
    seconds = time.monotonic() - begin
    cpu = engine.cpu_seconds()
    if failed := [each.detail for each in results if each.failure]:
        raise RuntimeError(f"{engine.name}: {failed[0]}")
    times = [each.timeline.times for each in results]
    num_tokens = sum(map(len, times))
    rounds.tokens_per_second.append(num_tokens / seconds)
    rounds.tpot_ms.append(1e3 * median((each[-1] - each[0]) / (len(each) - 1) for each in times))
    rounds.ttft_ms.append(
        1e3 * percentile([each.timeline.times[0] - each.timeline.arrival for each in results], 50)
    )
    for role in ROLES:
        rounds.cpu[role].append(1000 * (cpu[role] - cpu_before[role]) / num_tokens)


async def measure(options: argparse.Namespace, secret: Path) -> dict[str, Any]:
    """Return the figures of all engines, whose rounds take turns."""
    flags = ["--pp", "2", "--threads", "1", *options.server_flag]
    foreign = ForeignCpu()
    rounds = {name: Rounds() for name in NAMES}
    prompts = make_prompts(options.streams, options.words, seed=0)
    bodies = request_bodies(prompts, options.output_tokens)
    async with open_session() as session, AsyncExitStack() as stack:
        engines = []
        for name, count, file in zip(NAMES, (1, 2, 2), (None, None, secret), strict=True):
            starting = running_engine(name, options.model, flags, session, count, file)
            engines.append(await stack.enter_async_context(starting))
        for number in range(options.rounds + 1):
            # Another order in each round, so that none always follows the same other one.
            for engine in engines[number % 3 :] + engines[: number % 3]:
                # The first round warms up.
                await run_round(
                    engine, session, bodies, rounds[engine.name] if number else Rounds()
                )
    return {
        "engines": {name: vars(each) for name, each in rounds.items()},
        "loopback_gigabytes_per_second": loopback_bandwidth(),
        "foreign_cores": foreign.cores(),
    }


def loopback_bandwidth() -> float:
    """Return gigabytes per second of one TCP connection over the loopback device."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        sender = threading.Thread(target=_send_bytes, args=(listener.getsockname(),))
        sender.start()
        receiver, _ = listener.accept()
        with receiver:
            buffer, num_left, begin = bytearray(CHUNK_BYTES), LOOPBACK_BYTES, time.monotonic()
            while num_left:
                num_left -= receiver.recv_into(buffer)
            seconds = time.monotonic() - begin
        sender.join()
    return LOOPBACK_BYTES / seconds / 1e9


def _send_bytes(address: tuple[str, int]) -> None:
    with socket.create_connection(address) as sender:
        chunk = bytes(CHUNK_BYTES)
        for _ in range(LOOPBACK_BYTES // CHUNK_BYTES):
            sender.sendall(chunk)


def format_ratio(values: list[float], base: list[float]) -> str:
    """Return the median ratio of pairs of rounds, with its range."""
    ratios = [a / b for a, b in zip(values, base, strict=True)]
    return format_range(ratios)


def judge_encryption(engines: dict[str, Any]) -> str:
    """Return the statement about what encryption costs, by pairs of rounds."""
    plain, encrypted = (engines[name]["tpot_ms"] for name in NAMES[1:])
    ratio = median(a / b for a, b in zip(encrypted, plain, strict=True))
    verdict = "met" if ratio <= MAX_ENCRYPTION_RATIO else "**missed**"
    return (
        f"Encryption: TPOT {format_ratio(encrypted, plain)} times that of two nodes in the clear "
        f"(at most {MAX_ENCRYPTION_RATIO}: {verdict})."
    )


def format_page(figures: dict[str, Any], options: argparse.Namespace) -> str:
    """Format the figures in words and tables."""
    engines, base = figures["engines"], figures["engines"][NAMES[0]]
    speed = [
        [
            name,
            f"{median(each['tokens_per_second']):.0f}",
            format_ratio(each["tokens_per_second"], base["tokens_per_second"]),
            f"{median(each['tpot_ms']):.2f}",
            format_ratio(each["tpot_ms"], base["tpot_ms"]),
            f"{median(each['ttft_ms']):.0f}",
        ]
        for name, each in engines.items()
    ]
    cpu = [
        [name, *(f"{median(each['cpu'][role]):.3f}" for role in ROLES)]
        for name, each in engines.items()
    ]
    return "\n\n".join(
        [
            f"{origin('benchmarks.nodes')} {options.streams} streams of {options.output_tokens} "
            f"tokens at --pp 2, one thread per stage; {options.rounds} rounds in turns, medians, "
            f"ratios of the same round with their range; others used "
            f"{figures['foreign_cores']:.2f} cores. One TCP connection over the loopback device "
            f"carries {figures['loopback_gigabytes_per_second']:.2f} GB/s.",
            format_table(
                ["engine", "tokens/s", "ratio to one node", "TPOT, ms", "ratio", "TTFT, ms"], speed
            ),
            judge_encryption(engines),
            "CPU seconds per 1,000 output tokens:",
            format_table(["engine", *ROLES], cpu),
        ]
    )


def main() -> None:
    """Measure, print the figures and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="demo", help="a Hugging Face folder, or demo")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--words", type=int, default=20, help="words per prompt")
    parser.add_argument("--output-tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--server-flag", action="append", default=[])
    parser.add_argument("--output", type=page_path, default=Path("docs/benchmarks/nodes.md"))
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="gllm-") as folder:
        # Measurements of layers are made now, and not at an earlier start.
        os.environ["XDG_CACHE_HOME"] = folder
        figures = uvloop.run(measure(options, make_secret(Path(folder))))
    title = "Two nodes over loopback TCP against one node"
    write_results(options.output, title, format_page(figures, options), figures)


if __name__ == "__main__":
    main()
