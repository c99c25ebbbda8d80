"""`gllm plan scale`: GPUs per engine, and engines by request rate, within an SLO (Aladdin)."""

import argparse
from collections.abc import Callable

from gllm.commands.plan.flags import (
    add_budget_flag,
    add_output_flags,
    add_slo_flags,
    format_interval,
)
from gllm.observability.progress import show_progress
from gllm.options.flags import FlagParser, number_type
from gllm.options.options import INT32_MAX, MAX_TIMEOUT_SECONDS
from gllm.options.slo import parse_slo
from gllm.plan.best_first import SearchBudget
from gllm.plan.prices import DEFAULT_PRICES, parse_prices
from gllm.plan.problem import ServiceProblem
from gllm.plan.scale.fleet_size import MAX_REQUESTS, JudgedFleet
from gllm.plan.scale.service_plan import (
    BASELINE,
    ScaleResult,
    ScaleSearch,
    affordable_workers,
    to_serving_plan,
)
from gllm.plan.serving_plan import ServingPlan
from gllm.plan.strategies import UnservableError
from gllm.sim.capacity import SearchEndedError
from gllm.sim.hardware.devices import DEVICES, LINKS
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.metrics.report import format_table
from gllm.sim.workloads.lengths import WORKLOAD_HELP

RANK_LINK = "nvlink"


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
        choices=tuple(LINKS),
        help=f"between the GPUs of an engine (default {RANK_LINK})",
    )
    parser.add_argument(
        "--gpus", type=number_type(int, ge=1, le=64),
        help="GPUs per engine; default: the number with the cheapest engines for the rate",
    )  # fmt: skip
    parser.add_argument(
        "--max-request-tokens", type=number_type(int, ge=2, le=INT32_MAX), metavar="TOKENS",
        help="cut longer requests to this many tokens, prompt and output together; default: "
        "requests beyond what the model and the engines hold are refused",
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
        "--seconds", type=positive, default=30.0,
        help="least length of a simulation, extended until it decides (default %(default)g)",
    )  # fmt: skip
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
        max_request_tokens=values.max_request_tokens,
        seed=values.seed,
    )
    price = problem.prices.get(values.device)
    affordable_workers(price, 1, values.max_dollars)
    if values.gpus == 1 and values.rank_link is not None:
        raise ValueError(
            "--rank-link: an engine of --gpus 1 has no link between GPUs: leave it out"
        )
    try:
        with show_progress("simulation", name="scale", stays=False) as bar:
            result = ScaleSearch(
                problem,
                values.gpus,
                values.rank_link or RANK_LINK,
                budget=SearchBudget(values.budget, clock=values.clock, begin=values.begin),
                on_outcome=bar.update,
                on_best=lambda gpus, fleet: print(_format_best(gpus, fleet, price), flush=True),
            ).run()
    except SearchEndedError as error:
        raise UnservableError(f"{error}: raise --budget, or lower --seconds") from None
    most = affordable_workers(price, result.worker.num_gpus, values.max_dollars)
    print(_format(result, values.rate, price))
    if result.num_workers(values.rate) > most:
        rate = (most - result.rule.c5) / result.rule.k5
        print(
            f"beyond --max-dollars: {most:g} engines serve about {max(0.0, rate):.3g} requests per "
            "second"
        )
        return None
    return lambda: to_serving_plan(problem, result, values.startup_seconds)


def _format_best(num_gpus: int, fleet: JudgedFleet, price: float | None) -> str:
    """Return a line about the cheapest fleet so far."""
    count = fleet.num_workers
    cost = "" if price is None else f", {price * num_gpus * count:.2f} $/h"
    return f"best so far: {count} engines of {num_gpus} GPUs{cost}; {fleet.attainment}"


def _format(result: ScaleResult, rate: float, price: float | None) -> str:
    """Return the tables of worker types and of fleets, the rule, the bound and what is missing."""
    fit, rule = result.fit, result.rule
    lines = [
        f"engines = ceil({rule.k5:.3g} rate {rule.c5:+.3g}): {result.num_workers(rate)} for "
        f"{rate:g} requests per second",
        _format_bound(result, rate, price),
        f"linear latencies: largest error {fit.prefill_max_error:.1%} of prefills, "
        f"{fit.decode_max_error:.1%} of decodes",
        f"requests of up to {result.worker.max_model_len} tokens are accepted",
    ]
    attainment = result.points[0].placed.attainment
    if not attainment.is_met:
        lines.append(f"{attainment}: raise --budget, or add an engine to be sure")
    if result.num_cut:
        lines.append(f"{result.num_cut} of {MAX_REQUESTS} requests were cut to their limit")
    if result.note:
        lines.append(f"not complete: {result.note}")
    tables = (_format_options(result), _format_points(result, price))
    return "\n\n".join([*tables, "\n".join(lines)])


def _format_bound(result: ScaleResult, rate: float, price: float | None) -> str:
    num_gpus, least = result.num_workers(rate) * result.worker.num_gpus, result.min_gpus
    cost = "" if price is None else f", {price * least:.2f} $/h"
    return (
        f"bound: no plan for {rate:g} requests per second has fewer than {least} GPUs{cost}; this "
        f"one has {num_gpus / least - 1:.0%} more"
    )


def _format_options(result: ScaleResult) -> str:
    workers = {worker.num_gpus: worker for worker in result.workers}
    rows = []
    for option in result.options:
        worker = workers.get(option.num_gpus)
        cells = [""] * 4
        if worker is not None:
            cells = [
                f"{worker.memory_rate:.0f}", f"{worker.slo_rate:.0f}",
                f"{worker.memory_batch:.0f}", str(worker.slo_batch),
            ]  # fmt: skip
        is_chosen = option.num_gpus == result.worker.num_gpus
        rows.append(
            [
                f"{option.num_gpus}{' *' if is_chosen else ''}", *cells,
                str(option.min_engines or ""),
                "" if option.fleet is None else str(option.fleet.num_workers),
            ]
        )  # fmt: skip
    header = [
        "GPUs", "tokens/s/GPU by memory", "by SLO", "batch by memory", "by SLO",
        "engines, at least", "engines",
    ]  # fmt: skip
    notes = [f"{each.num_gpus} GPUs: {each.note}" for each in result.options if each.note]
    return "\n".join([format_table(header, rows), *notes])


def _format_points(result: ScaleResult, price: float | None) -> str:
    gpus, rows = result.worker.num_gpus, []
    for point in reversed(result.points):
        # The router runs as many engines as the rule says, which may be more than the fewest.
        count = result.num_workers(point.rate)
        placed, baseline = point.placed, point.baseline
        other = "" if baseline is None else str(baseline.num_workers)
        saved = "" if baseline is None else f"{1 - placed.num_workers / baseline.num_workers:.0%}"
        cost = "" if price is None else f"{price * gpus * count:.2f}"
        rows.append(
            [
                f"{point.rate:.3g}", str(count), str(gpus * count), cost,
                format_interval(placed.attainment), other, saved,
            ]
        )  # fmt: skip
    header = [
        "requests/s",
        "engines",
        "GPUs",
        "$/h",
        "within limits",
        f"engines, {BASELINE}",
        "saved",
    ]
    return format_table(header, rows)
