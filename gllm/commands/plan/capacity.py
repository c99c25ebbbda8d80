"""`gllm plan capacity`: the highest request rate of a configuration within latency limits."""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import Any

from gllm.commands.plan.flags import add_budget_flag, add_output_flags, add_slo_flags
from gllm.observability.progress import print_above, show_progress
from gllm.options.flags import (
    FlagParser,
    add_flags,
    config_from_flags,
    number_type,
)
from gllm.options.slo import EXAMPLE, NO_SLO, Slo, parse_slo
from gllm.plan.best_first import SearchBudget
from gllm.plan.capacity import PLAN_RULES, ConfigurationCapacity, extend_rule, measure_capacity
from gllm.plan.engine_bounds import EngineBounds, measure_workload
from gllm.plan.problem import ServiceProblem
from gllm.plan.search.designs import design_of
from gllm.plan.search.fleet import FleetForecast, lay_out_fleet
from gllm.plan.search.planner import build_planned_engine
from gllm.plan.serving_plan import ExpectedFigures, ServingPlan
from gllm.sim.capacity import CapacityRule, RateTrial
from gllm.sim.costs.profile import read_profile
from gllm.sim.metrics.report import format_table, show_value
from gllm.sim.options import (
    SimulationConfig,
    build_workload,
    check_request_lengths,
    describe_cut_requests,
)
from gllm.sim.profiled import is_profile_file

