"""`gllm profile`: measures a model on this machine, as it is served, and writes a profile.

Serves workloads that cover the costs of a pipeline. The measurements are the step log of a real
engine, so they include scheduling, metadata and links; `gllm.sim.costs.fitted` fits them.
"""

import argparse
import asyncio
import math
import platform
import random
import sys
import tempfile
from collections.abc import Awaitable, Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from importlib.metadata import version
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import msgspec

from gllm.commands.bench.real import RoundRobinLock, run_logged, serve_workload
from gllm.commands.bench.real_server import RealServer, pair_requests, start_server
from gllm.commands.profile.operator_profile import (
    OperatorPoints,
    OperatorProfiler,
    count_table_rows,
)
from gllm.commands.profile.parts import count_span_steps, measure_samplers, measure_spans
from gllm.config.engine import MAX_RANKS, EngineConfig
from gllm.engine.engine import Engine, EngineError
from gllm.models.config import read_config
from gllm.models.errors import ModelError
from gllm.models.hub import resolve_model
from gllm.observability.progress import show_progress
from gllm.observability.step_log import read_step_log
from gllm.options.flags import (
    FlagParser,
    FlagType,
    add_flags,
    config_from_flags,
    number_type,
    output_file,
    output_folder,
    parse_counts,
)
from gllm.options.options import INT32_MAX, Range
from gllm.sim.costs.profile import (
    DEBUG_STEP_SECONDS,
    CostProfile,
    HostSamples,
    SpanSample,
    build_host_samples,
    build_profile,
    write_profile,
)
from gllm.sim.hardware.stages import format_degrees
from gllm.sim.metrics.run_record import build_run_record
from gllm.sim.workloads.requests import WorkloadRequest

DECODE_BATCHES = (1, 2, 4, 8, 16, 32)
"""Decodes per micro-batch, with short contexts and with contexts of all lengths."""
LARGE_DECODE_BATCHES = (64, 128, 256)
"""Further numbers of decodes per micro-batch, with short contexts, up to max_num_seqs."""
CHUNK_BATCHES = (4, 16, 64)
"""Short prompts that arrive at once: many chunks per micro-batch."""
SHORT_PROMPT_TOKENS = 24
DECODE_TOKENS = 40
"""Output tokens of each decode."""
PREFILLS = (8, 16, 32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048)
"""Tokens of single prompts."""
REPEATS = 4
"""Times that each single prompt is served."""
BURST = 20
"""Requests of a burst, and as many with Poisson arrivals after each."""
SHARES = (0.3, 0.3, 0.6, 0.6)
"""Request rates as shares of the rate at which a burst is served."""
HOST_SHARES = (0.3, 0.6, 0.9, 0.3, 0.6, 0.9)
"""Request rates of the server, as shares of the rate at which a burst is served."""
SWEEP_TURNS = 6
OPERATOR_DEFAULTS = {"tokens": 4096, "batch": 128, "stride": 1, "repeats": 20}
"""Values of the flags --operator-..., which are Vidur's."""
MAX_CONTEXT = 8192
"""Longest text that is measured, in tokens."""
ACTIVATION_ITEM_BYTES = 4
"""Bytes per element of the activations between stages, at most."""


