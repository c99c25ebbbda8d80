"""`gllm plan pools`: prompt and token machines for a budget of power or cost, or for a rate."""

import argparse
from collections.abc import Callable, Sequence

from gllm.commands.plan.flags import add_plan_flags, format_interval
from gllm.options.flags import FlagParser, number_type
from gllm.options.options import INT32_MAX
from gllm.plan.best_first import SearchBudget
from gllm.plan.pools.clusters import (
    MAX_REQUESTS,
    MIN_SECONDS,
    MODEL,
    PROFILES,
    WORKLOADS,
)
from gllm.plan.pools.design_search import BUDGETS
from gllm.plan.pools.planner import THROUGHPUT, PoolPlan, PoolSearch, best_plan, lay_out_pools
from gllm.plan.problem import ServiceProblem
from gllm.plan.serving_plan import ServingPlan
from gllm.plan.strategies import UnservableError
from gllm.sim.hardware.machines import machine_pair
from gllm.sim.metrics.report import format_table
from gllm.sim.workloads.requests import make_workload

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
        help="search clusters of this fraction of the size first, 5 is a fifth, then refine the "
        "best ones at full size",
    )
    parser.add_argument(
        "--seconds",
        type=number_type(float, ge=0, le=1e6),
        default=MIN_SECONDS,
        help="least time in which the requests of a simulation arrive; simulations are extended "
        "until they decide (default %(default)g)",
    )
    parser.add_argument(
        "--max-request-tokens",
        type=number_type(int, ge=2, le=INT32_MAX),
        metavar="TOKENS",
        help="cut longer requests to this many tokens, prompt and output together; default: none, "
        "and a plan is refused where some exceed the model's context",
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
    search = PoolSearch(
        problem,
        SearchBudget(values.budget, clock=values.clock, begin=values.begin),
        scale=values.scale,
        on_best=lambda plan: print(f"best so far: {_describe(plan, problem)}", flush=True),
    )
    best = report_search(search, _design_names(values.designs))
    return lambda: lay_out_pools(best, problem)


def report_search(search: PoolSearch, designs: list[str]) -> PoolPlan:
    """Search for the best cluster of each design; print them, and the reasons of the others.

    Args:
        search: the search.
        designs: names of the designs.

    Returns:
        The best plan.

    Raises:
        UnservableError: no cluster serves the workload.
    """
    problem = search.problem
    plans = search.plan_all(designs)
    reasons = "\n".join(f"{name}: {reason}" for name, reason in search.refused.items())
    if not plans:
        raise UnservableError(f"no design serves the workload\n{reasons}")
    print(format_plans(plans, problem, search.scale))
    if reasons:
        print(f"\n{reasons}")
    if search.end_reason:
        print(f"\nnot complete: {search.end_reason}")
    best = best_plan(plans, problem.objective)
    print(f"\n{_describe(best, problem)}: best for {problem.objective}")
    print(_format_bound(best, [search.bound(machine_pair(name)) for name in designs], problem))
    if best.scale > 1:
        print(
            f"undecided: {best.name} was simulated at 1/{best.scale} of its size alone: raise "
            "--budget"
        )
    if best.attainment is not None and not best.attainment.is_met:
        print(
            f"undecided: {best.name} keeps the nine limits in a run of "
            f"{best.attainment.num_requests} requests, but the interval of the nearest one reaches "
            f"below its goal of {best.attainment.goal:.0%}: raise --requests, or add machines"
        )
    print(_format_lengths(problem))
    return best


def _format_lengths(problem: ServiceProblem) -> str:
    """Return how many requests are cut, or are longer than the model's context."""
    jobs = make_workload(WORKLOADS[problem.workload], MAX_REQUESTS, seed=problem.seed)
    lengths = [job.num_prompt_tokens + job.num_output_tokens for job in jobs]
    context, most = problem.shape.max_context, problem.max_request_tokens
    num_cut = 0 if most is None else sum(length > most for length in lengths)
    num_beyond = sum(min(length, most or length) > context for length in lengths)
    text = f"{num_cut} of {MAX_REQUESTS} requests were cut"
    if not num_beyond:
        return text
    return (
        f"{text}; {num_beyond} are longer than the context of {problem.model}, {context} tokens, "
        "so that no plan can be written: cut them (--max-request-tokens)"
    )


def _describe(plan: PoolPlan, problem: ServiceProblem) -> str:
    """Return the cluster of a plan, the figure of the objective, and the verdict of its test."""
    text = f"{plan.name}, {plan.cluster}, {plan.cluster.dollars_per_hour:.0f} $/h"
    if problem.objective == THROUGHPUT:
        text += f": {plan.rate:.3g} requests/s"
    else:
        text += f": {problem.objective} {BUDGETS[problem.objective](plan.cluster):.3g}"
    return text if plan.attainment is None else f"{text}; {plan.attainment}"


def _format_bound(plan: PoolPlan, bounds: Sequence[float], problem: ServiceProblem) -> str:
    """Return the bound of the objective over all designs, and the gap of the best plan."""
    if problem.objective == THROUGHPUT:
        bound = max(bounds)
        return (
            f"bound: no cluster of these designs serves more than {bound:.3g} requests/s; the gap "
            f"is {bound / plan.rate - 1:.0%}"
        )
    bound = min(bounds)
    value = BUDGETS[problem.objective](plan.cluster)
    return (
        f"bound: no cluster of these designs has a {problem.objective} below {bound:.3g}; the gap "
        f"is {value / bound - 1:.0%}"
    )


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
        max_request_tokens=values.max_request_tokens,
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
            "" if plan.attainment is None else format_interval(plan.attainment),
            f"{plan.num_points}{'' if plan.is_complete else ', not all'}",
        ]
        for plan in plans
    ]
    header = [
        "design",
        "cluster",
        "requests/s",
        "power",
        "cost",
        "$/h",
        "machines",
        "within the nearest limit",
        "points",
    ]
    size = f"1/{scale} of the size, then at full size" if scale > 1 else "full size"
    return (
        f"{problem.model}, {problem.workload}, simulated at {size} within nine SLOs\n\n"
        f"{format_table(header, rows)}"
    )
