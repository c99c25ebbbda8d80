"""What of a served step is not arithmetic, at one stage with all cores.

Decodes of one batch size are served; their micro-batches are computed again by a plain loop, and
once more with a clock around each tensor operation and compiled kernel. What a served step takes
beyond that is host overhead: Python, scheduling, inputs, streams, text, and what they take from the
arithmetic's cores. Run as `python -m benchmarks.cpu.overhead --model FOLDER`; it prints the figures
and writes them into docs/benchmarks/overhead.md.
"""

import asyncio
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple

import uvloop

from benchmarks.cpu.page import make_parser, origin, write_results
from benchmarks.cpu.rounds import Bench, bench
from gllm.config.engine import EngineConfig
from gllm.sim.report import format_table, show_value
from gllm.sim.workload import WorkloadRequest

PROMPT, OUTPUT = 128, 64
AIM, AIM_BATCH = 0.05, 16


class Steps(NamedTuple):
    """Median milliseconds of one round's steps of full batches of decodes."""

    served: float
    """From a step's start to the next one's."""
    computing: float
    """The stage's own time within it."""
    loop: float
    """In a plain loop."""
    kernels: float
    """In its operations alone."""

    @property
    def overhead(self) -> float:
        """Share of a served step."""
        return 1 - self.kernels / self.served


async def measure(made: Bench, batch: int, seed: int) -> Steps:
    """One round."""
    done = await made.round([WorkloadRequest(0.0, PROMPT, OUTPUT)] * batch, seed)
    kernels = await asyncio.to_thread(made.loops.kernel_seconds)
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
    """Batch sizes in turn, round by round, and one round before that does not count."""
    measured: dict[int, list[Steps]] = {batch: [] for batch in batches}
    async with bench(config) as made:
        for turn in range(rounds + 1):
            for place, batch in enumerate(batches):
                steps = await measure(made, batch, turn * len(batches) + place)
                if turn:
                    measured[batch].append(steps)
    return measured


def page(measured: dict[int, list[Steps]], rounds: int) -> str:
    """The figures in words and a table."""
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
    """Measure, print, write."""
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
        options.output, "Host overhead at one stage", page(measured, options.rounds), results
    )


if __name__ == "__main__":
    main()
