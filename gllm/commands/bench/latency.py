"""`gllm bench latency`: measure the latency of one batch of equal requests, without HTTP."""

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

import msgspec
import uvloop

from gllm.commands.bench.real import serve_workload
from gllm.config.engine import EngineConfig
from gllm.engine.engine import Engine, EngineError
from gllm.observability.latency import percentile
from gllm.observability.progress import show_progress
from gllm.options.field_types import convert_fields
from gllm.options.flags import FlagParser, add_flags, config_from_flags, output_file
from gllm.options.options import INT32_MAX, option
from gllm.sim.workloads.requests import WorkloadRequest

PERCENTS = (10, 25, 50, 75, 90, 99)


@dataclass(frozen=True)
class LatencyConfig:
    """Options of `gllm bench latency`: batch size, request lengths and number of batches."""

    input_len: int = option(32, "prompt tokens of each request", ge=1, le=INT32_MAX)
    output_len: int = option(128, "output tokens of each request", ge=1, le=INT32_MAX)
    batch_size: int = option(8, "requests in the batch", ge=1, le=INT32_MAX)
    num_iters_warmup: int = option(10, "batches before the measurement starts", ge=0, le=INT32_MAX)
    num_iters: int = option(30, "batches measured", ge=1, le=INT32_MAX)
    output_json: str | None = option(None, "file for the result", parse=output_file)

    def __post_init__(self) -> None:
        """Check types and ranges.

        Raises:
            ValueError: A field is invalid; the message names the field and the fix.
        """
        convert_fields(self)


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm bench latency`, with all engine flags."""
    parser = FlagParser(prog="gllm bench latency", description=(__doc__ or "").splitlines()[0])
    parser.add_config_flag()
    add_flags(parser, EngineConfig)
    add_flags(parser, LatencyConfig)
    return parser


def main(argv: list[str]) -> int:
    """Measure how long an engine in this process takes for a batch of equal requests.

    Prints mean and percentiles of the seconds per batch, and writes them to `--output-json`.

    Returns:
        The exit status: 1 if the engine fails, 2 for invalid options or an unwritable file.
    """
    values = make_parser().parse_args(argv)
    try:
        engine = config_from_flags(EngineConfig, values)
        batch = config_from_flags(LatencyConfig, values)
        seconds = uvloop.run(_measure(engine, batch))
        percentiles = {percent: percentile(seconds, percent) for percent in PERCENTS}
        print(f"Avg latency: {fmean(seconds)} seconds")
        for percent, value in percentiles.items():
            print(f"{percent}% percentile latency: {value} seconds")
        if batch.output_json:
            figures = {
                "avg_latency": fmean(seconds),
                "latencies": seconds,
                "percentiles": {str(percent): value for percent, value in percentiles.items()},
            }
            Path(batch.output_json).write_bytes(msgspec.json.encode(figures) + b"\n")
    except (ValueError, OSError, EngineError) as error:
        print(f"gllm bench latency: {error}", file=sys.stderr)
        return 1 if isinstance(error, EngineError) else 2
    return 0


async def _measure(config: EngineConfig, batch: LatencyConfig) -> list[float]:
    """Return the seconds of each measured batch; batches share no prompts."""
    jobs = [WorkloadRequest(0.0, batch.input_len, batch.output_len)] * batch.batch_size
    seconds = []
    async with Engine(config, progress=True) as engine:
        num_rounds = batch.num_iters_warmup + batch.num_iters
        with show_progress("batch", num_rounds) as bar:
            for seed in range(num_rounds):
                begin = time.monotonic()
                await serve_workload(engine, jobs, seed)
                seconds.append(time.monotonic() - begin)
                bar.update()
    return seconds[batch.num_iters_warmup :]
