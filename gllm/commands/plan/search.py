"""`gllm plan search`: the devices, parallelism, policy and batch size that serve a workload best.

Closed forms order the designs and rule out those that cannot win; the best ones are simulated.
The results are printed as tables and drawn.
"""

import argparse
import shlex
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

from gllm.commands.plan.capacity import add_limit_flags, engine_flags
from gllm.observability.progress import show_progress
from gllm.options.flags import (
    FlagParser,
    FlagType,
    add_flags,
    config_from_flags,
    number_type,
    output_file,
    parse_counts,
)
from gllm.plan.best_first import BestFirstOutcome
from gllm.plan.budget import SearchBudget
from gllm.plan.capacity import PLAN_RULES
from gllm.plan.design_problem import MAKESPAN, AssessedDesign, DesignProblem, check_problem
from gllm.plan.design_search import DesignPlanner
from gllm.plan.engine_designs import CORE, DesignSpace, EngineDesign, parse_devices, parse_policies
from gllm.plan.fleet_forecast import FleetForecast, forecast_closed, forecast_fleet
from gllm.plan.fleet_layout import (
    FleetNode,
    ServiceFacts,
    assume_nodes,
    lay_out_fleet,
    parse_nodes,
)
from gllm.plan.latency_limits import parse_limits
from gllm.plan.measured_policies import cap_policies
from gllm.plan.objectives import OBJECTIVES
from gllm.plan.pareto import pareto_set
from gllm.plan.prices import DEFAULT_PRICES, PRICE_TABLES, parse_prices
from gllm.plan.serving_plan import write_plan
from gllm.sim.costs.profile import read_profile
from gllm.sim.metrics.plots import plot_scatter
from gllm.sim.metrics.report import format_table, show_value
from gllm.sim.options import SimulationConfig
from gllm.sim.profiled import VIDUR_MODEL, is_measured_here

Outcome = BestFirstOutcome[EngineDesign, AssessedDesign]
NUM_ROWS = 20
"""Most designs in a table."""

EXCLUDED = (
    "rate", "capacity", "slo_ttft", "slo_tpot", "slo_limits", "device", "layers", "engines",
    "pipeline_parallel_size", "tensor_parallel_size", "policy", "max_num_batched_tokens",
    "max_num_seqs", "preset",
)  # fmt: skip
"""Fields of SimulationConfig that a search chooses or states in another way."""
DEFAULT_DEVICES = ("A100-80G", "H100")
DEFAULT_POLICIES = "vllm,sarathi:512,sarathi:1024,sarathi:2048,throttle"
LOCAL_POLICIES = "vllm,sarathi:512,throttle"
"""Policies with --cores: simulations of this machine are of many short steps."""
DEFAULT_BATCHES = (64, 128, 256)
DEFAULT_DEGREES = (1, 2, 4)
"""Numbers of stages and of ranks."""
DEFAULT_MAX_DEVICES = 16
NUM_SIMULATED, NUM_SIMULATED_LOCAL = 6, 3
"""Designs that are simulated by default; with --cores."""
BUDGET_SECONDS = 600.0
"""Default of --budget."""


def make_parser() -> argparse.ArgumentParser:
    """Return the flags: the workload's, the space's, the objective's and those of the outputs."""
    parser = FlagParser(prog="gllm plan search", description=__doc__.splitlines()[0])
    parser.add_config_flag()
    add_flags(parser, SimulationConfig, EXCLUDED, takes_entries=True)
    _add_space_flags(parser)
    add_limit_flags(parser, "vidur")
    parser.add_argument(
        "--objective",
        choices=tuple(OBJECTIVES),
        help="qps-per-dollar, goodput-per-gpu: capacity of an engine; cost, power: of the engines "
        "that --rate needs; makespan: of --requests at once on all devices (default: "
        "qps-per-dollar if all prices are known, else goodput-per-gpu)",
    )
    parser.add_argument(
        "--rate",
        type=number_type(float, gt=0, le=1e9),
        help="requests per second that the engines have to serve; default: one engine",
    )
    parser.add_argument(
        "--prices",
        default=DEFAULT_PRICES,
        help=f"$/h of a device: {', '.join(PRICE_TABLES)}, or H100=4.25,L20=0.7, or both "
        f"(default {DEFAULT_PRICES})",
    )
    parser.add_argument(
        "--budget",
        metavar="SECONDS",
        type=number_type(float, ge=0, le=1e9),
        default=BUDGET_SECONDS,
        help=f"time of the simulations (default {BUDGET_SECONDS:g})",
    )
    parser.add_argument(
        "--run-seconds",
        metavar="SECONDS",
        type=number_type(float, gt=0, le=1e9),
        help="least time in which the requests of a simulation arrive: several times that of a "
        "request, and of the limit of TTFT over the overload to detect; default: of --rule",
    )
    parser.add_argument(
        "--simulate",
        metavar="NUMBER",
        type=number_type(int, ge=1, le=10**6),
        help=f"most designs that are simulated (default {NUM_SIMULATED}, with --cores "
        f"{NUM_SIMULATED_LOCAL})",
    )
    parser.add_argument(
        "--closed-form", action="store_true", help="simulate nothing: an estimate in seconds"
    )
    parser.add_argument(
        "--exhaustive", action="store_true", help="simulate all designs that fit, within --budget"
    )
    _add_output_flags(parser)
    return parser


