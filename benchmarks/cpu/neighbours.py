"""Measure decoding on a machine whose cores other programs keep busy.

For each way to divide the model (one stage, two stages, two ranks) an engine with default flags and
one with `--threads 1` serve the same stream in turns, beside 0, 2, 4 and 8 processes that compute
without a pause. Ways that the model does not permit are left out. Run as
`python -m benchmarks.cpu.neighbours --model FOLDER`; it prints the figures and writes them to
docs/benchmarks/neighbours.md.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, contextmanager
from dataclasses import replace
from statistics import median
from typing import Any

import uvloop

from benchmarks.cpu.page import ForeignCpu, make_parser, origin, write_results
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


async def measure_start(
    config: EngineConfig, rounds: int, streams: int
) -> dict[int, dict[str, list[float]]]:
    """Start both engines once; return the tokens/s of each round, by neighbours and arm."""
    jobs = [WorkloadRequest(0.0, PROMPT_TOKENS, OUTPUT_TOKENS)] * streams
    found: dict[int, dict[str, list[float]]] = {}
    async with AsyncExitStack() as engines:
        arms = {
            "default": await engines.enter_async_context(Engine(config)),
            "--threads 1": await engines.enter_async_context(Engine(replace(config, threads=1))),
        }
        for engine in arms.values():
            await serve_workload(engine, jobs, 0)
        for neighbours in NEIGHBOURS:
            speeds: dict[str, list[float]] = {name: [] for name in arms}
            with busy_neighbours(neighbours):
                for index in range(rounds):
                    order = list(arms) if index % 2 else list(reversed(arms))
                    for name in order:
                        begin = time.perf_counter()
                        await serve_workload(arms[name], jobs, index)
                        seconds = time.perf_counter() - begin
                        speeds[name].append(streams * OUTPUT_TOKENS / seconds)
            found[neighbours] = speeds
    return found


async def measure(
    config: EngineConfig, starts: int, rounds: int, streams: int
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
        runs = [await measure_start(divided, rounds, streams) for _ in range(starts)]
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


def format_page(cells: list[dict[str, Any]], starts: int, rounds: int, foreign: float) -> str:
    """Format the figures as a table, with the aim."""
    rows, shares = [], []
    for cell in cells:
        speeds = cell["speeds"]
        best = max(median(values) for values in speeds.values())
        share = min(speeds["default"]) / best
        shares.append(share)
        rows.append(
            [
                cell["layout"],
                str(cell["neighbours"]),
                *(
                    f"{median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
                    for values in speeds.values()
                ),
                f"{share:.2f}",
            ]
        )
    verdict = "met" if min(shares) >= AIM else "**missed**"
    header = ["layout", "busy processes", "default", "--threads 1", "worst default / better"]
    return "\n\n".join(
        [
            f"{origin('benchmarks.cpu.neighbours')} Output tokens/s of one stream "
            f"({PROMPT_TOKENS} + {OUTPUT_TOKENS} tokens): median over {starts} starts (lowest to "
            f"highest) of medians of {rounds} rounds in turns. The last column compares the worst "
            f"start with default flags with the better median. Programs other than "
            f"the engines and the busy processes used {foreign:.2f} cores.",
            format_table(header, rows),
            f"Aim: at least {AIM} in each row; {verdict}.",
        ]
    )


def main() -> None:
    """Measure, print the figures and write the page."""
    parser = make_parser(__doc__, "neighbours", 5)
    parser.add_argument("--starts", type=int, default=3, help="starts of the engines")
    parser.add_argument("--streams", type=int, default=1)
    options = parser.parse_args()
    config = EngineConfig(
        options.model, max_model_len=CONTEXT, scheduler=SchedulerConfig(prefix_cache=False)
    )
    foreign = ForeignCpu()
    cells = uvloop.run(measure(config, options.starts, options.rounds, options.streams))
    page = format_page(cells, options.starts, options.rounds, foreign.cores())
    write_results(options.output, "Busy neighbours", page, {"cells": cells})


if __name__ == "__main__":
    main()
