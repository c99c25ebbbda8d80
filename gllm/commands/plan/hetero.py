"""`gllm plan hetero`: prefill and decode replicas on unlike devices (HexGen-2)."""

import argparse
import shlex
import sys
from pathlib import Path

from gllm.options.flags import FlagParser, FlagType, number_type, output_file
from gllm.options.options import INT32_MAX
from gllm.plan.hetero.cluster import (
    DeviceCluster,
    cluster_names,
    named_cluster,
    read_cluster,
)
from gllm.plan.hetero.drawing import (
    describe_hetero_search,
    draw_placement,
    draw_routes,
    replica_table,
)
from gllm.plan.hetero.planner import COSTS, HeteroPlan, PlanProblem, plan_replicas
from gllm.plan.hetero.replicas import PipelineCredit
from gllm.plan.hetero.search import RefinementBudget
from gllm.plan.hetero.serving import make_serving_plan
from gllm.plan.hetero.simulation import simulate_plan
from gllm.plan.hetero.workload import CLASSES
from gllm.plan.serving_plan import write_plan
from gllm.sim.hardware.shapes import MODELS

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
    """Return the flags of the command."""
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
        choices=[str(credit) for credit in PipelineCredit],
        default=str(PipelineCredit.PIPELINED),
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
    parser.add_argument("--output", type=FlagType(output_file), help="file for the plan, as YAML")
    parser.add_argument(
        "--checkpoint",
        default="",
        metavar="MODEL",
        help="folder or hub name of the model in the plan; default: the value of --model",
    )
    return parser


def find_cluster(name: str) -> DeviceCluster:
    """Return a shipped cluster or that of a file. Raises ValueError or OSError."""
    if name in cluster_names():
        return named_cluster(name)
    if not Path(name).exists():
        names = ", ".join(cluster_names())
        raise ValueError(f"cluster {name!r} is no file and none of {names}")
    return read_cluster(Path(name))


def format_plan_command(values: argparse.Namespace) -> str:
    """Return the command line that repeats the plan."""
    words = ["gllm", "plan", "hetero"]
    for name in ("cluster", "model", "workload", "costs", "credit", "budget", "seed"):
        value = getattr(values, name)
        if value is not None:
            words += [f"--{name}", str(value)]
    return shlex.join(words)


def show_plan(plan: HeteroPlan) -> str:
    """Return the plan as text."""
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


def main(argv: list[str]) -> int:
    """Run the planner and return its exit status."""
    values = make_parser().parse_args(argv)
    budget = RefinementBudget()
    if values.budget is not None:
        budget.seconds = values.budget
    try:
        problem = PlanProblem(
            find_cluster(values.cluster),
            values.model,
            values.workload,
            values.costs,
            PipelineCredit(values.credit),
            values.seed,
            budget,
        )
        plan = plan_replicas(problem)
        print(show_plan(plan))
        if values.simulate:
            run = simulate_plan(plan, values.seed)
            print(f"\nsimulated: {run.simulated:.3g} requests/s, {run.error:+.0%} of the estimate")
        if values.output:
            serving = make_serving_plan(plan, format_plan_command(values), values.checkpoint)
            write_plan(serving, Path(values.output))
            print(f"\nwrote {values.output}")
    except (ValueError, OSError) as error:
        print(f"gllm plan hetero: {error}", file=sys.stderr)
        return 2
    return 0
