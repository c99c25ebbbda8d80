"""Measure how long the garbage collector stops the frontend while it serves streams.

The real server runs in this process, with a timer on each collection; `gllm bench serve` sends the
load from another process. Run as `python -m benchmarks.cpu.pauses --model FOLDER`; it prints the
figures and writes them to docs/benchmarks/pauses.md.
"""

import argparse
import asyncio
import gc
import os
import signal
import socket
import sys
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.cpu.page import origin, write_results
from gllm.config.engine import EngineConfig
from gllm.config.server import ServerConfig
from gllm.engine.engine import Engine
from gllm.frontend.server import Server
from gllm.runtime.head.node import LocalNode
from gllm.sim.metrics.report import format_table, show_value

PROMPT, OUTPUT = 128, 64
ROUNDS = 4
"""Requests per stream, one after the other."""


class Pauses:
    """Seconds of each collection by generation; a callback for gc.callbacks."""

    def __init__(self) -> None:
        self.seconds: dict[int, list[float]] = defaultdict(list)
        self._begin = 0.0

    def __call__(self, phase: str, info: dict[str, int]) -> None:
        """Record the start or the end of a collection."""
        if phase == "start":
            self._begin = time.perf_counter()
        else:
            self.seconds[info["generation"]].append(time.perf_counter() - self._begin)


async def load(port: int, streams: int) -> None:
    """Send requests from another process.

    Raises:
        RuntimeError: The load failed.
    """
    command = [
        sys.executable,
        "-c",
        "from gllm.__main__ import main; raise SystemExit(main())",
        "bench",
        "serve",
    ]
    command += ["--base-url", f"http://127.0.0.1:{port}", "--num-prompts", str(streams * ROUNDS)]
    command += ["--max-concurrency", str(streams), "--workload", f"fixed:{PROMPT},{OUTPUT}"]
    command += ["--no-progress"]
    client = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.DEVNULL)
    if await client.wait():
        raise RuntimeError("the load failed")


async def measure(config: EngineConfig, streams: int, node: LocalNode) -> tuple[Pauses, float]:
    """Serve all streams; return the collections and the elapsed seconds."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    server = Server(Engine(config, node=node), ServerConfig(port=port))
    running = asyncio.ensure_future(server.run())
    await load(port, 1)  # waits for the server, and warms it
    pauses, begin = Pauses(), time.perf_counter()
    gc.callbacks.append(pauses)
    await load(port, streams)
    gc.callbacks.remove(pauses)
    seconds = time.perf_counter() - begin
    os.kill(os.getpid(), signal.SIGTERM)
    await running
    return pauses, seconds


def main() -> None:
    """Measure, print the figures and write the page."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", required=True, help="a Hugging Face folder")
    parser.add_argument("--streams", type=int, default=16)
    parser.add_argument("--output", type=Path, default=Path("docs/benchmarks/pauses.md"))
    options = parser.parse_args()
    config = EngineConfig.from_options(options.model, max_model_len=1024, kv_cache_memory=2**29)
    node = LocalNode(1)
    try:
        pauses, seconds = uvloop.run(measure(config, options.streams, node))
    finally:
        node.close()
    rows = [
        [
            str(generation),
            str(len(times)),
            show_value(max(times), 1e3),
            show_value(sum(times) / seconds, 100),
        ]
        for generation, times in sorted(pauses.seconds.items())
    ]
    figures = (
        f"{origin('benchmarks.cpu.pauses')} {options.streams} streams at once for "
        f"{show_value(seconds)} s, prompts of {PROMPT} tokens, {OUTPUT} new ones.\n\n"
        + format_table(["generation", "collections", "longest, ms", "share of time, %"], rows)
    )
    results: dict[str, Any] = {"seconds": seconds, "pauses": dict(pauses.seconds)}
    write_results(options.output, "Garbage collection while serving", figures, results)


if __name__ == "__main__":
    main()
