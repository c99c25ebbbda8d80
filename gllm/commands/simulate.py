"""`gllm simulate`: predict latency and throughput of a deployment, or compare with a real run."""

import argparse
import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import msgspec

from gllm.observability.progress import show_progress
from gllm.options.flags import (
    FlagParser,
    FlagType,
    add_flags,
    config_from_flags,
    flags_of_config,
    number_type,
    output_file,
    output_folder,
)
from gllm.sim.capacity import CAPACITY_RULES, Capacity, find_capacity
from gllm.sim.compare import compare_with_profile, comparison_table
from gllm.sim.configured import (
    SimulationAtRate,
    SimulationResult,
    build_simulation,
    run_simulation,
)
from gllm.sim.description import describe_below_range, describe_load, describe_simulation
from gllm.sim.metrics.report import (
    format_engine_table,
    format_metrics_table,
    format_table,
    show_value,
    summarize_run,
)
from gllm.sim.metrics.session_turns import turn_lines
from gllm.sim.options import SimulationConfig
from gllm.sim.profiled import measured_path


class _ProfileRecord(msgspec.Struct):
    """Part of a metrics.json that names its profile."""

    configuration: dict[str, Any] = {}
    profile_sha256: str = ""


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm simulate`."""
    parser = FlagParser(prog="gllm simulate", description=__doc__.splitlines()[0])
    parser.add_config_flag()
    add_flags(parser, SimulationConfig, takes_entries=True)
    parser.add_argument("--compare", metavar="LOG", help="step log of a real run to compare with")
    parser.add_argument(
        "--output",
        metavar="FOLDER",
        type=FlagType(output_folder),
        help="folder for plots and metrics.json, which --config takes to repeat the simulation",
    )
    parser.add_argument(
        "--step-log",
        metavar="FILE",
        type=FlagType(output_file),
        help="write the simulated run as a step log",
    )
    parser.add_argument(
        "--jobs",
        metavar="NUMBER",
        type=number_type(int, ge=1, le=1024),
        default=len(os.sched_getaffinity(0)),
        help="processes of --capacity (default: one per core)",
    )
    return parser


def main(argv: list[str]) -> int:
    """Simulate an engine or a fleet under a workload; print throughput and latencies.

    With `--capacity` it searches for the highest sustained request rate; with `--compare` it prints
    the predicted next to the real values of a step log.

    Returns:
        The exit status: 2 for invalid options or files.
    """
    values = make_parser().parse_args(argv)
    try:
        config = config_from_flags(SimulationConfig, values)
        if values.config:
            _warn_of_changed_profile(config, values.config)
        if values.step_log and (values.compare or config.capacity):
            flag = "compare" if values.compare else "capacity"
            raise ValueError(f"--{flag} writes no step log: leave --step-log out")
        if values.compare:
            _compare(config, values.compare, values.output)
        elif config.capacity:
            _search_capacity(config, values.jobs, values.output)
        else:
            _simulate(config, values.step_log, values.output)
    except BrokenPipeError:
        raise  # The reader of the table has gone, which is no error: see gllm/__main__.py.
    except (ValueError, OSError) as error:
        print(f"gllm simulate: {error}", file=sys.stderr)
        return 2
    return 0


def _simulate(config: SimulationConfig, step_log: str | None, output: str | None) -> None:
    """Simulate a workload; print what was simulated and its figures."""
    deployment, jobs = build_simulation(config)
    print(*describe_simulation(config, deployment, jobs), sep="\n", flush=True)
    result = run_simulation(config, deployment, jobs, step_log)
    lines = describe_below_range(result.below_range)
    lines += describe_load(result.load) if result.load else []
    print(*lines, sep="\n", end="\n\n")
    print(format_metrics_table({deployment.scheduler.policy: result.summary}))
    if result.engines:
        print(f"\n{format_engine_table(result.engines)}")
    if sessions := result.summary.get("sessions"):
        print("", *turn_lines(sessions), sep="\n")
    if output:
        write_outputs(result, Path(output), _configuration(config))


def _search_capacity(config: SimulationConfig, jobs: int, output: str | None) -> None:
    """Search for the capacity of a deployment and print all simulated rates."""
    if config.arrivals in ("static", "replay"):
        raise ValueError(
            f"--capacity needs arrivals at a rate, not {config.arrivals}: choose --arrivals poisson"
        )
    rule = CAPACITY_RULES[config.capacity or "sustained"]
    simulation = SimulationAtRate(config, rule)
    first = simulation.at_rate(config.rate)
    print(*describe_simulation(first, *build_simulation(first)), sep="\n", end="\n\n", flush=True)
    with show_progress("simulation", name="capacity", stays=False) as bar:
        capacity = find_capacity(simulation, config.rate, rule, jobs, lambda *_: bar.update())
    rows = [
        [
            show_value(rate),
            *map(show_value, trial[1:4]),
            show_value(trial.growth),
            "yes" if rule.is_sustained(trial) else "no",
        ]
        for rate, trial in sorted(capacity.trials)
    ]
    header = ["requests/s", "scheduling delay p99, s", "mean, first half, s", "second half, s"]
    print(format_table([*header, "ratio", "sustained"], rows))
    print(f"\ncapacity ({config.capacity}): {show_value(capacity.rate)} requests/s")
    if output:
        _write_document(Path(output), _configuration(config) | _capacity_document(capacity))
        print(f"wrote metrics.json to {output}")


def _capacity_document(capacity: Capacity) -> dict[str, Any]:
    trials = [{"rate": rate, **trial._asdict()} for rate, trial in capacity.trials]
    return {"metrics": {"capacity": capacity.rate, "trials": trials}}


def _configuration(config: SimulationConfig) -> dict[str, Any]:
    """Return the part of metrics.json from which the same simulation can be run again."""
    flags = flags_of_config(config)
    path = measured_path(config.profile) if config.profile else None
    if path is None:
        return {"configuration": flags}
    flags["profile"] = str(path.absolute())
    return {"configuration": flags, "profile_sha256": _hash_profile(path)}


def _hash_profile(path: Path) -> str:
    """Return the SHA-256 of a profile's file, or of the tables of its folder by name."""
    digest = hashlib.sha256()
    for file in sorted(path.glob("*.csv")) if path.is_dir() else [path]:
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _warn_of_changed_profile(config: SimulationConfig, source: str) -> None:
    """Print a warning if the profile is not the one from which a metrics.json was computed.

    Args:
        config: The options.
        source: The file of `--config`; one without the SHA-256 of a profile is not compared.
    """
    path = measured_path(config.profile) if config.profile else None
    try:
        earlier = msgspec.json.decode(Path(source).read_bytes(), type=_ProfileRecord)
    except msgspec.MsgspecError:
        return  # YAML of flags.
    if path is None or not path.exists() or not earlier.profile_sha256:
        return
    is_same_path = str(path) == earlier.configuration.get("profile")
    if is_same_path and _hash_profile(path) != earlier.profile_sha256:
        print(
            f"gllm simulate: {path} has changed since {source} was written: figures will differ",
            file=sys.stderr,
        )


def write_outputs(result: SimulationResult, folder: Path, configuration: dict[str, Any]) -> None:
    """Write the results of a simulation: metrics.json, latencies.svg and token-time.svg.

    For a single engine also tokens.svg and gantt.svg, a chart of the stages' steps.

    Args:
        result: results of the simulation.
        folder: folder of the files, created if needed.
        configuration: options of the simulation, as further fields of metrics.json.

    Raises:
        OSError: a file cannot be written.
        ImportError: matplotlib is not installed.
    """
    # Only plots need matplotlib.
    from gllm.sim.metrics.plots import plot_gantt, plot_latencies, plot_token_time, plot_tokens

    run = result.record
    document = {"start": run.start, "metrics": result.summary}
    if result.engines:
        document["engines"] = result.engines
    _write_document(folder, configuration | document)
    plots = {"latencies.svg": plot_latencies}
    if not result.engines:
        plots |= {"tokens.svg": plot_tokens, "gantt.svg": plot_gantt}
    for name, plot in plots.items():
        plot(run, folder / name)
    plot_token_time(result.summary["seconds_by_tokens"], folder / "token-time.svg")
    print(f"wrote metrics.json, {', '.join(plots)} and token-time.svg to {folder}")


def _write_document(folder: Path, document: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    content = msgspec.json.format(msgspec.json.encode(document), indent=2)
    (folder / "metrics.json").write_bytes(content + b"\n")


def _compare(config: SimulationConfig, log: str, output: str | None) -> None:
    """Print a real run next to its prediction from the profile."""
    if config.profile is None:
        raise ValueError("--compare needs --profile, a profile of the same model and stages")
    if not Path(config.profile).is_file():
        raise ValueError(
            f"--compare needs the file of a `gllm profile` run, not --profile {config.profile}"
        )
    for flag, is_used in (("engines", config.engines > 1), ("capacity", config.capacity)):
        if is_used:
            raise ValueError(f"--compare repeats the run of one engine: leave --{flag} out")
    try:
        comparison = compare_with_profile(log, config.profile)
    except OSError as error:
        flag = "--profile" if error.filename == config.profile else "--compare"
        raise ValueError(f"{flag} {error.filename}: cannot be read: {error.strerror}") from None
    print(comparison_table(comparison))
    if output:
        run = comparison.predicted
        result = SimulationResult(run, summarize_run(run), {}, None, {})
        write_outputs(result, Path(output), _configuration(config))
