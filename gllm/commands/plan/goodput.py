"""`gllm plan goodput`: prefill and decode engines with the highest goodput per GPU."""

import argparse
from collections.abc import Callable, Mapping

from gllm.commands.plan.flags import add_plan_flags, add_slo_flags
from gllm.options.flags import FlagParser, FlagType, input_file, number_type
from gllm.options.slo import parse_slo
from gllm.plan.best_first import SearchBudget
from gllm.plan.goodput.engines import COST_KINDS, MAX_MODEL_LEN, EngineCosts
from gllm.plan.goodput.planner import GoodputPlan, GoodputPlanner
from gllm.plan.goodput.search_results import PhaseSearch, UnitSearch
from gllm.plan.nodes import equal_nodes
from gllm.plan.problem import ServiceProblem
from gllm.plan.serving_plan import ServingPlan
from gllm.sim.hardware.devices import DEVICES, LINKS
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.metrics.report import format_table
from gllm.sim.workloads.lengths import WORKLOAD_HELP

PLACEMENTS = ("together", "apart")
"""DistServe's Algorithm 2, for slow networks between nodes, and Algorithm 1, for fast ones."""
RESERVE = 0.5
"""Share of the budget in which the plan that a search found is judged."""
NUM_SHOWN = 8
"""Rows of the table at most."""


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm plan goodput`."""
    parser = FlagParser(prog="gllm plan goodput", description=__doc__.splitlines()[0])
    parser.add_config_flag()
    _add_problem_flags(parser)
    parser.add_argument(
        "--rate",
        type=number_type(float, gt=0, le=1e6),
        help="requests per second to serve with the fewest GPUs; default: as many as the cluster "
        "serves",
    )
    add_plan_flags(parser, num_requests=300)
    return parser


def _add_problem_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of model, cluster, workload and limits."""
    count = number_type(int, ge=1, le=1024)
    parser.add_argument(
        "--model",
        default="opt-13b",
        choices=tuple(MODELS),
        metavar="MODEL",
        help=f"model by its shape: {', '.join(MODELS)}",
    )
    parser.add_argument(
        "--costs",
        default="distserve",
        choices=COST_KINDS,
        help="step times; distserve, vllm: published coefficients of OPT models on A100s; "
        "roofline: data sheet of --device; batches: fitted to --batches",
    )
    parser.add_argument(
        "--batches",
        metavar="FILE",
        type=FlagType(input_file),
        help="measured batches: tp,phase,requests,tokens,milliseconds",
    )
    parser.add_argument(
        "--device",
        default="A100-80G",
        choices=tuple(DEVICES),
        metavar="DEVICE",
        help=f"device of every node: {', '.join(DEVICES)}",
    )
    parser.add_argument("--nodes", type=count, default=1, help="number of nodes")
    parser.add_argument(
        "--gpus-per-node", type=count, default=8, help="devices of each node (default 8)"
    )
    parser.add_argument(
        "--placement",
        default=PLACEMENTS[0],
        choices=PLACEMENTS,
        help="together: stages of both phases with the same layers share a node, so that KV caches "
        "stay within it; apart: each phase for itself, for fast networks between nodes",
    )
    parser.add_argument(
        "--network",
        default="nvlink",
        choices=tuple(LINKS),
        help="link between nodes, and with --placement apart from prefill to decode engines "
        "(default %(default)s)",
    )
    parser.add_argument("--workload", default="sharegpt", help=WORKLOAD_HELP)
    parser.add_argument(
        "--max-model-len",
        type=number_type(int, ge=1, le=10**7),
        default=MAX_MODEL_LEN,
        help="longest prompt + output (default %(default)s)",
    )
    add_slo_flags(
        parser,
        "limits of every request in seconds: ttft and tpot (default %(default)s)",
        "ttft=0.2,tpot=0.1",
    )


def plan(values: argparse.Namespace) -> Callable[[], ServingPlan]:
    """Find the prefill and decode engines with the highest goodput per GPU (DistServe); print them.

    Returns:
        A function that makes the serving plan, which `gllm up` runs, for `--output`.

    Raises:
        UnservableError: no candidate serves the workload within the limits.
        ValueError: flags do not fit each other.
    """
    problem = make_goodput_problem(values)
    costs = EngineCosts(values.costs, values.device, values.batches or "", values.max_model_len)
    # The engines for a rate are judged alone, without a search for their goodput.
    reserve = RESERVE if values.rate is None else 0.0
    budget = SearchBudget(values.budget, None, values.clock, reserve, values.begin)
    planner = GoodputPlanner(
        problem,
        costs,
        budget,
        network=values.network,
        on_best=lambda text: print(f"best so far: {text}", flush=True),
    )
    place = planner.place_together if values.placement == "together" else planner.place_apart
    best = place(values.rate)
    print(format_plan(best, problem))
    return lambda: planner.lay_out(best)


def make_goodput_problem(values: argparse.Namespace) -> ServiceProblem:
    """Return the model, workload, request rate and latency limits that the flags describe.

    Raises:
        ValueError: limits are missing, or flags do not fit each other.
    """
    limits = parse_slo(values.slo, values.attainment)
    limits.require("ttft", "tpot")
    if (values.costs == "batches") != bool(values.batches):
        raise ValueError("--costs batches and --batches FILE belong together: give both or none")
    return ServiceProblem(
        values.model,
        values.workload,
        equal_nodes(values.nodes, values.gpus_per_node, values.device),
        limits=limits,
        num_requests=values.requests,
        seed=values.seed,
    )


def format_plan(plan: GoodputPlan, problem: ServiceProblem) -> str:
    """Return the best candidates as tables, and the chosen engines, as text."""
    parts = [_search_table(title, search) for title, search in plan.searches.items()]
    attained, num_gpus = plan.attainment, plan.system.num_gpus
    bound = f"no plan is above {plan.bound:.2f} requests/s on {problem.cluster.num_devices} GPUs"
    gap = plan.bound / plan.rate - 1
    if not plan.searches:
        bound = f"no plan has fewer than {plan.bound:g} GPUs"
        gap = num_gpus / plan.bound - 1
    parts.append(
        f"{plan.system.placement}: {num_gpus} GPUs, {plan.per_gpu:.3f} requests/s per GPU\n"
        f"at {plan.rate:.2f} requests/s {100 * attained.share:.1f} % of the requests are within "
        f"both limits ({100 * attained.low:.1f} to {100 * attained.high:.1f} % of "
        f"{attained.num_requests} simulated; goal: {100 * problem.limits.attainment:g} %)\n"
        f"bound by closed forms: {bound} (gap {100 * gap:.0f} %); {plan.num_judged} judged"
    )
    return "\n\n".join(parts)


def _search_table(title: str, search: PhaseSearch | UnitSearch) -> str:
    """Return the best candidates of a search, and how many others there were."""
    ranked = sorted(
        ((value, str(candidate)) for candidate, value in search.evaluated), reverse=True
    )
    rows = [[name, f"{value:.3f}" if value else "no better"] for value, name in ranked]
    others: Mapping[str, int] = search.pruned + search.left_out
    lines = [format_table([title, "goodput, requests/s per GPU"], rows[:NUM_SHOWN])]
    lines += [f"{count} not simulated: {reason}" for reason, count in others.items()]
    return "\n".join(lines)
