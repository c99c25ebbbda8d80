"""`gllm bench serve`: loads any OpenAI-compatible server and says how it did.

Owns the command: flags, warm-up, output. Knows nothing of how requests are sent and of figures.
Exit status: 0; 1 where no server answers or every request failed; 2 for what cannot be asked; 130
after Ctrl-C, with a report of what was measured by then.
"""

import argparse
import dataclasses
import math
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from gllm.commands.bench.client import Outcome, open_session, request_body, send
from gllm.commands.bench.load import planned_load, warm_ups
from gllm.commands.bench.options import ServeConfig, parse_slo
from gllm.commands.bench.report import details, failure_lines, report_lines, summarize
from gllm.commands.bench.runner import Measured, run_load
from gllm.commands.bench.server import ServerError, wait_until_ready
from gllm.config.flags import FlagParser, FlagType, add_flags, config_from_flags


def make_parser() -> argparse.ArgumentParser:
    """The command's flags: those of ServeConfig, and the limits of goodput."""
    parser = FlagParser(prog="gllm bench serve", description=(__doc__ or "").splitlines()[0])
    parser.add_config_flag()
    add_flags(parser, ServeConfig)
    parser.add_argument(
        *("--goodput", "--slo"),
        nargs="+",
        type=FlagType(parse_slo),
        default=[],
        metavar="LATENCY:MS",
        help="limits for goodput, as ttft:200 tpot:50 e2el:3000",
    )
    return parser


def main(argv: list[str]) -> int:
    """The command."""
    values = make_parser().parse_args(argv)
    try:
        config = config_from_flags(ServeConfig, values)
        if config.plot:
            _check_plots()
        return uvloop.run(_benchmark(config, dict(values.goodput)))
    except ServerError as error:
        print(f"gllm bench serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        # Before the load: there is nothing to tell.
        return 130
    except (ValueError, OSError, ImportError) as error:
        print(f"gllm bench serve: {error}", file=sys.stderr)
        return 2


def _check_plots() -> None:
    """Raises ImportError without matplotlib: before the load, not after it."""
    try:
        import matplotlib  # noqa: F401 (whether it is there is the question)
    except ImportError as error:
        raise ImportError("--plot needs matplotlib: pip install gllm[sim]") from error


async def _benchmark(config: ServeConfig, slo: dict[str, float]) -> int:
    base_url = config.base_url.rstrip("/").removesuffix("/v1")
    url = base_url + config.endpoint
    api_key = config.api_key or os.environ.get("OPENAI_API_KEY")
    async with open_session(config, api_key) as session:
        served = await wait_until_ready(session, base_url, config.model, config.ready_timeout)
        vocab_size = config.vocab_size or served.vocab_size
        load = planned_load(config, vocab_size)
        bodies = [request_body(config, served.name, *each) for each in enumerate(load)]
        for planned in warm_ups(config, load, vocab_size):
            body = request_body(config, served.name, 0, planned)
            warm = await send(session, url, body, planned.prompt_tokens)
            if warm.failure:
                raise ServerError(f"a warm-up request failed: {warm.failure}: {warm.detail}")

        async def send_one(place: int) -> Outcome:
            return await send(session, url, bodies[place], load[place].prompt_tokens)

        arrivals = [planned.arrival for planned in load]
        measured = await run_load(arrivals, send_one, config.max_concurrency, config.progress)
    return _tell(config, served.name, measured, slo)


def _tell(config: ServeConfig, model: str, measured: Measured, slo: dict[str, float]) -> int:
    """Print and write what was measured; the exit status."""
    outcomes = [measured.outcomes[place] for place in sorted(measured.outcomes)]
    percents = config.metric_percentiles
    figures = summarize(outcomes, measured.seconds, percents, slo)
    if measured.interrupted:
        print("Interrupted: requests under way are left out.")
    print(
        *report_lines(
            *(figures, config.request_rate, config.max_concurrency),
            *(config.percentile_metrics, percents),
        ),
        sep="\n",
    )
    for line in failure_lines(outcomes):
        print(line, file=sys.stderr)
    now = datetime.now(UTC)
    result = result_of(config, model, slo, figures, now)
    if config.save_detailed:
        result |= details(outcomes)
    for path in _result_paths(config, model, now):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
        print(f"wrote {path}")
    if config.plot:
        # Plots need matplotlib, which the rest does without.
        from gllm.commands.bench.plots import plot_load

        lines = [outcome.line for outcome in outcomes if not outcome.failure]
        names = plot_load(lines, f"{model} at {config.base_url}", Path(config.plot))
        print(f"wrote {' and '.join(names)} to {config.plot}")
    if measured.interrupted:
        return 130
    return 0 if figures["completed"] else 1


def result_of(
    config: ServeConfig, model: str, slo: dict[str, float], figures: dict[str, Any], now: datetime
) -> dict[str, Any]:
    """The JSON file: what was asked, then the figures. The key to the server is left out."""
    asked = dataclasses.asdict(config)
    del asked["api_key"]
    rate = "inf" if math.isinf(config.request_rate) else config.request_rate
    return {
        "date": now.strftime("%Y%m%d-%H%M%S"),
        "backend": "openai-chat" if config.chat else "openai",
        "model_id": model,
        "num_prompts": config.load.num_prompts,
        "request_rate": rate,
        "burstiness": config.burstiness,
        "max_concurrency": config.max_concurrency,
        "goodput_slo_ms": slo,
        "configuration": asked | {"request_rate": rate},
        **figures,
    }


def _result_paths(config: ServeConfig, model: str, now: datetime) -> list[Path]:
    """Where the result goes."""
    paths = [Path(config.save_result)] if config.save_result else []
    if config.result_dir:
        limit = f"-concurrency{config.max_concurrency}" if config.max_concurrency else ""
        base = model.rstrip("/").rpartition("/")[2]
        name = f"{config.request_rate:g}qps{limit}-{base}-{now:%Y%m%d-%H%M%S}.json"
        paths.append(Path(config.result_dir) / name)
    return paths
