"""Measure the host overhead of a served step, at one stage with all cores.

The engine serves decodes of one batch size. A plain loop computes their micro-batches again, and
once more with a timer around each tensor operation and compiled kernel. The time of a served step
beyond that is host overhead: Python, scheduling, inputs, streams, text, and the CPU time that they
take from the arithmetic's cores. Run as `python -m benchmarks.cpu.overhead --model FOLDER`; it
prints the figures and writes them to docs/benchmarks/overhead.md.
"""

import asyncio
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import uvloop

from benchmarks.cpu.page import make_parser, origin, write_results
from benchmarks.cpu.rounds import RoundRunner, start_round_runner
from gllm.config.engine import EngineConfig
from gllm.sim.metrics.report import format_table, show_value
from gllm.sim.workloads.requests import WorkloadRequest

PROMPT, OUTPUT = 128, 64
AIM, AIM_BATCH = 0.05, 16


class Steps(NamedTuple):
    """Median milliseconds of one round's steps with full batches of decodes."""

    served: float
    """From a step's start to the start of the next step."""
    computing: float
    """Compute time of the stage within it."""
    loop: float
    """Time in a plain loop."""
    kernels: float
    """Time in tensor operations and kernels only."""

    @property
    def overhead(self) -> float:
        """Host overhead as a share of a served step."""
        return 1 - self.kernels / self.served


async def measure(runner: RoundRunner, batch: int, seed: int) -> Steps:
    """Measure one round."""
    done = await runner.round([WorkloadRequest(0.0, PROMPT, OUTPUT)] * batch, seed)
    kernels = await asyncio.to_thread(runner.loops.kernel_seconds)
    full = [
        i
        for i, s in enumerate(done.run.micro_batches)
        if s.num_decode_tokens == s.work.num_tokens == batch
    ]
    times = [time for i in full if (time := done.run.micro_batches[i].stage_times[0]) is not None]
    return Steps(
        *(
            1e3 * median(values)
            for values in (
                [after.start - before.start for before, after in pairwise(times)],
                [time.end - time.start for time in times],
                [done.loop_seconds[0][i] for i in full],
                [kernels[0][i] for i in full],
            )
        )
    )


async def measure_all(
    config: EngineConfig, batches: list[int], rounds: int
) -> dict[int, list[Steps]]:
    """Measure the batch sizes in turn, round by round, after one round that does not count."""
    measured: dict[int, list[Steps]] = {batch: [] for batch in batches}
    async with start_round_runner(config) as runner:
        for turn in range(rounds + 1):
            for place, batch in enumerate(batches):
                steps = await measure(runner, batch, turn * len(batches) + place)
                if turn:
                    measured[batch].append(steps)
    return measured


def format_page(measured: dict[int, list[Steps]], rounds: int) -> str:
    """Format the figures in words and a table."""
    rows, overheads = [], {}
    for batch, steps in measured.items():
        overheads[batch] = median(each.overhead for each in steps)
        rows.append(
            [
                str(batch),
                *(show_value(median(values)) for values in zip(*steps, strict=True)),
                f"{overheads[batch]:.1%}",
                f"{min(s.overhead for s in steps):.1%} to {max(s.overhead for s in steps):.1%}",
            ]
        )
    header = ["decodes", "served step, ms", "of it computing", "plain loop", "kernels", "overhead"]
    parts = [
        f"{origin('benchmarks.cpu.overhead')} Rounds: {rounds}, medians of their medians; prompts "
        f"of {PROMPT} tokens, {OUTPUT} new ones.",
        format_table([*header, "spread"], rows),
    ]
    if AIM_BATCH in overheads:
        word = "met" if overheads[AIM_BATCH] <= AIM else "**missed**"
        parts.append(f"Aim: at most {AIM:.0%} at {AIM_BATCH} decodes: {word}.")
    return "\n\n".join(parts)


def main() -> None:
    """Measure, print the figures and write the page."""
    parser = make_parser(__doc__, "overhead", rounds=5)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16])
    options = parser.parse_args()
    config = EngineConfig.from_options(
        options.model, dtype=options.dtype, max_model_len=1024, kv_cache_memory=2**29
    )
    measured = uvloop.run(measure_all(config, options.batches, options.rounds))
    results: dict[str, Any] = {
        str(batch): [each._asdict() for each in steps] for batch, steps in measured.items()
    }
    write_results(
        options.output, "Host overhead at one stage", format_page(measured, options.rounds), results
    )


if __name__ == "__main__":
    main()