def _add_space_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices", help=f"devices to choose from (default {','.join(DEFAULT_DEVICES)})"
    )
    parser.add_argument(
        "--nodes", help="machines to choose from, as in a=10.0.0.1:8xH100,b=10.0.0.2:4xA100-80G"
    )
    parser.add_argument(
        "--cores",
        type=number_type(int, ge=1, le=1024),
        help="cores of this machine, one for each stage, whose costs are those of --profile",
    )
    parser.add_argument(
        "--max-devices",
        type=number_type(int, ge=1, le=10**6),
        help="most devices of one kind; default: 16, or those of --nodes or --cores",
    )
    degrees = ",".join(map(str, DEFAULT_DEGREES))
    for flags, text in (
        (("--pipeline-parallel-size", "--pp"), "numbers of pipeline stages"),
        (("--tensor-parallel-size", "--tp", "-tp"), "numbers of tensor-parallel ranks"),
    ):
        parser.add_argument(
            *flags, type=parse_counts, default=None, help=f"{text} to try (default {degrees})"
        )
    parser.add_argument(
        "--policies",
        help="scheduling policies to try, with their tokens per micro-batch (default "
        f"{DEFAULT_POLICIES}; with --cores {LOCAL_POLICIES})",
    )
    parser.add_argument(
        "--max-num-seqs",
        type=parse_counts,
        help=f"batch sizes to try (default {','.join(map(str, DEFAULT_BATCHES))}; with --cores as "
        "far as the profile has them)",
    )


def _add_output_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--checkpoint",
        metavar="MODEL",
        help="folder or hub name of the model in the plan; default: the profile's, or --model",
    )
    for name, text in (
        ("--output", "write the best design as a plan for `gllm up`"),
        ("--plot", "write a picture of the designs and the Pareto set, .svg or .png"),
    ):
        parser.add_argument(name, metavar="FILE", type=FlagType(output_file), help=text)


def main(argv: list[str]) -> int:
    """Run `gllm plan search` and return the exit status."""
    values = make_parser().parse_args(argv)
    try:
        return _search(values, shlex.join(["gllm", "plan", "search", *argv]))
    except BrokenPipeError:
        raise  # The reader of the table has gone, which is no error: see gllm/__main__.py.
    except (ValueError, OSError) as error:
        print(f"gllm plan search: {error}", file=sys.stderr)
        return 2


def _search(values: argparse.Namespace, command: str) -> int:
    config: SimulationConfig = config_from_flags(SimulationConfig, values, EXCLUDED)
    nodes = parse_nodes(values.nodes) if values.nodes else []
    problem, space = build_problem(values, config, nodes)
    check_problem(problem, space.devices)
    planner = DesignPlanner(problem)
    designs = list(space.designs(problem.max_devices))
    usual = NUM_SIMULATED_LOCAL if space.devices == (CORE,) else NUM_SIMULATED
    limit = None if values.closed_form or values.exhaustive else values.simulate or usual
    budget = SearchBudget(values.budget, limit)
    with show_progress("design", name="simulated", stays=False) as bar:
        outcome = planner.search(
            designs,
            budget,
            values.jobs,
            values.exhaustive,
            values.closed_form,
            lambda result: bar.update(),
        )
    print(describe_search(outcome, problem, len(designs), values.closed_form))
    if outcome.best is None:
        print("no design serves the workload within the limits")
        return 1
    best = outcome.best[1]
    if values.closed_form:
        forecast = forecast_closed(planner, best)
    else:
        forecast = forecast_fleet(planner, best, config.routing_policy)
    print(format_forecast(best, forecast))
    if values.plot:
        plot_search(outcome, problem, Path(values.plot))
        print(f"wrote {values.plot}")
    if values.output:
        facts = _service_facts(values, planner, best, command)
        _write_plan(best, forecast, nodes, facts, problem, Path(values.output))
        print(f"wrote {values.output}")
    return 0


