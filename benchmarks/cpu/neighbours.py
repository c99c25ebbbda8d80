"""Measure decoding on a machine whose cores other programs keep busy.

For each way to divide the model (one stage, two stages, two ranks) an engine with default flags and
one with `--threads 1` serve the same stream in turns, beside 0, 2, 4 and 8 processes that compute
without a pause. Ways that the model does not permit are left out. With `--llama-server` and
`--gguf`, llama.cpp's server takes its turns beside one stage, with its default flags and with
`--threads 1`.

Run as `python -m benchmarks.cpu.neighbours --model FOLDER`; it prints the figures and writes them
to docs/benchmarks/neighbours.md, where those of other models stay.
"""

import argparse
import asyncio
import shlex
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from statistics import median
from typing import Any

import aiohttp
import uvloop

from benchmarks.cpu.page import ForeignCpu, make_parser, origin, read_results, write_results
from benchmarks.cpu.serving import free_port
from gllm.commands.bench.real import serve_workload
from gllm.config.engine import EngineConfig
from gllm.engine.engine import Engine
from gllm.engine.preflight import plan_model
from gllm.scheduler.config import SchedulerConfig
from gllm.sim.metrics.report import format_table
from gllm.sim.workloads.requests import WorkloadRequest

LAYOUTS: dict[str, dict[str, Any]] = {
    "one stage": {},
    "two stages": {"pipeline_parallel_size": 2},
    "two ranks": {"tensor_parallel_size": 2},
}
NEIGHBOURS = (0, 2, 4, 8)
AIM = 0.9
"""Least speed with default flags, as a share of the better of both arms."""
PROMPT_TOKENS, OUTPUT_TOKENS, CONTEXT = 16, 64, 256
ONE_THREAD = "--threads 1"
ARMS = ("default", ONE_THREAD)
"""Names of our engines; those of llama.cpp begin with PEER."""
PEER = "llama.cpp"
START_SECONDS = 60.0
Serve = Callable[[int, int], Awaitable[object]]
"""Serves a number of streams; the second argument is the seed of their prompts."""


