"""`gllm plan pools`: prompt and token machines for a budget of power or cost, or for a rate."""

import argparse
from collections.abc import Callable, Sequence

from gllm.commands.plan.flags import add_plan_flags
from gllm.options.flags import FlagParser, number_type
from gllm.plan.best_first import SearchBudget
from gllm.plan.pools.clusters import MIN_SECONDS, MODEL, PROFILES, WORKLOADS
from gllm.plan.pools.design_search import BUDGETS
from gllm.plan.pools.planner import THROUGHPUT, PoolPlan, PoolSearch, best_plan, lay_out_pools
from gllm.plan.problem import ServiceProblem
from gllm.plan.serving_plan import ServingPlan
from gllm.plan.strategies import UnservableError
from gllm.sim.metrics.report import format_table

DESIGNS = ("AA", "HH", "HA", "HHcap")
"""Prompt and token machine: A: DGX-A100, H: DGX-H100, cap: with a power limit."""


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm plan pools`."""
    parser = FlagParser(prog="gllm plan pools", description=__doc__.splitlines()[0])
    parser.add_config_flag()
    parser.add_argument(
        "--model",
        default=MODEL,
        choices=tuple(PROFILES),
        help="model that Splitwise measured, at TP 8 on every machine (default %(default)s)",
    )
    parser.add_argument(
        "--designs",
        default=",".join(DESIGNS),
        help="prompt and token machine; A: DGX-A100, H: DGX-H100, cap: with a power limit "
        "(default all: AA,HH,HA,HHcap)",
    )
    parser.add_argument(
        "--workload",
        default="conversation",
        choices=tuple(WORKLOADS),
        help="lengths of Azure's traces (default %(default)s)",
    )
    parser.add_argument(
        "--objective",
        default=THROUGHPUT,
        choices=(THROUGHPUT, *BUDGETS),
        help="throughput: the most requests per second under one of the limits; others: the least "
        "of it for --rate",
    )
    positive = number_type(float, gt=0, le=1e6)
    for name in BUDGETS:
        unit = "number of machines" if name == "machines" else f"{name} in DGX-A100s"
        parser.add_argument(
            f"--max-{name}", type=positive, metavar="NUMBER", help=f"limit of throughput: {unit}"
        )
    parser.add_argument(
        "--rate", type=positive, help="requests per second to serve, for the other objectives"
    )
    parser.add_argument(
        "--scale",
        type=number_type(int, ge=1, le=1000),
        default=1,
        help="simulate clusters of this fraction of the size: 5 is a fifth",
    )
    parser.add_argument(
        "--seconds",
        type=number_type(float, ge=0, le=1e6),
        default=MIN_SECONDS,
        help="least time in which the requests of a simulation arrive (default %(default)g)",
    )
    add_plan_flags(parser, num_requests=150)
    return parser


def plan(values: argparse.Namespace) -> Callable[[], ServingPlan]:
    """Find the number of prefill and decode machines for each of Splitwise's designs; print them.

    Returns:
        A function that makes the serving plan, which `gllm up` runs, of the best cluster for
        `--output`.

    Raises:
        UnservableError: no cluster serves the workload.
        ValueError: flags do not fit each other.
    """
    problem = make_pools_problem(values)
    search = PoolSearch(problem, SearchBudget(values.budget), scale=values.scale)
    plans = [found for name in _design_names(values.designs) if (found := search.plan(name))]
    if not plans:
        raise UnservableError(_explain(search))
    print(format_plans(plans, problem, values.scale))
    best = best_plan(plans, problem.objective)
    print(f"\n{best.name}, {best.cluster}: best for {problem.objective}")
    return lambda: lay_out_pools(best, problem)


def _design_names(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",")]
    if unknown := [name for name in names if name not in DESIGNS]:
        raise ValueError(f"--designs {text}: {unknown[0]!r} is none of {', '.join(DESIGNS)}")
    return names


def make_pools_problem(values: argparse.Namespace) -> ServiceProblem:
    """Return the model, workload, objective and limits that the flags describe.

    Raises:
        ValueError: the objective lacks its limit or its rate, or has one that it does not use.
    """
    limits = {name: getattr(values, f"max_{name}") for name in BUDGETS}
    bounds = {name: limit for name, limit in limits.items() if limit is not None}
    flags = ", ".join(f"--max-{name}" for name in BUDGETS)
    if values.objective == THROUGHPUT:
        if len(bounds) != 1 or values.rate is not None:
            raise ValueError(f"--objective throughput needs one of {flags}, and no --rate")
    elif bounds or values.rate is None:
        raise ValueError(f"--objective {values.objective} needs --rate, and none of {flags}")
    return ServiceProblem(
        values.model,
        values.workload,
        rate=values.rate,
        objective=values.objective,
        bounds=bounds,
        num_requests=values.requests,
        min_seconds=values.seconds,
        seed=values.seed,
    )


def format_plans(plans: Sequence[PoolPlan], problem: ServiceProblem, scale: int) -> str:
    """Return a table with the best cluster of each design.

    Args:
        plans: the clusters.
        problem: objective and workload of the search.
        scale: factor by which the simulated clusters are smaller than the planned ones.
    """
    rows = [
        [
            plan.name,
            str(plan.cluster),
            f"{plan.rate:.1f}",
            f"{plan.cluster.power:.1f}",
            f"{plan.cluster.cost:.1f}",
            f"{plan.cluster.dollars_per_hour:.0f}",
            str(plan.cluster.num_machines),
            f"{plan.num_points}{'' if plan.is_complete else ', not all'}",
        ]
        for plan in plans
    ]
    header = ["design", "cluster", "requests/s", "power", "cost", "$/h", "machines", "points"]
    size = f"1/{scale} of the size" if scale > 1 else "full size"
    return (
        f"{problem.model}, {problem.workload}, simulated at {size} within nine SLOs\n\n"
        f"{format_table(header, rows)}"
    )


def _explain(search: PoolSearch) -> str:
    """Return why no cluster serves the workload: the SLO that binds."""
    if not search.worst:
        return f"nothing was simulated ({search.budget.refusal()}): raise --budget"
    closest = min(search.worst.values(), key=lambda margin: margin.slowdown / margin.limit)
    return (
        f"no cluster serves the workload within the nine SLOs: P{closest.percent} of "
        f"{closest.metric} binds, {closest.slowdown:.2f} times that of an idle DGX-A100 where "
        f"{closest.limit:g} is the limit: raise the limit of the cluster or lower --rate"
    )