def build_problem(
    values: argparse.Namespace, config: SimulationConfig, nodes: list[FleetNode]
) -> tuple[DesignProblem, DesignSpace]:
    """Return the task and the space of a search.

    Raises:
        ValueError: Flags contradict each other.
    """
    is_local = config.profile is not None and not config.profile.startswith(VIDUR_MODEL)
    if is_local != (values.cores is not None):
        raise ValueError(
            "--profile and --cores belong together: `--profile FILE --cores 2` searches this "
            "machine, --devices or --nodes the table"
        )
    if is_local and (values.devices or values.nodes):
        raise ValueError("--cores searches this machine: leave --devices and --nodes out")
    if config.arrivals in ("static", "replay") and values.objective != MAKESPAN:
        raise ValueError(
            f"--arrivals {config.arrivals}: a search needs arrivals at a rate: choose poisson, or "
            "--objective makespan"
        )
    devices = (CORE,) if is_local else _devices(values, nodes)
    most = values.max_devices or values.cores or DEFAULT_MAX_DEVICES
    if nodes and not values.max_devices:
        most = max(sum(n.num_devices for n in nodes if n.device == device) for device in devices)
    ranks = values.tensor_parallel_size or ((1,) if is_local else DEFAULT_DEGREES)
    rule = PLAN_RULES[values.rule]
    if values.run_seconds:
        rule = replace(rule, min_seconds=values.run_seconds)
    prices = parse_prices(values.prices)
    is_priced = all(device in prices for device in devices)
    problem = DesignProblem(
        config,
        values.objective or ("qps-per-dollar" if is_priced else "goodput-per-gpu"),
        parse_limits(values.slo, values.attainment),
        values.rate,
        most,
        prices,
        rule,
    )
    policies = parse_policies(values.policies or (LOCAL_POLICIES if is_local else DEFAULT_POLICIES))
    if is_local and config.profile and is_measured_here(config.profile):
        policies, notes = cap_policies(policies, config.scheduler, read_profile(config.profile))
        for note in notes:
            print(f"gllm plan search: {note}", file=sys.stderr)
    space = DesignSpace(
        devices,
        values.pipeline_parallel_size or DEFAULT_DEGREES,
        ranks,
        policies,
        values.max_num_seqs or _usual_batches(config, is_local),
    )
    return problem, space


def _usual_batches(config: SimulationConfig, is_local: bool) -> tuple[int, ...]:
    """Return the default batch sizes, of a file of `gllm profile` as far as it has them."""
    if not (is_local and config.profile and is_measured_here(config.profile)):
        return DEFAULT_BATCHES
    most = read_profile(config.profile).scheduler.max_num_seqs
    return tuple(size for size in DEFAULT_BATCHES if size <= most) or (most,)


def _devices(values: argparse.Namespace, nodes: list[FleetNode]) -> tuple[str, ...]:
    present = tuple(dict.fromkeys(node.device for node in nodes))
    devices = parse_devices(values.devices) if values.devices else present or DEFAULT_DEVICES
    for device in devices if nodes else ():
        if device not in present:
            raise ValueError(f"--devices {device}: none of --nodes has it: {', '.join(present)}")
    return devices


def _service_facts(
    values: argparse.Namespace, planner: DesignPlanner, best: AssessedDesign, command: str
) -> ServiceFacts:
    problem = planner.problem
    config = best.design.configure(problem.config)
    deployment = planner.deployment_of(best.design)
    flags: dict[str, Any] = engine_flags(config)
    return ServiceFacts(
        values.checkpoint or deployment.model,
        deployment.layers,
        config.scheduler,
        config.routing_policy,
        config.workload,
        problem.limits,
        command,
        flags,
    )