EXCLUDED = ("rate", "capacity", "slo_ttft", "slo_tpot", "slo_limits", "time_scale")
"""Fields of SimulationConfig that this command searches for or states in another way."""
START_SHARE = 0.9
"""First rate of the search, as a share of the closed-form estimate."""


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm plan capacity`."""
    parser = FlagParser(prog="gllm plan capacity", description=__doc__.splitlines()[0])
    parser.add_config_flag()
    add_flags(parser, SimulationConfig, EXCLUDED, takes_entries=True)
    add_limit_flags(parser, "sustained")
    add_budget_flag(parser, "until the capacity is found")
    add_output_flags(parser, "that of the profile")
    return parser


def add_limit_flags(parser: argparse.ArgumentParser, rule: str) -> None:
    """Add `--slo`, `--attainment`, `--rule` and `--jobs`, which a search for the capacity reads.

    Args:
        parser: parser of a planner.
        rule: default of `--rule`: the condition under which a deployment sustains a request rate.
    """
    add_slo_flags(parser, f"latency limits in seconds, such as {EXAMPLE}", "")
    parser.add_argument(
        "--rule",
        choices=tuple(PLAN_RULES),
        default=rule,
        help="a rate that counts; sustained: P99 scheduling delay at most 5 s, and runs extended "
        "until they show that the queue is stable and the limits are kept; vidur: P99 at most 5 s "
        f"in a run of fixed length (default {rule})",
    )
    parser.add_argument(
        "--jobs",
        metavar="NUMBER",
        type=number_type(int, ge=1, le=1024),
        default=len(os.sched_getaffinity(0)),
        help="processes (default: one per core)",
    )


def plan(values: argparse.Namespace) -> Callable[[], ServingPlan] | None:
    """Find the highest request rate that a simulated deployment sustains within the SLO; print it.

    Returns:
        A function that makes the serving plan, which `gllm up` runs, for `--output`; None if no
        rate is within the limits.

    Raises:
        ValueError: options are invalid, or contradict each other.
        OSError: the profile cannot be read.
    """
    config = config_from_flags(SimulationConfig, values, EXCLUDED)
    if config.arrivals in ("static", "replay"):
        raise ValueError(
            f"--arrivals {config.arrivals}: a capacity needs arrivals at a rate: choose poisson"
        )
    check_emitted_fields(config, values.output)
    check_links(config, (config.pipeline_parallel_size,), config.tensor_parallel_size or (1,))
    limits = parse_slo(values.slo, values.attainment)
    moments = measure_workload(build_workload(config))
    check_request_lengths(config, moments.longest_tokens)
    deployment = build_planned_engine(config, moments.longest_tokens)
    config = replace(config, max_model_len=deployment.scheduler.max_model_len)
    for line in describe_cut_requests(config):
        print(line)
    bounds = EngineBounds(deployment, moments)
    start = _start_rate(config, bounds, limits)
    rule = extend_rule(PLAN_RULES[values.rule], bounds.request_seconds(limits))
    with show_progress("simulation", name="capacity", stays=False) as bar:
        highest = 0.0

        def report(rate: float, trial: RateTrial) -> None:
            nonlocal highest
            bar.update()
            if rate > highest and rule.is_sustained(trial):
                highest = rate
                print_above(f"best so far: {show_value(rate)} requests/s")

        capacity = measure_capacity(
            config,
            start,
            rule,
            limits,
            values.jobs,
            values.rule == "sustained",
            report,
            SearchBudget(values.budget, clock=values.clock, begin=values.begin),
        )
    print(_format_trials(capacity, rule))
    bound = config.engines * bounds.max_rate_of_run(10**9, 0.0, 0.0, limits)
    gap = f"; the gap is {bound / capacity.rate - 1:.0%}" if capacity.rate else ""
    print(f"\nbound by closed forms: no more than {show_value(bound)} requests/s{gap}")
    print(_format_capacity(capacity, values.rule, values.slo))
    figures = capacity.figures
    if not capacity.rate or figures is None:
        return None
    rate, attainment = capacity.rate, figures.attainment
    expected = ExpectedFigures("", rate, rate, attainment, figures.ttft_p50, figures.tpot_p50)
    return lambda: lay_out_fleet(
        ServiceProblem(config.model, config.workload, limits=limits),
        design_of(config, deployment),
        deployment,
        config,
        FleetForecast(config.engines, expected, True),
        engine_flags(config),
    )


def check_links(
    config: SimulationConfig, num_stages: Sequence[int], degrees: Sequence[int]
) -> None:
    """Raise ValueError if a link has no effect, because engines have nothing that it joins.

    Args:
        config: Options of the simulation.
        num_stages: Numbers of stages of engines.
        degrees: Numbers of ranks of stages.
    """
    has_ranks = max(degrees) > 1 and config.tensor_parallel_link is None
    if config.link != SimulationConfig.link and max(num_stages) == 1 and not has_ranks:
        raise ValueError(
            "--link: an engine of one stage has no link between stages: leave it out, or add "
            "stages (--pp)"
        )
    if config.tensor_parallel_link is not None and config.profile is None and max(degrees) == 1:
        raise ValueError(
            "--tensor-parallel-link: a stage of one rank has no such link: leave it out"
        )


def check_emitted_fields(config: SimulationConfig, output: str | None) -> None:
    """Raise ValueError if engines of a written plan cannot be those that are simulated.

    Args:
        config: Options of the simulation.
        output: File of the plan; None if none is written.
    """
    if output and config.bytes_per_weight is not None:
        raise ValueError(
            "--bytes-per-weight: `gllm serve` takes the format of the checkpoint: leave it out, or "
            "leave --output out"
        )


def engine_flags(config: SimulationConfig) -> dict[str, Any]:
    """Return flags by which `gllm serve` starts the simulated engine, without their dashes."""
    flags: dict[str, Any] = {}
    if config.profile and is_profile_file(config.profile):
        flags |= read_profile(config.profile).engine_flags
    elif config.profile:
        # A profile is of one compute thread per stage.
        flags["threads"] = 1
    return flags


def _start_rate(config: SimulationConfig, bounds: EngineBounds, limits: Slo) -> float:
    point = bounds.best_point(limits) or bounds.best_point(NO_SLO)
    return START_SHARE * point.rate * config.engines if point else config.rate


def _format_trials(capacity: ConfigurationCapacity, rule: CapacityRule) -> str:
    # A longer run of a rate replaces a shorter one; the rates of two searches differ by rounding.
    latest = {show_value(rate): (rate, trial) for rate, trial in capacity.trials}
    rows = [
        [
            show_value(rate),
            show_value(trial.p99_delay_seconds) if trial.p99_delay_seconds < inf else "",
            show_value(trial.growth) if trial.growth < inf else "",
            "yes" if rule.is_sustained(trial) else "no",
        ]
        for rate, trial in sorted(latest.values(), key=lambda pair: pair[0])
    ]
    header = ["requests/s", "scheduling delay p99, s", "second half / first", "within limits"]
    return format_table(header, rows)


def _format_capacity(capacity: ConfigurationCapacity, rule: str, slo: str) -> str:
    figures = capacity.figures
    limits = ", ".join(filter(None, (rule, slo)))
    if figures is None:
        count = len(capacity.trials)
        result = "no rate is within the limits" if count else "no rate was decided"
        return f"\n{result} ({limits}): {capacity.note}; {count} rates were tried"
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