@contextmanager
def busy_neighbours(count: int) -> Iterator[None]:
    """Run processes that compute without a pause."""
    command = [sys.executable, "-c", "while True: pass"]
    processes = [subprocess.Popen(command) for _ in range(count)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@asynccontextmanager
async def llama_server(command: Sequence[str]) -> AsyncIterator[Serve]:
    """Run llama.cpp's server; yield a function that serves streams with it."""
    port = free_port()
    process = await asyncio.create_subprocess_exec(
        *command, "--port", str(port), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    url = f"http://127.0.0.1:{port}"
    async with aiohttp.ClientSession() as session:

        async def serve_one(index: int, seed: int) -> None:
            body = {
                "prompt": [1000 * seed + PROMPT_TOKENS * index + at for at in range(PROMPT_TOKENS)],
                "n_predict": OUTPUT_TOKENS,
                "temperature": 0,
                "ignore_eos": True,
                "cache_prompt": False,
            }
            async with session.post(f"{url}/completion", json=body) as answer:
                count = (await answer.json())["tokens_predicted"]
                if count != OUTPUT_TOKENS:
                    raise RuntimeError(f"llama.cpp returned {count} tokens, not {OUTPUT_TOKENS}")

        async def serve(streams: int, seed: int) -> None:
            await asyncio.gather(*(serve_one(index, seed) for index in range(streams)))

        try:
            async with asyncio.timeout(START_SECONDS):
                while not await is_ready(session, url):
                    if process.returncode is not None:
                        raise RuntimeError(f"{shlex.join(command)} ended: {process.returncode}")
                    await asyncio.sleep(0.1)
            yield serve
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def is_ready(session: aiohttp.ClientSession, url: str) -> bool:
    """Return True if llama.cpp's server has loaded its model."""
    try:
        async with session.get(f"{url}/health") as answer:
            return answer.status == HTTPStatus.OK
    except aiohttp.ClientError:
        return False


@asynccontextmanager
async def our_engine(config: EngineConfig) -> AsyncIterator[Serve]:
    """Run an engine in this process; yield a function that serves streams with it."""
    job = WorkloadRequest(0.0, PROMPT_TOKENS, OUTPUT_TOKENS)
    async with Engine(config) as engine:
        yield lambda streams, seed: serve_workload(engine, [job] * streams, seed)


async def measure_start(
    config: EngineConfig, rounds: int, streams: int, peer: Sequence[str]
) -> dict[int, dict[str, list[float]]]:
    """Start all engines once; return the tokens/s of each round, by neighbours and arm.

    peer: command of llama.cpp's server; empty for none.
    """
    found: dict[int, dict[str, list[float]]] = {}
    async with AsyncExitStack() as engines:
        start = engines.enter_async_context
        arms = {
            ARMS[0]: await start(our_engine(config)),
            ARMS[1]: await start(our_engine(replace(config, threads=1))),
        }
        if peer:
            arms[PEER] = await start(llama_server(peer))
            arms[f"{PEER} {ONE_THREAD}"] = await start(llama_server([*peer, *ONE_THREAD.split()]))
        for serve in arms.values():
            await serve(streams, 0)
        for neighbours in NEIGHBOURS:
            speeds: dict[str, list[float]] = {name: [] for name in arms}
            with busy_neighbours(neighbours):
                for index in range(rounds):
                    order = list(arms) if index % 2 else list(reversed(arms))
                    for name in order:
                        begin = time.perf_counter()
                        await arms[name](streams, index)
                        seconds = time.perf_counter() - begin
                        speeds[name].append(streams * OUTPUT_TOKENS / seconds)
            found[neighbours] = speeds
    return found


async def measure(
    config: EngineConfig, starts: int, rounds: int, streams: int, peer: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the cells: layout, neighbours, and the tokens/s of each arm's start."""
    cells: list[dict[str, Any]] = []
    for layout, options in LAYOUTS.items():
        divided = replace(config, **options)
        try:
            plan_model(divided)
        except ValueError as error:
            print(f"{layout}: {error}")
            continue
        beside = [] if options else peer
        runs = [await measure_start(divided, rounds, streams, beside) for _ in range(starts)]
        cells += [
            {
                "layout": layout,
                "neighbours": neighbours,
                "speeds": {
                    arm: [median(run[neighbours][arm]) for run in runs]
                    for arm in runs[0][neighbours]
                },
            }
            for neighbours in NEIGHBOURS
        ]
        print(layout, [cell["speeds"] for cell in cells[-len(NEIGHBOURS) :]], flush=True)
    return cells


def format_cells(cells: list[dict[str, Any]]) -> str:
    """Format the figures of a model as a table, with the aim."""
    rows, shares = [], []
    names = list(dict.fromkeys(name for cell in cells for name in cell["speeds"]))
    for cell in cells:
        speeds = cell["speeds"]
        starts = zip(*(speeds[arm] for arm in ARMS), strict=True)
        share = min(start[0] / max(start) for start in starts)
        shares.append(share)
        shown = {
            name: f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
            for name, values in speeds.items()
        }
        cells_of_row = [shown.get(name, "") for name in names]
        rows.append([cell["layout"], str(cell["neighbours"]), *cells_of_row, f"{share:.2f}"])
    verdict = "met" if min(shares) >= AIM else "**missed**"
    table = format_table(["layout", "busy processes", *names, "worst start"], rows)
    return f"{table}\n\nAim: at least {AIM} in each row; {verdict}."


def describe(options: argparse.Namespace, foreign: float) -> str:
    """Return what was measured, and where."""
    return (
        f"{origin('benchmarks.cpu.neighbours')} Output tokens/s of {options.streams} stream(s) "
        f"({PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens): median over {options.starts} starts (lowest "
        f"to highest) of medians of {options.rounds} rounds in turns. Worst start: default "
        "flags over the better of both arms in the start where that is least. Programs other than "
        f"the engines and the busy processes used {foreign:.2f} cores."
    )


def main() -> None:
    """Measure, print the figures and write the page."""
    parser = make_parser(__doc__, "neighbours", 5)
    parser.add_argument("--starts", type=int, default=3, help="starts of the engines")
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--llama-server", help="path of llama.cpp's server, of the same model")
    parser.add_argument("--gguf", help="the model's file for it")
    options = parser.parse_args()
    peer = []
    if options.llama_server:
        peer = [options.llama_server, "--model", options.gguf, "--chat-template", "chatml"]
        peer += ["--ctx-size", str(CONTEXT * options.streams), "--parallel", str(options.streams)]
    config = EngineConfig(
        options.model, max_model_len=CONTEXT, scheduler=SchedulerConfig(prefix_cache=False)
    )
    foreign = ForeignCpu()
    cells = uvloop.run(measure(config, options.starts, options.rounds, options.streams, peer))
    results = read_results(options.output)
    name = Path(options.model).name + f", with {PEER}" * bool(peer)
    models = {**results.get("models", {}), name: {"cells": cells}}
    origins = {**results.get("origins", {}), name: describe(options, foreign.cores())}
    page = "\n\n".join(
        f"## {name}\n\n{origins[name]}\n\n{format_cells(entry['cells'])}"
        for name, entry in models.items()
    )
    write_results(options.output, "Busy neighbours", page, {"models": models, "origins": origins})


if __name__ == "__main__":
    main()
