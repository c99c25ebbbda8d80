"""`gllm bench throughput`: measure the throughput of an engine when all requests arrive at once."""

import argparse
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from gllm.commands.bench.load import jobs_of
from gllm.commands.bench.options import LoadConfig
from gllm.commands.bench.real import serve_workload
from gllm.config.engine import EngineConfig
from gllm.engine.engine import Engine, EngineError
from gllm.observability.progress import show_progress
from gllm.options.flags import FlagParser, FlagType, add_flags, config_from_flags, output_file
from gllm.sim.workloads.requests import WorkloadRequest


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm bench throughput`: engine flags and workload flags."""
    parser = FlagParser(
        prog="gllm bench throughput",
        description=(__doc__ or "").splitlines()[0],
        conflict_handler="resolve",
    )
    parser.add_config_flag()
    add_flags(parser, EngineConfig)
    # Both have --seed: one flag for the load and for sampling.
    add_flags(parser, LoadConfig)
    parser.add_argument(
        "--output-json", metavar="FILE", type=FlagType(output_file), help="file for the result"
    )
    return parser


def main(argv: list[str]) -> int:
    """Measure offline throughput of an engine in this process: all requests arrive at once.

    Prints requests and tokens per second, and writes them to `--output-json`.

    Returns:
        The exit status: 1 if the engine fails, 2 for invalid options or an unwritable file.
    """
    values = make_parser().parse_args(argv)
    try:
        engine = config_from_flags(EngineConfig, values)
        load = config_from_flags(LoadConfig, values)
        jobs = jobs_of(load)
        figures = throughput_metrics(jobs, uvloop.run(_measure_seconds(engine, jobs, load.seed)))
        print(
            f"Throughput: {figures['requests_per_second']:.2f} requests/s, "
            f"{figures['tokens_per_second']:.2f} total tokens/s, "
            f"{figures['output_tokens_per_second']:.2f} output tokens/s"
        )
        print(f"Total num prompt tokens:  {figures['total_prompt_tokens']}")
        print(f"Total num output tokens:  {figures['total_output_tokens']}")
        if values.output_json:
            Path(values.output_json).write_bytes(msgspec.json.encode(figures) + b"\n")
    except (ValueError, OSError, EngineError) as error:
        print(f"gllm bench throughput: {error}", file=sys.stderr)
        return 1 if isinstance(error, EngineError) else 2
    return 0


def throughput_metrics(jobs: list[WorkloadRequest], seconds: float) -> dict[str, Any]:
    """Return token counts and throughput of an offline run, by the keys of the JSON result."""
    prompt = sum(job.num_prompt_tokens for job in jobs)
    output = sum(job.num_output_tokens for job in jobs)
    return {
        "elapsed_time": seconds,
        "num_requests": len(jobs),
        "total_prompt_tokens": prompt,
        "total_output_tokens": output,
        "total_num_tokens": prompt + output,
        "requests_per_second": len(jobs) / seconds,
        "tokens_per_second": (prompt + output) / seconds,
        "output_tokens_per_second": output / seconds,
    }


async def _measure_seconds(config: EngineConfig, jobs: list[WorkloadRequest], seed: int) -> float:
    """Return the seconds from submitting the first request to receiving the last token."""
    async with Engine(config, progress=True) as engine:
        with show_progress("request", len(jobs)) as bar:
            begin = time.monotonic()
            await serve_workload(engine, jobs, seed, bar.update)
            return time.monotonic() - begin
