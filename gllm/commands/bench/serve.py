"""`gllm bench serve`: send load to an OpenAI-compatible server and report latency and throughput.

Exit status: 0; 1 if no server responds or every request failed; 2 for invalid options; 130 after
Ctrl-C, with a report of the requests finished until then.
"""

import argparse
import dataclasses
import math
import os
import sys
from datetime import UTC, datetime
from functools import reduce
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from gllm.commands.bench.client import (
    LoadResult,
    RequestResult,
    TargetServerError,
    open_session,
    request_body,
    run_load,
    send,
    wait_until_ready,
)
from gllm.commands.bench.load import plan_load, warmup_requests
from gllm.commands.bench.options import ServeConfig
from gllm.commands.bench.report import failure_lines, report_lines, request_details, summarize
from gllm.options.flags import FlagParser, FlagType, add_flags, config_from_flags
from gllm.options.slo import NO_SLO, Slo, parse_slo


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm bench serve`: ServeConfig's fields and SLOs."""
    parser = FlagParser(prog="gllm bench serve", description=(__doc__ or "").splitlines()[0])
    parser.add_config_flag()
    add_flags(parser, ServeConfig)
    parser.add_argument(
        "--goodput",
        "--slo",
        nargs="+",
        type=FlagType(_parse_limit),
        default=[],
        metavar="LATENCY:MS",
        help="latency limits for goodput, such as ttft:200 tpot:50 e2el:3000, in milliseconds; or "
        "ttft=0.2, in seconds",
    )
    return parser


def main(argv: list[str]) -> int:
    """Benchmark a running OpenAI-compatible server; print throughput and latencies.

    Returns:
        The exit status: 0 if a request succeeded; 1 if none did, or the server was not ready; 2 for
        invalid options; 130 after SIGINT.
    """
    values = make_parser().parse_args(argv)
    try:
        config = config_from_flags(ServeConfig, values)
        if config.plot:
            _check_plots()
        # The last limit of a latency counts.
        slo = reduce(lambda earlier, later: later.with_defaults(earlier), values.goodput, NO_SLO)
        return uvloop.run(_benchmark(config, slo))
    except TargetServerError as error:
        print(f"gllm bench serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        # Before the load there is nothing to report.
        return 130
    except (ValueError, OSError, ImportError) as error:
        print(f"gllm bench serve: {error}", file=sys.stderr)
        return 2


def _check_plots() -> None:
    """Raise ImportError if matplotlib is missing, before the load instead of after it."""
    try:
        import matplotlib  # noqa: F401 (availability check)
    except ImportError as error:
        raise ImportError(
            "--plot needs matplotlib: pip install '.[sim]' in gllm's checkout"
        ) from error


def _parse_limit(text: str) -> Slo:
    slo = parse_slo(text)
    if slo.percentiles:
        raise ValueError(f"{text}: goodput counts requests: limit each one, as in ttft:200")
    return slo


async def _benchmark(config: ServeConfig, slo: Slo) -> int:
    base_url = config.server_url.rstrip("/").removesuffix("/v1")
    url = base_url + config.endpoint
    api_key = config.api_key or os.environ.get("OPENAI_API_KEY")
    async with open_session(config, api_key) as session:
        served = await wait_until_ready(session, base_url, config.model, config.ready_timeout)
        vocab_size = config.vocab_size or served.vocab_size
        load = plan_load(config, vocab_size)
        bodies = [request_body(config, served.name, *request) for request in enumerate(load)]
        for planned in warmup_requests(config, load, vocab_size):
            body = request_body(config, served.name, 0, planned)
            warm = await send(session, url, body, planned.prompt_tokens)
            if warm.failure:
                raise TargetServerError(f"a warm-up request failed: {warm.failure}: {warm.detail}")

        async def send_one(index: int) -> RequestResult:
            planned = load[index]
            return await send(session, url, bodies[index], planned.prompt_tokens, planned.session)

        arrivals = [planned.arrival for planned in load]
        measured = await run_load(arrivals, send_one, config.max_concurrency, config.progress)
    return _report(config, served.name, measured, slo)


def _report(config: ServeConfig, model: str, measured: LoadResult, slo: Slo) -> int:
    """Print and write the result of a load; return the exit status."""
    outcomes = [measured.outcomes[index] for index in sorted(measured.outcomes)]
    percents = config.metric_percentiles
    figures = summarize(outcomes, measured.seconds, percents, slo)
    if measured.interrupted:
        print("Interrupted: unfinished requests are not counted.")
    print(
        *report_lines(
            figures,
            config.request_rate,
            config.max_concurrency,
            config.percentile_metrics,
            percents,
        ),
        sep="\n",
    )
    for line in failure_lines(outcomes):
        print(line, file=sys.stderr)
    now = datetime.now(UTC)
    result = result_document(config, model, slo, figures, now)
    if config.save_detailed:
        result |= request_details(outcomes)
    for path in _result_paths(config, model, now):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
        print(f"wrote {path}")
    if config.plot:
        # Only plots need matplotlib.
        from gllm.commands.bench.report import plot_load

        lines = [outcome.timeline for outcome in outcomes if not outcome.failure]
        names = plot_load(lines, f"{model} at {config.server_url}", Path(config.plot))
        print(f"wrote {' and '.join(names)} to {config.plot}")
    if measured.interrupted:
        return 130
    return 0 if figures["completed"] else 1


def result_document(
    config: ServeConfig, model: str, slo: Slo, figures: dict[str, Any], now: datetime
) -> dict[str, Any]:
    """Return the JSON result of a run: its options without the API key, and its metrics."""
    options = dataclasses.asdict(config)
    del options["api_key"]
    rate = "inf" if math.isinf(config.request_rate) else config.request_rate
    return {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if config.chat else "openai",
        "model_id": model,
        "num_prompts": config.load.num_prompts,
        "request_rate": rate,
        "burstiness": config.burstiness,
        "max_concurrency": config.max_concurrency,
        "goodput_slo_ms": {
            metric: round(seconds * 1e3, 6) for metric, seconds in slo.request_limits.items()
        },
        "configuration": options | {"request_rate": rate},
        **figures,
    }


def _result_paths(config: ServeConfig, model: str, now: datetime) -> list[Path]:
    """Return the files that the result is written to."""
    paths = [Path(config.save_result)] if config.save_result else []
    if config.result_dir:
        limit = f"-concurrency{config.max_concurrency}" if config.max_concurrency else ""
        base = model.rstrip("/").rpartition("/")[2]
        name = f"{config.request_rate:g}qps{limit}-{base}-{now:%Y%m%d-%H%M%S}.json"
        paths.append(Path(config.result_dir) / name)
    return paths
