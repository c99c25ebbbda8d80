"""Measure what layers by measured speed gain where one of two stages is slower.

Two engines of `--pp 2`, one thread per stage, serve the same requests in turns, each with its
second stage slowed to half the speed (`--debug-slowdown 1,2`): one with `--layers even`, one with
`--layers auto`. A third one begins with even layers and `--rebalance`, and changes them while it
serves. Run as `python -m benchmarks.cpu.uneven --model FOLDER`; it prints the figures and writes
them to a page of docs/benchmarks.
"""

import os
import tempfile
import time
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from statistics import median
from typing import Any

import uvloop

from benchmarks.cpu.page import ForeignCpu, make_parser, origin, write_results
from gllm.commands.bench.real import serve_workload
from gllm.config.engine import EngineConfig
from gllm.engine.engine import Engine
from gllm.sim.metrics.report import format_table
from gllm.sim.workloads.requests import WorkloadRequest

STAGES = 2
AIM = 1.25
"""Least ratio of throughputs, of auto to even."""
NUM_REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64, 48
MARGIN = 64
"""Tokens of context beyond the longest request."""
MAX_CHANGE_ROUNDS = 20
"""Rounds in which the engine with --rebalance has to change its layers."""


@dataclass
class Setting:
    """An engine, and the throughput of each round."""

    name: str
    engine: Engine
    tokens_per_second: list[float] = field(default_factory=list)
    layers: list[int] = field(default_factory=list)
    """Layers per stage in the last round."""

    async def run_round(self, seed: int) -> None:
        """Serve the requests; prompts depend on the seed."""
        jobs = [WorkloadRequest(0.0, PROMPT_TOKENS, OUTPUT_TOKENS)] * NUM_REQUESTS
        begin = time.perf_counter()
        await serve_workload(self.engine, jobs, seed)
        num_tokens = NUM_REQUESTS * (PROMPT_TOKENS + OUTPUT_TOKENS)
        self.tokens_per_second.append(num_tokens / (time.perf_counter() - begin))
        self.layers = self.engine.describe()["layers"]


async def measure(config: EngineConfig, rounds: int) -> dict[str, Any]:
    """Measure even and automatic layers in turns, then a change of layers."""
    foreign = ForeignCpu()
    async with AsyncExitStack() as engines:

        async def start(name: str, **options: Any) -> Setting:
            engine = Engine(replace(config, **options))
            return Setting(name, await engines.enter_async_context(engine))

        even = await start("even", layers="even")
        auto = await start("auto", layers="auto")
        for seed in range(rounds + 1):
            for setting in (even, auto):
                await setting.run_round(seed)
    # The first round warms up.
    ratios = [b / a for a, b in zip(even.tokens_per_second, auto.tokens_per_second, strict=True)]
    figures: dict[str, Any] = {
        each.name: {
            "layers": each.layers,
            "tokens_per_second": median(each.tokens_per_second[1:]),
            "rounds": each.tokens_per_second[1:],
        }
        for each in (even, auto)
    }
    figures["ratios"] = ratios[1:]
    figures["rebalance"] = await measure_change(config, rounds)
    figures["foreign_cores"] = foreign.cores()
    return figures


async def measure_change(config: EngineConfig, rounds: int) -> dict[str, Any]:
    """Measure the throughput before and after a change of layers under load, and its pause.

    Raises:
        RuntimeError: the layers did not change.
    """
    async with Engine(replace(config, layers="even", rebalance=True)) as engine:
        setting = Setting("rebalance", engine)
        before: list[float] = []
        for seed in range(MAX_CHANGE_ROUNDS):
            await setting.run_round(seed)
            if engine.status().recoveries:
                break
            before = setting.tokens_per_second[1:]
        else:
            raise RuntimeError("the layers did not change: another stage limits the throughput")
        setting.tokens_per_second.clear()
        for seed in range(rounds):
            await setting.run_round(MAX_CHANGE_ROUNDS + seed)
        status = engine.status()
        return {
            "layers": setting.layers,
            "before": median(before) if before else None,
            "after": median(setting.tokens_per_second),
            "changes": sum(status.recoveries.values()),
            "pause_seconds": status.recovery_seconds[0],
            "resumed_requests": status.num_resumed_requests,
        }


def format_page(figures: dict[str, Any], slowdown: tuple[float, ...], rounds: int) -> str:
    """Format the figures in words and tables."""
    ratio, change = median(figures["ratios"]), figures["rebalance"]
    rows = [
        [
            f"--layers {name}",
            " + ".join(map(str, figures[name]["layers"])),
            f"{figures[name]['tokens_per_second']:.0f}",
            f"{min(figures[name]['rounds']):.0f} to {max(figures[name]['rounds']):.0f}",
        ]
        for name in ("even", "auto")
    ]
    spread = f"{min(figures['ratios']):.2f} to {max(figures['ratios']):.2f}"
    verdict = "met" if ratio >= AIM else "**missed**"
    before = change["before"]
    speed = "changed too early to measure" if before is None else f"{before:.0f} tokens/s"
    return "\n\n".join(
        [
            f"{origin('benchmarks.cpu.uneven')} {NUM_REQUESTS} requests at once of {PROMPT_TOKENS} "
            f"+ {OUTPUT_TOKENS} tokens; steps of the stages take "
            f"{' and '.join(f'{each:g}' for each in slowdown)} times as long as they do. Rounds in "
            f"turns: {rounds}, medians; others used {figures['foreign_cores']:.2f} cores.",
            format_table(["layers", "per stage", "tokens/s", "rounds"], rows),
            f"Ratio auto / even {ratio:.2f} ({spread}); aim at least {AIM}: {verdict}.",
            f"With --layers even --rebalance: {speed} before the change, "
            f"{change['after']:.0f} tokens/s after it with "
            f"{' + '.join(map(str, change['layers']))} layers; "
            f"pause {change['pause_seconds']:.2f} s with {change['resumed_requests']} running "
            f"requests; changes: {change['changes']}.",
        ]
    )


def main() -> None:
    """Measure, print the figures and write the page."""
    parser = make_parser(__doc__, "uneven", rounds=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--slowdown", default="1,2", help="factor of each stage")
    options = parser.parse_args()
    slowdown = tuple(map(float, options.slowdown.split(",")))
    config = EngineConfig.from_options(
        options.model,
        pipeline_parallel_size=STAGES,
        threads=1,
        dtype=options.dtype,
        debug_slowdown=slowdown,
        max_model_len=PROMPT_TOKENS + OUTPUT_TOKENS + MARGIN,
        kv_cache_memory=2**29,
        prefix_cache=False,
    )
    with tempfile.TemporaryDirectory(prefix="gllm-") as folder:
        # Measured now, and not at an earlier start.
        os.environ["XDG_CACHE_HOME"] = folder
        figures = uvloop.run(measure(config, options.rounds))
    title = "Layers by measured speed where one of two stages is slower"
    write_results(options.output, title, format_page(figures, slowdown, options.rounds), figures)


if __name__ == "__main__":
    main()