def _write_plan(
    best: AssessedDesign,
    forecast: FleetForecast,
    nodes: list[FleetNode],
    facts: ServiceFacts,
    problem: DesignProblem,
    path: Path,
) -> None:
    design = best.design
    usable = nodes or assume_nodes(design.device, forecast.num_engines * design.num_devices)
    write_plan(lay_out_fleet(design, forecast, usable, facts, dict(problem.prices)), path)


def describe_search(
    outcome: Outcome, problem: DesignProblem, num_designs: int, is_closed: bool
) -> str:
    """Return the designs as a table, best first, and an account of all others."""
    results = sorted((result for _, result in outcome.evaluated), key=lambda result: -result.score)
    front = find_pareto_set(outcome)
    shown = results[:NUM_ROWS] + [result for result in front if result not in results[:NUM_ROWS]]
    rows = [_row(result, result in front) for result in shown]
    header = ["design", "requests/s", "engines", problem.objective.unit]
    table = format_table([*header, "TTFT p90, s", "TPOT p50, s", "TBT p99, s", "Pareto"], rows)
    word = "estimated" if is_closed else "simulated"
    lines = [table, "", f"{len(results)} of {num_designs} designs {word}"]
    lines += _count_lines("ruled out by closed forms", outcome.pruned)
    lines += _count_lines("left out", outcome.left_out)
    failures = Counter(result.note for result in results if result.note)
    lines += _count_lines(f"{word} without a capacity", failures)
    return "\n".join(lines)


def find_pareto_set(outcome: Outcome) -> list[AssessedDesign]:
    """Return the designs that no other one exceeds in objective, TTFT p90 and TBT p99 at once."""
    served = [result for _, result in outcome.evaluated if result.num_engines and not result.note]

    def costs(result: AssessedDesign) -> tuple[float, ...]:
        latencies = result.latencies
        return (-result.score, latencies.ttft_p90 or 0.0, latencies.itl_p99 or 0.0)

    return pareto_set(served, costs)


def format_forecast(best: AssessedDesign, forecast: FleetForecast) -> str:
    """Return the best design and its predicted figures as text."""
    engines = f"{forecast.num_engines} engine{'s' * (forecast.num_engines > 1)}"
    figures = [
        f"capacity {show_value(forecast.capacity)}/s",
        *(
            f"{name} {show_value(value, factor)} {unit}"
            for name, value, factor, unit in (
                ("TTFT p50", forecast.ttft_p50, 1.0, "s"),
                ("TPOT p50", forecast.tpot_p50, 1.0, "s"),
                ("within the limits", forecast.attainment, 100.0, "%"),
            )
            if value is not None
        ),
    ]
    lines = [
        f"\nbest: {engines} of {best.design}",
        f"at {show_value(forecast.rate)} requests/s: {', '.join(figures)}",
    ]
    if not forecast.is_within:
        lines.append("this misses the limits: the fleet has no further devices, or no --rate")
    return "\n".join(lines)


def plot_search(outcome: Outcome, problem: DesignProblem, path: Path) -> None:
    """Plot the objective over the TTFT; see `plot_scatter` for errors."""

    def point(result: AssessedDesign) -> tuple[float, float]:
        return result.latencies.ttft_p90 or 0.0, result.value

    groups: dict[str, list[tuple[float, float]]] = {}
    for design, result in outcome.evaluated:
        if result.num_engines and not result.note:
            groups.setdefault(design.device or "cores", []).append(point(result))
    front = sorted(point(result) for result in find_pareto_set(outcome))
    plot_scatter(
        groups,
        front,
        "Pareto set (with TBT)",
        path,
        "TTFT p90 at the capacity, s",
        problem.objective.unit,
        f"{problem.objective_name}, {problem.config.workload}",
    )


def _row(result: AssessedDesign, is_optimal: bool) -> list[str]:
    has_value = result.num_engines > 0
    return [
        str(result.design),
        show_value(result.capacity),
        str(result.num_engines) if has_value else "",
        show_value(result.value) if has_value else "",
        *(show_value(latency) for latency in result.latencies),
        "yes" if is_optimal else "",
    ]


def _count_lines(title: str, counts: Counter[str]) -> list[str]:
    if not counts:
        return []
    return [f"{title}:", *(f"  {count:5} {reason}" for reason, count in counts.most_common())]
