"""`gllm plan capacity`: the highest request rate of a configuration within latency limits."""

import argparse
import os
import shlex
import sys
from math import inf
from pathlib import Path
from typing import Any

from gllm.commands.plan.flags import add_budget_flag
from gllm.observability.progress import show_progress
from gllm.options.flags import (
    FlagParser,
    FlagType,
    add_flags,
    config_from_flags,
    number_type,
    output_file,
)
from gllm.plan.budget import SearchBudget
from gllm.plan.capacity import PLAN_RULES, ConfigurationCapacity, extend_rule, measure_capacity
from gllm.plan.engine_bounds import EngineBounds
from gllm.plan.engine_designs import design_of
from gllm.plan.fleet_forecast import FleetForecast
from gllm.plan.fleet_layout import ServiceFacts, assume_nodes, lay_out_fleet
from gllm.plan.latency_limits import EXAMPLE, NO_LIMITS, LatencyLimits, parse_limits
from gllm.plan.serving_plan import write_plan
from gllm.plan.workload_moments import measure_workload
from gllm.sim.capacity import CapacityRule
from gllm.sim.configured import build_simulation
from gllm.sim.costs.profile import read_profile
from gllm.sim.deployment import Deployment
from gllm.sim.goodput import TARGET_ATTAINMENT
from gllm.sim.metrics.report import format_table, show_value
from gllm.sim.options import SimulationConfig
from gllm.sim.profiled import is_measured_here

EXCLUDED = ("rate", "capacity", "slo_ttft", "slo_tpot", "slo_limits", "time_scale")
"""Fields of SimulationConfig that this command searches for or states in another way."""
START_SHARE = 0.9
"""First rate of the search, as a share of the closed-form estimate."""


def make_parser() -> argparse.ArgumentParser:
    """Return the flags: those of SimulationConfig, limits and outputs."""
    parser = FlagParser(prog="gllm plan capacity", description=__doc__.splitlines()[0])
    parser.add_config_flag()
    add_flags(parser, SimulationConfig, EXCLUDED, takes_entries=True)
    add_limit_flags(parser, "sustained")
    add_budget_flag(parser, "until the capacity is found")
    parser.add_argument(
        "--output",
        metavar="FILE",
        type=FlagType(output_file),
        help="write the configuration as a plan for `gllm up`",
    )
    parser.add_argument(
        "--checkpoint",
        metavar="MODEL",
        help="folder or hub name of the model in the plan; default: that of the profile",
    )
    return parser


def add_limit_flags(parser: argparse.ArgumentParser, rule: str) -> None:
    """Add the flags of limits and of the search for a capacity."""
    parser.add_argument(
        "--slo", default="", metavar="LIMITS", help=f"latency limits in seconds, such as {EXAMPLE}"
    )
    parser.add_argument(
        "--attainment",
        type=number_type(float, gt=0, le=1),
        default=TARGET_ATTAINMENT,
        help="share of requests that keep the limits without a percentile (default 0.9)",
    )
    parser.add_argument(
        "--rule",
        choices=tuple(PLAN_RULES),
        default=rule,
        help="scheduling delays of a rate that counts; sustained: P99 at most 5 s, and the second "
        "half's mean at most 1.2 times the first half's; vidur: P99 at most 5 s "
        f"(default {rule})",
    )
    parser.add_argument(
        "--jobs",
        metavar="NUMBER",
        type=number_type(int, ge=1, le=1024),
        default=len(os.sched_getaffinity(0)),
        help="processes (default: one per core)",
    )


