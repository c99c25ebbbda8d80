"""`gllm plan hetero`: prefill and decode replicas on unlike devices (HexGen-2)."""

import argparse
import shlex
from collections.abc import Callable
from pathlib import Path

from gllm.commands.plan.flags import add_output_flags
from gllm.options.flags import FlagParser, number_type
from gllm.options.options import INT32_MAX
from gllm.plan.best_first import SearchBudget
from gllm.plan.hetero.planner import (
    COSTS,
    HeteroPlan,
    make_planner,
    make_serving_plan,
    plan_replicas,
)
from gllm.plan.hetero.replicas import Phase, PipelineCapacityRule
from gllm.plan.hetero.search import MAX_EVALUATIONS
from gllm.plan.hetero.simulation import simulate_plan
from gllm.plan.hetero.workload import CLASSES
from gllm.plan.nodes import DeviceCluster, cluster_names, named_cluster, read_cluster
from gllm.plan.prices import PRICE_TABLES
from gllm.plan.problem import ServiceProblem
from gllm.plan.serving_plan import ServingPlan
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.metrics.report import format_table

CLUSTER_HELP = """\
a cluster file, with Gbit/s in one direction and latencies in microseconds:
  links: {nvlink: {gbit: 2400, us: 5}, ethernet: {gbit: 25, us: 50}}
  machines:
    a: {device: H100, count: 2, link: nvlink, host: 10.0.0.1}   # host: for the plan
    b: {device: L40, count: 4, link: ethernet, host: 10.0.0.2}
  network: ethernet            # between machines
  between: {a-b: ethernet}     # pairs of machines that differ from it
"""
"""Form of a cluster file, by example."""


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm plan hetero`."""
    parser = FlagParser(
        prog="gllm plan hetero",
        description=__doc__.splitlines()[0],
        epilog=CLUSTER_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--cluster",
        required=True,
        help=f"a file of machines and links (see below), or {', '.join(cluster_names())}",
    )
    parser.add_argument("--model", required=True, help=", ".join(MODELS))
    parser.add_argument(
        "--workload",
        required=True,
        help=f"{', '.join(CLASSES)} (heavy or light prefill and decode of azure-conv), or a "
        "workload of gllm simulate",
    )
    parser.add_argument(
        "--costs",
        choices=tuple(COSTS),
        default="roofline",
        help="roofline: the simulator's; table1: the paper's, at peak rates",
    )
    parser.add_argument(
        "--credit",
        choices=[str(credit) for credit in PipelineCapacityRule],
        default=str(PipelineCapacityRule.PIPELINED),
        help="pipelined: stages work at once on one batch that memory holds; credited: each on a "
        "batch of that size; literal: one batch passes all stages",
    )
    parser.add_argument(
        "--budget", type=number_type(float, gt=0), help="seconds of the search; default: no limit"
    )
    parser.add_argument(
        "--seed", type=number_type(int, ge=0, le=INT32_MAX), default=0,
        help="seed of the search and of simulations (default 0)",
    )  # fmt: skip
    parser.add_argument("--simulate", action="store_true", help="simulate the plan's throughput")
    add_output_flags(parser)
    return parser


def find_cluster(name: str) -> DeviceCluster:
    """Return the predefined cluster of a name, or read a cluster file.

    Raises:
        ValueError: there is neither such a cluster nor such a file, or the file is invalid.
        OSError: the file cannot be read.
    """
    if name in cluster_names():
        return named_cluster(name)
    if not Path(name).exists():
        names = ", ".join(cluster_names())
        raise ValueError(f"cluster {name!r} is no file and none of {names}")
    return read_cluster(Path(name))


def format_plan_command(values: argparse.Namespace) -> str:
    """Return the `gllm plan hetero` command line that repeats the search of given flags."""
    words = ["gllm", "plan", "hetero"]
    for name in ("cluster", "model", "workload", "costs", "credit", "budget", "seed"):
        value = getattr(values, name)
        if value is not None:
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def format_hetero_plan(plan: HeteroPlan) -> str:
    """Return a plan of prefill and decode engines on mixed GPUs as text, for printing."""
    problem = plan.problem
    return "\n\n".join(
        [
            f"{problem.model} on {problem.cluster.describe(problem.cluster.all_devices)}, "
            f"{problem.workload}: {plan.best.score.flow:.3g} requests/s, "
            f"{plan.tokens_per_second:.0f} output tokens/s",
            replica_table(plan),
            draw_placement(plan),
            draw_routes(plan),
            describe_hetero_search(plan),
        ]
    )


def plan(values: argparse.Namespace) -> Callable[[], ServingPlan]:
    """Partition a cluster of mixed GPUs into prefill and decode engines (HexGen-2); print them.

    Returns:
        A function that makes the serving plan, which `gllm up` runs, for `--output`.

    Raises:
        ValueError: a name is unknown, or the cluster has no room for two engines.
        OSError: the cluster file cannot be read.
    """
    budget = SearchBudget(values.budget, MAX_EVALUATIONS)
    problem = ServiceProblem(
        values.model,
        values.workload,
        find_cluster(values.cluster),
        prices=PRICE_TABLES["hexgen-2"],
        seed=values.seed,
    )
    planner = make_planner(problem, values.costs, PipelineCapacityRule(values.credit))
    best = plan_replicas(problem, planner, budget)
    print(format_hetero_plan(best))
    if values.simulate:
        run = simulate_plan(best, values.seed)
        print(f"\nsimulated: {run.simulated:.3g} requests/s, {run.error:+.0%} of the estimate")

    def lay_out() -> ServingPlan:
        print()
        return make_serving_plan(best, format_plan_command(values))

    return lay_out


def replica_table(plan: HeteroPlan) -> str:
    """Return a table of a plan's engines: GPUs, parallelism, layers, capacity and request rate."""
    rows = []
    for name, (replica, flow) in plan.best.engines().items():
        rows.append(
            [
                name,
                str(replica.phase),
                plan.problem.cluster.describe(replica.group),
                replica.degrees,
                ",".join(str(stage.layers) for stage in replica.stages),
                f"{replica.latency:.3g}",
                "-" if replica.phase is Phase.PREFILL else str(replica.batch),
                f"{replica.capacity:.3g}",
                f"{flow:.3g}",
                f"{flow / replica.capacity:.0%}",
            ]
        )
    header = [
        "engine", "phase", "devices", "parallelism", "layers", "latency s", "batch", "capacity /s",
        "flow /s", "used",
    ]  # fmt: skip
    return format_table(header, rows)


def draw_placement(plan: HeteroPlan) -> str:
    """Return a text diagram with a line per machine: engine and stage of each of its GPUs."""
    cluster = plan.problem.cluster
    cells: list[list[str]] = [[] for _ in cluster.nodes]
    for name, (replica, _) in plan.best.engines().items():
        for number, stage in enumerate(replica.stages):
            for place in stage.devices:
                cells[place].append(f"{name}.{number}")
    width = max((len(cell) for row in cells for cell in row), default=0)
    name_width = max(len(node.name) for node in cluster.nodes)
    lines = []
    for node, row in zip(cluster.nodes, cells, strict=True):
        row += ["idle"] * (node.num_devices - len(row))
        boxes = " ".join(f"[{cell:^{max(width, 4)}}]" for cell in row)
        lines.append(f"{node.name:{name_width}}  {node.device:9} {boxes}")
    return "\n".join(lines)


def draw_routes(plan: HeteroPlan) -> str:
    """Return a line per prefill engine with the share of its requests for each decode engine."""
    lines = []
    for source, targets in plan.best.routes().items():
        total = sum(targets.values())
        shares = ", ".join(f"{name} {flow / total:.0%}" for name, flow in targets.items())
        lines.append(f"{source} {total:.3g}/s -> {shares}")
    return "\n".join(lines)


def describe_hetero_search(plan: HeteroPlan) -> str:
    """Return the number of evaluated partitions and how the search ended, as text."""
    search = plan.search
    text = (
        f"first partition {search.first.score.flow:.3g}/s, best {search.best.score.flow:.3g}/s "
        f"after {search.num_evaluations} partitions ({search.num_flows} maximum flows, "
        f"{search.num_restarts} restarts)"
    )
    if search.is_complete:
        text += "; no single change improves the first local optimum. "
    else:
        text += "; the budget ended before every change of the first local optimum was tried. "
    return text + (
        "Left out: groups whose ranks span machines, unequal shares of layers beside those by "
        "memory, and partitions beyond the restarts."
    )
