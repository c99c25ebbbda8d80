"""`gllm plan scale`: GPUs per engine, and engines by request rate, within an SLO (Aladdin)."""

import argparse
from collections.abc import Callable

from gllm.commands.plan.flags import add_budget_flag, add_output_flags, add_slo_flags
from gllm.observability.progress import show_progress
from gllm.options.flags import FlagParser, number_type
from gllm.options.options import MAX_TIMEOUT_SECONDS
from gllm.options.slo import parse_slo
from gllm.plan.best_first import SearchBudget
from gllm.plan.prices import DEFAULT_PRICES, parse_prices
from gllm.plan.problem import ServiceProblem
from gllm.plan.scale.service_plan import (
    BASELINE,
    ScaleResult,
    affordable_workers,
    plan_scale,
    to_serving_plan,
)
from gllm.plan.serving_plan import ServingPlan
from gllm.plan.strategies import UnservableError
from gllm.sim.capacity import SearchEndedError
from gllm.sim.hardware.devices import DEVICES, LINKS
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.metrics.report import format_table
from gllm.sim.workloads.lengths import WORKLOAD_HELP


def make_parser() -> argparse.ArgumentParser:
    """Return the argument parser of `gllm plan scale`."""
    parser = FlagParser(prog="gllm plan scale", description=__doc__.splitlines()[0])
    positive = number_type(float, gt=0)
    add_slo_flags(
        parser,
        "limits of each request in seconds: ttft=1.6,atgt=0.075 (atgt: mean time per token after "
        "the first, also tpot)",
        attainment=0.99,
    )
    parser.add_argument("--trace", required=True, metavar="WORKLOAD", help=WORKLOAD_HELP)
    parser.add_argument("--rate", required=True, type=positive, help="requests per second")
    parser.add_argument(
        "--model", default="llama-2-70b", choices=tuple(MODELS), metavar="MODEL",
        help=f"one of {', '.join(MODELS)} (default llama-2-70b)",
    )  # fmt: skip
    parser.add_argument(
        "--device", default="A100-80G", choices=tuple(DEVICES), help="(default A100-80G)"
    )
    parser.add_argument(
        "--rank-link",
        default="nvlink",
        choices=tuple(LINKS),
        help="between the GPUs of an engine (default %(default)s)",
    )
    parser.add_argument(
        "--gpus", type=number_type(int, ge=1, le=64),
        help="GPUs per engine; default: those with the most tokens per second and GPU",
    )  # fmt: skip
    parser.add_argument(
        "--max-dollars", metavar="DOLLARS", type=positive,
        help="most dollars per hour; more engines are refused",
    )  # fmt: skip
    add_budget_flag(parser, "until all rates are searched")
    parser.add_argument(
        "--prices",
        default=DEFAULT_PRICES,
        help="table or DEVICE=DOLLARS_PER_HOUR (default %(default)s)",
    )
    parser.add_argument(
        "--startup-seconds", type=number_type(float, gt=0, le=MAX_TIMEOUT_SECONDS),
        help="measured time from the start of an engine until it serves, for the plan",
    )  # fmt: skip
    parser.add_argument(
        "--seconds", type=positive, default=120.0, help="length of a simulation (default 120)"
    )
    parser.add_argument(
        "--seed", type=number_type(int, ge=0, le=2**31), default=0,
        help="seed of lengths and arrivals (default 0)",
    )  # fmt: skip
    add_output_flags(parser)
    return parser


def plan(values: argparse.Namespace) -> Callable[[], ServingPlan] | None:
    """Find the GPUs per engine and the number of engines for a request rate (Aladdin); print both.

    Returns:
        A function that makes the serving plan, which `gllm up` runs, for `--output`; None if more
        engines are needed than `--max-dollars` allows.

    Raises:
        UnservableError: the search exceeds `--budget`.
        ValueError: input is invalid, or no engine meets the latency limits.
    """
    limits = parse_slo(values.slo, values.attainment)
    problem = ServiceProblem(
        values.model,
        values.trace,
        devices=(values.device,),
        rate=values.rate,
        limits=limits,
        prices=parse_prices(values.prices),
        min_seconds=values.seconds,
        seed=values.seed,
    )
    price = problem.prices.get(values.device)
    try:
        with show_progress("simulation", name="scale", stays=False) as bar:
            result = plan_scale(
                problem, values.gpus, values.rank_link, bar.update, SearchBudget(values.budget)
            )
    except SearchEndedError as error:
        raise UnservableError(f"{error}: raise --budget, or lower --seconds") from None
    most = affordable_workers(price, result.worker.num_gpus, values.max_dollars)
    print(_format(result, values.rate, price))
    if result.num_workers(values.rate) > most:
        rate = (most - result.rule.c5) / result.rule.k5 if result.rule.k5 else 0.0
        print(
            f"beyond --max-dollars: {most:g} engines serve about {max(0.0, rate):.3g} requests per "
            "second"
        )
        return None
    return lambda: to_serving_plan(problem, result, values.startup_seconds)


def _format(result: ScaleResult, rate: float, price: float | None) -> str:
    """Return the tables of worker types and of fleets, and the rule."""
    gpus = result.worker.num_gpus
    types = [
        [
            f"{worker.num_gpus}{' *' if worker.num_gpus == gpus else ''}",
            f"{worker.memory_rate:.0f}", f"{worker.slo_rate:.0f}", f"{worker.memory_batch:.0f}",
            str(worker.slo_batch),
        ]
        for worker in result.workers
    ]  # fmt: skip
    header = ["GPUs", "tokens/s/GPU by memory", "by SLO", "batch by memory", "by SLO"]
    text = format_table(header, types)
    rows = []
    for point in result.points:
        count = point.placed.num_workers
        other = "more than 4 x" if point.baseline is None else str(point.baseline.num_workers)
        saved = "" if point.baseline is None else f"{1 - count / point.baseline.num_workers:.0%}"
        cost = "" if price is None else f"{price * gpus * count:.2f}"
        rows.append([f"{point.rate:.3g}", str(count), str(gpus * count), cost, other, saved])
    fleet_header = ["requests/s", "engines", "GPUs", "$/h", f"engines, {BASELINE}", "saved"]
    fit, rule = result.fit, result.rule
    return (
        f"{text}\n\n{format_table(fleet_header, rows)}\n\n"
        f"engines = ceil({rule.k5:.3g} rate {rule.c5:+.3g}): {result.num_workers(rate)} for "
        f"{rate:g} requests per second\n"
        f"linear latencies: largest error {fit.prefill_max_error:.1%} of prefills, "
        f"{fit.decode_max_error:.1%} of decodes"
    )