def main(argv: list[str]) -> int:
    """Run `gllm plan capacity` and return the exit status."""
    values = make_parser().parse_args(argv)
    try:
        config = config_from_flags(SimulationConfig, values, EXCLUDED)
        if config.arrivals in ("static", "replay"):
            raise ValueError(
                f"--arrivals {config.arrivals}: a capacity needs arrivals at a rate: choose poisson"
            )
        limits = parse_limits(values.slo, values.attainment)
        deployment, jobs = build_simulation(config)
        bounds = EngineBounds(deployment, measure_workload(jobs))
        start = _start_rate(config, bounds, limits)
        rule = extend_rule(PLAN_RULES[values.rule], bounds.request_seconds(limits))
        with show_progress("simulation", name="capacity", stays=False) as bar:
            capacity = measure_capacity(
                config,
                start,
                rule,
                limits,
                values.jobs,
                lambda *_: bar.update(),
                SearchBudget(values.budget),
            )
        print(_format_trials(capacity, rule))
        print(_format_capacity(capacity, values.rule, values.slo))
        if values.output and capacity.rate:
            command = shlex.join(["gllm", "plan", "capacity", *argv])
            facts = ServiceFacts(
                values.checkpoint or deployment.model,
                deployment.layers,
                config.scheduler,
                config.routing_policy,
                config.workload,
                limits,
                command,
                engine_flags(config),
            )
            _write_plan(config, deployment, capacity, facts, Path(values.output))
    except BrokenPipeError:
        raise  # The reader of the table has gone, which is no error: see gllm/__main__.py.
    except (ValueError, OSError) as error:
        print(f"gllm plan capacity: {error}", file=sys.stderr)
        return 2
    return 0 if capacity.rate else 1


def engine_flags(config: SimulationConfig) -> dict[str, Any]:
    """Return the flags of `gllm serve` that start the simulated engine."""
    flags: dict[str, Any] = {}
    if config.max_model_len:
        flags["max-model-len"] = config.max_model_len
    if config.profile and is_measured_here(config.profile):
        flags |= read_profile(config.profile).engine_flags
    elif config.profile:
        # A profile is of one compute thread per stage.
        flags["threads"] = 1
    return flags


def _start_rate(config: SimulationConfig, bounds: EngineBounds, limits: LatencyLimits) -> float:
    point = bounds.best_point(limits) or bounds.best_point(NO_LIMITS)
    return START_SHARE * point.rate * config.engines if point else config.rate


def _format_trials(capacity: ConfigurationCapacity, rule: CapacityRule) -> str:
    rows = [
        [
            show_value(rate),
            show_value(trial.p99_delay_seconds) if trial.p99_delay_seconds < inf else "",
            show_value(trial.growth) if trial.growth < inf else "",
            "yes" if rule.is_sustained(trial) else "no",
        ]
        for rate, trial in sorted(capacity.trials)
    ]
    header = ["requests/s", "scheduling delay p99, s", "second half / first", "within limits"]
    return format_table(header, rows)


def _format_capacity(capacity: ConfigurationCapacity, rule: str, slo: str) -> str:
    figures = capacity.figures
    limits = ", ".join(filter(None, (rule, slo)))
    if figures is None:
        return f"\nno rate is within the limits ({limits}): {capacity.note}"
    rows = [
        ["capacity, requests/s", show_value(capacity.rate)],
        ["TTFT p50, s", show_value(figures.ttft_p50)],
        ["TTFT p90, s", show_value(figures.ttft_p90)],
        ["TPOT p50, s", show_value(figures.tpot_p50)],
        ["TBT p99, s", show_value(figures.itl_p99)],
        ["requests within the limits, %", show_value(figures.attainment, 100)],
    ]
    note = f"\n{capacity.note}: the capacity may be higher" if capacity.note else ""
    return "\n" + format_table(["", limits], rows) + note


def _write_plan(
    config: SimulationConfig,
    deployment: Deployment,
    capacity: ConfigurationCapacity,
    facts: ServiceFacts,
    path: Path,
) -> None:
    """Write the configuration as a plan at its capacity."""
    design = design_of(config, deployment)
    figures = capacity.figures
    assert figures is not None, "there is a capacity"
    forecast = FleetForecast(
        config.engines,
        capacity.rate,
        capacity.rate,
        figures.attainment,
        figures.ttft_p50,
        figures.tpot_p50,
        True,
    )
    nodes = assume_nodes(design.device, config.engines * design.num_devices)
    write_plan(lay_out_fleet(design, forecast, nodes, facts, {}), path)
    print(f"wrote {path}")