def make_sweep_workloads(
    stages: int, longest: int, max_num_seqs: int = 256, max_tokens: int = 2560
) -> list[list[WorkloadRequest]]:
    """Return workloads whose steps cover the batch sizes and context lengths of a pipeline.

    Batches of decodes with short contexts and with contexts of all lengths, single prompts of
    increasing length, many short prompts at once, and as many tokens as a micro-batch allows.

    Args:
        stages: number of pipeline stages.
        longest: tokens of the longest sequence.
        max_num_seqs: maximum number of sequences at a time.
        max_tokens: maximum number of tokens of a micro-batch.
    """
    rng = random.Random(0)
    workloads = []
    longest_prompt = longest - DECODE_TOKENS
    for batch in (*DECODE_BATCHES, *LARGE_DECODE_BATCHES):
        if batch * stages > max_num_seqs:
            continue
        contexts = [max(1, longest_prompt // 64)]
        contexts += [longest_prompt * 3 // 4] if batch in DECODE_BATCHES else []
        for most in contexts:
            prompts = [rng.randint(1, most) for _ in range(batch * stages)]
            workloads.append([WorkloadRequest(0.0, prompt, DECODE_TOKENS) for prompt in prompts])
    # Decodes at the end of the longest text, alone and together: nothing is longer.
    for batch in (1, 2 * stages):
        workloads.append([WorkloadRequest(0.0, longest_prompt, DECODE_TOKENS)] * batch)
    prompts = [tokens for tokens in PREFILLS if tokens < longest_prompt] + [longest - 1]
    workloads += [[WorkloadRequest(0.0, tokens, 1)] for tokens in prompts for _ in range(REPEATS)]
    for batch in CHUNK_BATCHES:
        short = WorkloadRequest(0.0, SHORT_PROMPT_TOKENS, 1)
        workloads.append([short] * batch)
    decodes = [WorkloadRequest(0.0, 1, DECODE_TOKENS)] * 8 * stages
    longs = [WorkloadRequest(0.001, longest_prompt, 1)] * (stages + 2 * max_tokens // longest)
    return [*workloads, decodes + longs]


def make_mixed_workload(count: int, longest: int, rate: float, seed: int) -> list[WorkloadRequest]:
    """Return requests with random prompt and output lengths and Poisson arrivals.

    Args:
        count: number of requests.
        longest: tokens of the longest sequence; prompts have at most half of it.
        rate: requests per second; all arrive at once if it is infinite.
        seed: seed of lengths and arrivals.
    """
    rng = random.Random(seed)
    arrivals = accumulate(rng.expovariate(1) / rate for _ in range(count))
    return [WorkloadRequest(a, rng.randint(1, longest // 2), rng.randint(4, 60)) for a in arrivals]


async def measure_profile(
    config: EngineConfig,
    progress: bool = True,
    turns: RoundRobinLock | None = None,
    rounds: int = 1,
) -> CostProfile:
    """Measure step times of an engine by serving workloads; return them as a cost profile.

    The simulator reads the profile. Two engines run: one computes prompts without chunking, the
    other as configured. A server then serves requests of this process over HTTP, which measures the
    work of frontend and client beside the engine. Ranges of layers are timed alone at last.

    Args:
        config: configuration of the engine to measure.
        progress: True to show the progress on standard error.
        turns: lock by which the two engines and the server, started together, run alternately; None
            to start them one after the other.
        rounds: number of times that all workloads are served.
    """
    stages = config.pipeline_parallel_size
    bar = show_progress("request", name="profile", is_shown=progress)

    async def sweep(engine: Engine) -> None:
        scheduler = config.scheduler.resolve(stages, 2**30, engine.model.max_model_len)
        assert scheduler.max_num_batched_tokens is not None
        workloads = make_sweep_workloads(
            stages, _longest(engine), scheduler.max_num_seqs, scheduler.max_num_batched_tokens
        )
        num_mixed = 2 * BURST * (len(SHARES) + len(HOST_SHARES))
        bar.total = rounds * (sum(map(len, workloads)) + num_mixed)
        mine = await _begin(turns)
        for _ in range(rounds):
            for part in range(SWEEP_TURNS):
                async with mine:
                    for seed, jobs in enumerate(workloads[part::SWEEP_TURNS]):
                        await serve_workload(engine, jobs, seed, bar.update)
        await mine.end()

    async def mix(engine: Engine) -> None:
        async def serve(jobs: list[WorkloadRequest], seed: int) -> None:
            await serve_workload(engine, jobs, seed, bar.update)

        longest.set_result(_longest(engine))
        await _serve_mixed(serve, _longest(engine), SHARES, await _begin(turns), rounds)

    async def mix_over_http(server: RealServer) -> None:
        async def serve(jobs: list[WorkloadRequest], seed: int) -> None:
            await server.serve_workload(jobs, seed, bar.update)

        mine = await _begin(turns)
        await _serve_mixed(serve, await longest, HOST_SHARES, mine, rounds)

    # Whole prompts, and micro-batches up to the limit: no load has larger ones.
    most = config.scheduler.resolve(stages, 2**30, 2**30).max_num_batched_tokens
    whole = _uncached(config, policy="sarathi", max_num_batched_tokens=most)
    cut = _uncached(config)
    longest: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    with bar:
        if turns:
            *runs, host = await asyncio.gather(
                run_logged(whole, sweep), run_logged(cut, mix), _measure_host(cut, mix_over_http)
            )
        else:
            runs = [await run_logged(whole, sweep), await run_logged(cut, mix)]
            host = await _measure_host(cut, mix_over_http)
    profile = build_profile([build_run_record(run) for run in reversed(runs)], _machine(config))
    profile = msgspec.structs.replace(profile, host=host)
    # The other engines wait: they would slow the parts down, and the parts them.
    async with turns or nullcontext():
        return await asyncio.to_thread(_add_spans, profile, config, progress)


async def _serve_mixed(
    serve: Callable[[list[WorkloadRequest], int], Awaitable[None]],
    longest: int,
    shares: Sequence[float],
    mine: RoundRobinLock,
    rounds: int,
) -> None:
    """Serve bursts, each with Poisson arrivals at a share of the rate of bursts after it.

    Args:
        serve: Serves requests, with a seed for their prompts.
        longest: Tokens of the longest sequence.
        shares: Shares of the rate.
        mine: Lock that is held while a burst and the requests after it are served.
        rounds: Number of times that all of them are served.
    """
    loop, seconds = asyncio.get_running_loop(), []
    for _ in range(rounds):
        for index, share in enumerate(shares):
            async with mine:
                begin = loop.time()
                await serve(make_mixed_workload(BURST, longest, math.inf, index), index)
                seconds.append(loop.time() - begin)
                rate, seed = share * BURST / median(seconds), len(shares) + index
                await serve(make_mixed_workload(BURST, longest, rate, seed), seed)
    await mine.end()


async def _measure_host(
    config: EngineConfig, serve: Callable[[RealServer], Awaitable[None]]
) -> HostSamples:
    """Start a server, call `serve` with it and return its samples."""
    with tempfile.TemporaryDirectory(prefix="gllm-") as folder:
        log = Path(folder) / "steps.jsonl"
        async with start_server(config, log) as server:
            await serve(server)
        events = list(read_step_log(log))
    run = build_run_record(events)
    # The bursts only tell the rate: no core is free in them, and their first request waits, too,
    # until this process has sent the last one.
    requests = [request for request in server.served if request.job.arrival_seconds > 0]
    return build_host_samples(run, pair_requests(requests, events, run))


def _add_spans(profile: CostProfile, config: EngineConfig, progress: bool) -> CostProfile:
    """Return a profile with the steps of parts of the model."""
    degrees = set(profile.degrees or [1])
    if len(degrees) > 1:
        return profile  # Stages of different ranks are priced as they are, in no other cut.
    folder = resolve_model(config.model, check=partial(read_config, overrides=config.hf_overrides))
    config = replace(config, max_model_len=profile.scheduler.max_model_len)
    longest, num_ranks = min(profile.scheduler.max_model_len - 1, MAX_CONTEXT), degrees.pop()
    model = read_config(folder, config.hf_overrides).model
    total = count_span_steps(model.num_layers, profile.layers, longest)
    with show_progress("step", total, "parts of the model", is_shown=progress) as bar:
        measured = measure_spans(config, folder, profile.layers, longest, num_ranks, bar.update)
    spans = [with_min_seconds(span, config.debug_step_seconds) for span in measured]
    samplers = measure_samplers(config, folder, num_ranks)
    return msgspec.structs.replace(
        profile,
        spans=spans,
        samplers=samplers,
        activation_bytes=model.hidden_size * ACTIVATION_ITEM_BYTES,
    )


def with_min_seconds(span: SpanSample, min_seconds: float) -> SpanSample:
    """Return a timing with seconds raised to at least `min_seconds` (debug_step_seconds)."""
    stages = [max(seconds, min_seconds) for seconds in span.step.stages]
    return msgspec.structs.replace(span, step=msgspec.structs.replace(span.step, stages=stages))


async def _begin(turns: RoundRobinLock | None) -> RoundRobinLock:
    """Start taking turns, with a private lock if none is given."""
    turns = turns or RoundRobinLock(1)
    await turns.start()
    return turns


def _machine(config: EngineConfig) -> dict[str, str]:
    facts = {
        "device": _processor(),
        "threads": str(config.threads or "auto"),
        "dtype": config.dtype,
        "python": platform.python_version(),
        "torch": version("torch"),
    }
    if config.debug_step_seconds:
        facts[DEBUG_STEP_SECONDS] = str(config.debug_step_seconds)
    return facts


def _longest(engine: Engine) -> int:
    """Return the tokens of the longest text to measure."""
    return min(engine.model.max_model_len, MAX_CONTEXT)


def _uncached(config: EngineConfig, **options: Any) -> EngineConfig:
    """Return the configuration without a prefix cache."""
    return replace(config, scheduler=replace(config.scheduler, prefix_cache=False, **options))


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm profile`, with all engine flags."""
    parser = FlagParser(prog="gllm profile", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model_name", nargs="?", metavar="MODEL", help="as --model")
    parser.add_argument(
        "--output",
        help="file to write (profile.json); with --operators a folder (operators)",
    )
    parser.add_argument(
        "--operators",
        action="store_true",
        help="time single operators at Vidur's points, for the shards of --operator-tp",
    )
    parser.add_argument(
        "--operator-tp",
        type=FlagType(parse_counts, int, Range(ge=1, le=MAX_RANKS)),
        default=(1,),
        help="tensor parallel sizes whose shards are timed on one device, such as 1,2 (default 1)",
    )
    count = number_type(int, ge=1, le=INT32_MAX)
    for name, text in (
        ("tokens", "most tokens of a micro-batch and of a context"),
        ("batch", "most decodes of a micro-batch"),
        ("stride", "measure only every Nth point, to save time"),
        ("repeats", "number of measurements of each operator"),
    ):
        default = OPERATOR_DEFAULTS[name]
        parser.add_argument(
            f"--operator-{name}", type=count, default=default, help=f"{text} (default {default})"
        )
    parser.add_config_flag()
    add_flags(parser, EngineConfig)
    return parser


def main(argv: list[str]) -> int:
    """Measure the step times of an engine and write them to `--output` as a cost profile.

    The simulator and the planners read the profile. With `--operators` single operators are timed
    instead, and their tables are written into a folder.

    Returns:
        The exit status: 2 for invalid options, an unusable model or a failed engine.
    """
    values = make_parser().parse_args(argv)
    values.model = values.model_name or values.model
    output = values.output or ("operators" if values.operators else "profile.json")
    try:
        config = config_from_flags(EngineConfig, values)
        if config.is_emulated:
            raise ValueError(
                f"--device {config.device}: gllm profile measures this machine's device, and the "
                "times of an emulated one are those of a profile: choose cpu, cuda or auto"
            )
        _check_output(output, output_folder if values.operators else output_file)
        if values.operators:
            _profile_operators(config, values, Path(output))
        else:
            write_profile(asyncio.run(measure_profile(config)), output)
    except (ValueError, OSError, ModelError, EngineError) as error:
        print(f"gllm profile: {error}", file=sys.stderr)
        return 2
    print(f"wrote {output}; next: gllm simulate --profile {output}")
    return 0


def _check_output(output: str, check: Callable[[str], str]) -> None:
    """Raise ValueError if the file or folder cannot be written, before minutes of measurement."""
    try:
        check(output)
    except ValueError as error:
        raise ValueError(f"--output {output}: cannot be used: {error}") from None


def _profile_operators(config: EngineConfig, values: argparse.Namespace, folder: Path) -> None:
    """Time the operators of a model and write the tables.

    Raises:
        ValueError: A flag or the structure of the model does not fit.
        ModelError: There is no such model.
        OSError: The tables cannot be written.
    """
    if config.tensor_parallel_size != (1,):
        ranks = format_degrees(config.tensor_parallel_size)
        raise ValueError(
            f"--operators times shards on one device, so --tp {ranks} has no meaning: name the "
            f"tensor parallel sizes with --operator-tp {ranks}, and leave --tp out"
        )
    if config.pipeline_parallel_size != 1:
        raise ValueError(
            "--operators times the operators of a layer, which price any number of stages: leave "
            "--pp out"
        )
    points = OperatorPoints(
        values.operator_tokens,
        values.operator_batch,
        values.operator_stride,
        values.operator_repeats,
    )
    degrees = sorted(set(values.operator_tp))
    total = count_table_rows(points, degrees)
    with show_progress("row", total, "operators") as bar:
        profiler = OperatorProfiler(
            config, resolve_model(config.model), _machine(config)["device"], points, bar.update
        )
        profiler.run(degrees).write(folder)
