"""Compare ways to use two cores: threads of one process, two ranks of a stage, two stages.

The same model is served by one process with two threads, by `--tp 2` and by `--pp 2` with one
thread per process. Each round starts each engine once, in turn, and measures decodes of 1, 4 and 16
streams and the prefill of one prompt. Run as `python -m benchmarks.cpu.tensor_parallel --model
FOLDER`; it prints the figures and writes them to docs/benchmarks/tensor-parallel.md.
"""

import asyncio
import time
from collections.abc import Mapping
from random import Random
from statistics import median
from types import MappingProxyType
from typing import Any, NamedTuple

import uvloop

from benchmarks.confidence import format_range
from benchmarks.cpu.page import ForeignCpu, make_parser, origin, write_results
from gllm.config.engine import EngineConfig
from gllm.config.sampling import SamplingParams
from gllm.engine.engine import Engine
from gllm.sim.metrics.report import format_table

VARIANTS: Mapping[str, dict[str, Any]] = MappingProxyType(
    {
        "1 process, 2 threads": {"threads": 2},
        "`--tp 2`, 1 thread each": {"threads": 1, "tensor_parallel_size": 2},
        "`--pp 2`, 1 thread each": {"threads": 1, "pipeline_parallel_size": 2},
    }
)
"""Options of each variant; the first one is the reference."""
STREAMS = (1, 4, 16)
PROMPT_TOKENS, OUTPUT_TOKENS = 32, 64
"""Lengths of a stream whose decodes are measured."""
VOCABULARY = 2048
"""Prompts are of random token ids below this, which any model has."""
PREFILL_TOKENS = 512
PREFILLS = 3
"""Prompts per round, one after the other."""
PREFILL = f"prefill of {PREFILL_TOKENS}"

Figures = dict[str, float]
"""Tokens per second by cell: decodes of some streams, or PREFILL."""


class StreamTimes(NamedTuple):
    """Times at which a stream's tokens arrived; time.perf_counter()."""

    submitted: float
    first: float
    last: float
    num_tokens: int


def decode_cell(streams: int) -> str:
    """Return the name of the cell of some streams."""
    return f"decode of {streams}"


def decode_rate(streams: list[StreamTimes]) -> float:
    """Return tokens/s of all streams: the sum of their rates after each one's first token."""
    return sum((each.num_tokens - 1) / (each.last - each.first) for each in streams)


async def run_stream(engine: Engine, prompt: list[int], max_tokens: int) -> StreamTimes:
    """Run one request to its end."""
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    submitted = time.perf_counter()
    first, num_tokens = 0.0, 0
    async for delta in engine.generate(prompt, params):
        num_tokens += len(delta.token_ids)
        first = first or time.perf_counter()
    return StreamTimes(submitted, first, time.perf_counter(), num_tokens)


async def measure(config: EngineConfig, rng: Random) -> Figures:
    """Measure all cells with one engine, after a stream that does not count."""

    def random_prompt(length: int) -> list[int]:
        return [rng.randrange(3, VOCABULARY) for _ in range(length)]

    figures: Figures = {}
    async with Engine(config) as engine:
        await run_stream(engine, random_prompt(PREFILL_TOKENS), 8)
        for count in STREAMS:
            prompts = [random_prompt(PROMPT_TOKENS) for _ in range(count)]
            runs = (run_stream(engine, prompt, OUTPUT_TOKENS) for prompt in prompts)
            figures[decode_cell(count)] = decode_rate(list(await asyncio.gather(*runs)))
        prefills = [
            await run_stream(engine, random_prompt(PREFILL_TOKENS), 1) for _ in range(PREFILLS)
        ]
        figures[PREFILL] = median(PREFILL_TOKENS / (run.first - run.submitted) for run in prefills)
    return figures


def ratios(rounds: list[dict[str, Figures]], variant: str, cell: str) -> list[float]:
    """Return a variant's tokens/s over the reference's, within each round."""
    reference = next(iter(VARIANTS))
    return [each[variant][cell] / each[reference][cell] for each in rounds]


def format_page(rounds: list[dict[str, Figures]], foreign: float) -> str:
    """Format the figures in words and a table."""
    cells = [*map(decode_cell, STREAMS), PREFILL]
    header = ["tokens/s", *cells]
    rows = [
        [name, *(f"{median(each[name][cell] for each in rounds):.1f}" for cell in cells)]
        for name in VARIANTS
    ]
    compared = [
        [name, *(format_range(ratios(rounds, name, cell)) for cell in cells)]
        for name in list(VARIANTS)[1:]
    ]
    return "\n\n".join(
        [
            f"{origin('benchmarks.cpu.tensor_parallel')} Rounds: {len(rounds)}, medians; others "
            f"used {foreign:.2f} cores. Streams of {PROMPT_TOKENS} prompt and {OUTPUT_TOKENS} "
            "output tokens, greedy.",
            format_table(header, rows),
            "Relative to one process, within a round (median, and all rounds):",
            format_table(["ratio", *cells], compared),
        ]
    )


async def measure_rounds(
    config: dict[str, Any], model: str, rounds: int
) -> list[dict[str, Figures]]:
    """Measure every variant in each round; the order is reversed in every other round."""
    measured = []
    for number in range(rounds):
        names = list(VARIANTS)[:: -1 if number % 2 else 1]
        figures = {}
        for name in names:
            engine = EngineConfig.from_options(model, **config | VARIANTS[name])
            figures[name] = await measure(engine, Random(number))
            print(f"round {number}, {name}: {figures[name]}", flush=True)
        measured.append(figures)
    return measured


def main() -> None:
    """Measure, print the figures and write the page."""
    parser = make_parser(__doc__, "tensor-parallel", rounds=5)
    parser.add_argument("--dtype", default="bfloat16")
    options = parser.parse_args()
    config = {"dtype": options.dtype, "max_model_len": 1024, "kv_cache_memory": 2**29}
    watch = ForeignCpu()
    rounds = uvloop.run(measure_rounds(config, options.model, options.rounds))
    title = "Threads, ranks or stages on two cores"
    figures = format_page(rounds, watch.cores())
    write_results(options.output, title, figures, {"rounds": rounds})


if __name__ == "__main__":
    main()
