"""`gllm simulate`: predict latency and throughput of a deployment, or compare with a real run."""

import argparse
import sys
from pathlib import Path
from typing import Any

import msgspec

from gllm.config.flags import (
    FlagParser,
    FlagType,
    add_flags,
    config_from_flags,
    output_file,
    output_folder,
)
from gllm.observability.step_log import StepLogWriter
from gllm.sim.compare import compare_with_profile, comparison_table
from gllm.sim.deployment import simulate
from gllm.sim.metrics.report import format_metrics_table, summarize_run
from gllm.sim.metrics.run_record import RunRecord
from gllm.sim.options import SimulationConfig, build_deployment, build_workload


def make_parser() -> argparse.ArgumentParser:
    """Return the flags: those of SimulationConfig, and the output files."""
    parser = FlagParser(prog="gllm simulate", description=__doc__.splitlines()[0])
    parser.add_config_flag()
    add_flags(parser, SimulationConfig)
    parser.add_argument("--compare", metavar="LOG", help="step log of a real run to compare with")
    parser.add_argument(
        "--output", metavar="FOLDER", type=FlagType(output_folder), help="folder for JSON and plots"
    )
    parser.add_argument(
        "--step-log",
        metavar="FILE",
        type=FlagType(output_file),
        help="write the simulated run as a step log",
    )
    return parser


def main(argv: list[str]) -> int:
    """Run `gllm simulate` and return the exit status."""
    values = make_parser().parse_args(argv)
    try:
        config = config_from_flags(SimulationConfig, values)
        if values.compare:
            return _compare(config, values.compare, values.output)
        jobs = build_workload(config)
        longest = max(job.num_prompt_tokens + job.num_output_tokens for job in jobs)
        deployment = build_deployment(config, longest)
        if values.step_log:
            log = StepLogWriter(values.step_log)
            run = simulate(deployment, jobs, log.write)
            log.close()
        else:
            run = simulate(deployment, jobs)
        summary = summarize_run(run, config.slo_ttft, config.slo_tpot)
        print(format_metrics_table({run.start.scheduler.policy: summary}))
        if values.output:
            write_outputs(run, summary, Path(values.output))
    except BrokenPipeError:
        raise  # The reader of the table has gone, which is no error: see gllm/__main__.py.
    except (ValueError, OSError) as error:
        print(f"gllm simulate: {error}", file=sys.stderr)
        return 2
    return 0


def write_outputs(run: RunRecord, summary: dict[str, Any], folder: Path) -> None:
    """Write metrics.json, latencies.svg, tokens.svg and gantt.svg.

    Raises:
        OSError: A file cannot be written.
    """
    # Only plots need matplotlib.
    from gllm.sim.metrics.plots import plot_gantt, plot_latencies, plot_tokens

    folder.mkdir(parents=True, exist_ok=True)
    document = {"start": run.start, "metrics": summary}
    (folder / "metrics.json").write_bytes(
        msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"
    )
    plot_latencies(run, folder / "latencies.svg")
    plot_tokens(run, folder / "tokens.svg")
    plot_gantt(run, folder / "gantt.svg")
    print(f"wrote metrics.json, latencies.svg, tokens.svg and gantt.svg to {folder}")


def _compare(config: SimulationConfig, log: str, output: str | None) -> int:
    """Print a real run next to its prediction from the profile."""
    if config.profile is None:
        raise ValueError("--compare needs --profile, a profile of the same model and stages")
    comparison = compare_with_profile(log, config.profile)
    print(comparison_table(comparison))
    if output:
        write_outputs(comparison.predicted, summarize_run(comparison.predicted), Path(output))
    return 0
