"""`gllm plan search`: the devices, parallelism, policy and batch size that serve a workload best.

Closed forms order the designs and rule out those that cannot win; the best ones are simulated.
The results are printed as tables and drawn.
"""

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from math import inf
from pathlib import Path

from gllm.commands.plan.capacity import (
    add_limit_flags,
    check_emitted_fields,
    check_links,
    engine_flags,
)
from gllm.commands.plan.flags import add_output_flags
from gllm.commands.plan.search_report import (
    describe_result,
    describe_search,
    format_forecast,
    plot_search,
)
from gllm.observability.progress import print_above, show_progress, throttle
from gllm.options.flags import (
    FlagParser,
    FlagType,
    add_flags,
    config_from_flags,
    number_type,
    output_file,
    parse_counts,
)
from gllm.options.slo import parse_slo
from gllm.plan.best_first import SearchBudget
from gllm.plan.capacity import PLAN_RULES
from gllm.plan.nodes import CORE, NO_NODES, DeviceCluster, parse_nodes
from gllm.plan.prices import DEFAULT_PRICES, PRICE_TABLES, parse_prices
from gllm.plan.problem import ServiceProblem
from gllm.plan.search.designs import DesignSpace, cap_policies, parse_devices, parse_policies
from gllm.plan.search.fleet import choose_fleet, forecast_closed, lay_out_fleet
from gllm.plan.search.objectives import MAKESPAN, OBJECTIVES, AssessedDesign, check_problem
from gllm.plan.search.planner import DesignPlanner
from gllm.plan.serving_plan import ServingPlan
from gllm.sim.capacity import INTERRUPTED, CapacityRule, SearchEndedError
from gllm.sim.costs.profile import read_profile
from gllm.sim.hardware.devices import LINKS, find_link
from gllm.sim.options import SimulationConfig, check_request_lengths, describe_cut_requests
from gllm.sim.profiled import VIDUR_MODEL, is_profile_file

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
FORECAST_SHARE = 0.15
"""Share of the budget that is left for a simulation of the chosen engines behind a router."""
BUDGET_SECONDS = 600.0
"""Default of --budget."""


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm plan search`."""
    parser = FlagParser(prog="gllm plan search", description=__doc__.splitlines()[0])
    parser.add_config_flag()
    add_flags(parser, SimulationConfig, EXCLUDED, takes_entries=True)
    _add_space_flags(parser)
    add_limit_flags(parser, "sustained")
    parser.add_argument(
        "--objective",
        choices=tuple(OBJECTIVES),
        help="qps-per-dollar, goodput-per-gpu: capacity of an engine, or the --rate of all engines "
        "that it needs; cost, power: of the engines that --rate needs; makespan: of --requests at "
        "once on all devices (default: qps-per-dollar if all prices are known, otherwise "
        "goodput-per-gpu)",
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
        help=f"time of the search; running simulations are cut off (default {BUDGET_SECONDS:g})",
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
        help="most designs that are simulated (default with --rate: as many as --budget permits; "
        f"without {NUM_SIMULATED}, with --cores {NUM_SIMULATED_LOCAL})",
    )
    parser.add_argument(
        "--closed-form", action="store_true", help="simulate nothing: an estimate in seconds"
    )
    parser.add_argument(
        "--exhaustive", action="store_true", help="simulate all designs that fit, within --budget"
    )
    add_output_flags(parser, "the profile's, or --model")
    parser.add_argument(
        "--plot",
        metavar="FILE",
        type=FlagType(output_file),
        help="write a picture of the designs and the Pareto set, .svg or .png",
    )
    return parser


def _add_space_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--devices", help=f"devices to choose from (default {','.join(DEFAULT_DEVICES)})"
    )
    parser.add_argument(
        "--nodes",
        help="machines to choose from, as in a=10.0.0.1:8xH100,b=10.0.0.2:4xA100-80G; an engine "
        "spans several with --link network, or a slower one",
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


def plan(values: argparse.Namespace) -> Callable[[], ServingPlan] | None:
    """Search for the best device, parallelism and scheduling policy; print a table of candidates.

    Returns:
        A function that makes the serving plan, which `gllm up` runs, for `--output`; None if no
        candidate serves the workload within the limits.

    Raises:
        ValueError: flags contradict each other, or no candidate fits the devices.
        OSError: a file cannot be read or written.
    """
    config: SimulationConfig = config_from_flags(SimulationConfig, values, EXCLUDED)
    check_emitted_fields(config, values.output)
    stages = values.pipeline_parallel_size or DEFAULT_DEGREES
    check_links(config, stages, values.tensor_parallel_size or DEFAULT_DEGREES)
    problem, space, rule = build_problem(values, config)
    check_problem(problem)
    planner = DesignPlanner(problem, config, rule)
    check_request_lengths(planner.config, planner.moments.longest_tokens)
    for line in describe_cut_requests(planner.config):
        print(line)
    designs = list(space.designs(int(problem.bounds["devices"])))
    limit = _num_simulated(values, space)
    budget = SearchBudget(values.budget, limit, values.clock, FORECAST_SHARE, values.begin)
    if not values.closed_form:
        most = len(designs) if limit is None else min(limit, len(designs))
        text = f"{len(designs)} designs, of which at most {most} are simulated"
        print(f"{text}, within {values.budget:g} s", file=sys.stderr, flush=True)
    with show_progress("design", name="simulated", stays=False) as bar:
        best_score = -inf

        def report(result: AssessedDesign) -> None:
            nonlocal best_score
            bar.update()
            if result.score > best_score:
                best_score = result.score
                print_above(f"best so far: {describe_result(result, problem)}")

        outcome = planner.search(
            designs,
            budget,
            values.jobs,
            values.exhaustive,
            values.closed_form,
            report,
            throttle(bar.refresh),
        )
    print(describe_search(outcome, problem, len(designs), values.closed_form))
    if outcome.best is None:
        if budget.refusal() and outcome.left_out:
            print(f"{budget.refusal()}: raise --budget, or use --closed-form for an estimate")
        else:
            print("no design serves the workload within the limits")
        return None
    best = outcome.best[1]
    if values.closed_form:
        forecast = forecast_closed(planner, best)
    else:
        results = [result for _, result in outcome.evaluated if result.score > -inf]
        try:
            best, forecast = choose_fleet(
                planner, results, config.routing_policy, budget.final_deadline
            )
        except (SearchEndedError, KeyboardInterrupt) as error:
            print(f"{error or INTERRUPTED}: latencies are estimated by closed forms")
            forecast = forecast_closed(planner, best)
    print(format_forecast(best, forecast, outcome, problem))
    if values.plot:
        plot_search(outcome, problem, Path(values.plot))
        print(f"wrote {values.plot}")
    chosen = planner.configure(best.design)
    return lambda: lay_out_fleet(
        problem,
        best.design,
        planner.deployment_of(best.design),
        chosen,
        forecast,
        engine_flags(chosen),
    )


def _num_simulated(values: argparse.Namespace, space: DesignSpace) -> int | None:
    """Return how many designs are simulated at most; None: as many as the budget permits."""
    if values.closed_form or values.exhaustive:
        return None
    if values.simulate or values.rate is not None:
        # At a rate, few simulations show whether a design serves it, and prices rule out others.
        return values.simulate
    return NUM_SIMULATED_LOCAL if space.devices == (CORE,) else NUM_SIMULATED


def build_problem(
    values: argparse.Namespace, config: SimulationConfig
) -> tuple[ServiceProblem, DesignSpace, CapacityRule]:
    """Return what `gllm plan search` searches for, among which candidates, and how it judges them.

    Returns:
        Model, workload, objective and limits; the devices, parallelism and policies to combine; the
        condition under which a candidate sustains a request rate.

    Raises:
        ValueError: flags contradict each other.
    """
    cluster = parse_nodes(values.nodes) if values.nodes else NO_NODES
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
    devices = (CORE,) if is_local else _devices(values, cluster)
    most = values.max_devices or values.cores or DEFAULT_MAX_DEVICES
    if cluster.nodes:
        cluster = _with_network(cluster, config)
    if cluster.nodes and not values.max_devices:
        most = max(
            sum(node.num_devices for node in cluster.nodes if node.device == device)
            for device in devices
        )
    ranks = values.tensor_parallel_size or ((1,) if is_local else DEFAULT_DEGREES)
    rule = PLAN_RULES[values.rule]
    if values.run_seconds:
        rule = replace(rule, min_seconds=values.run_seconds)
    prices = parse_prices(values.prices)
    is_priced = all(device in prices for device in devices)
    problem = ServiceProblem(
        config.model,
        config.workload,
        cluster,
        devices,
        values.rate,
        parse_slo(values.slo, values.attainment),
        values.objective or ("qps-per-dollar" if is_priced else "goodput-per-gpu"),
        {"devices": most},
        prices,
        config.requests,
        seed=config.seed,
    )
    policies = parse_policies(values.policies or (LOCAL_POLICIES if is_local else DEFAULT_POLICIES))
    if is_local and config.profile and is_profile_file(config.profile):
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
    return problem, space, rule


def _with_network(cluster: DeviceCluster, config: SimulationConfig) -> DeviceCluster:
    """Return a cluster whose engines may span nodes, if --link has the speed of a network.

    Simulations know one link between stages.
    """
    link = find_link("link", config.link.split(",")[0].strip())
    is_network = link.bandwidth <= LINKS["network"].bandwidth
    return replace(cluster, network=link) if is_network else cluster


def _usual_batches(config: SimulationConfig, is_local: bool) -> tuple[int, ...]:
    """Return the default batch sizes, of a file of `gllm profile` as far as it has them."""
    if not (is_local and config.profile and is_profile_file(config.profile)):
        return DEFAULT_BATCHES
    most = read_profile(config.profile).scheduler.max_num_seqs
    return tuple(size for size in DEFAULT_BATCHES if size <= most) or (most,)


def _devices(values: argparse.Namespace, cluster: DeviceCluster) -> tuple[str, ...]:
    present = tuple(dict.fromkeys(node.device for node in cluster.nodes))
    devices = parse_devices(values.devices) if values.devices else present or DEFAULT_DEVICES
    for device in devices if cluster.nodes else ():
        if device not in present:
            raise ValueError(f"--devices {device}: none of --nodes has it: {', '.join(present)}")
    return devices
