"""`gllm plan hetero`: prefill and decode replicas on unlike devices (HexGen-2)."""

import argparse
import shlex
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from gllm.commands.plan.flags import add_budget_flag, add_output_flags
from gllm.options.flags import FlagParser, number_type
from gllm.options.options import INT32_MAX
from gllm.plan.hetero.bound import bound_rate
from gllm.plan.hetero.evaluation import EvaluatedPlan
from gllm.plan.hetero.planner import (
    COSTS,
    HeteroPlan,
    check_fit,
    make_planner,
    make_serving_plan,
    plan_replicas,
)
from gllm.plan.hetero.replicas import Phase, PipelineCapacityRule
from gllm.plan.hetero.search import MAX_VAIN_RESTARTS, PlanBudget
from gllm.plan.hetero.simulation import RATE_SHARES, measure_rate, plan_fleet, simulate_plan
from gllm.plan.hetero.workload import CLASSES, share_above
from gllm.plan.nodes import DeviceCluster, cluster_names, named_cluster, read_cluster
from gllm.plan.prices import PRICE_TABLES
from gllm.plan.problem import ServiceProblem
from gllm.plan.serving_plan import ExpectedFigures, ServingPlan
from gllm.plan.strategies import UnservableError
from gllm.sim.capacity import SearchEndedError
from gllm.sim.hardware.devices import GBIT_BYTES
from gllm.sim.hardware.shapes import MODELS
from gllm.sim.metrics.report import format_table

NUM_REQUESTS = 5000
"""Default of `--requests`."""
SIMULATION_SHARE = 0.6
"""Share of the budget for simulations, if there are any."""
UNMEASURED_SHARE = 0.8
"""Share of the estimated capacity that a plan promises if it is not simulated."""
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
    add_budget_flag(parser, f"until {MAX_VAIN_RESTARTS} restarts find nothing better")
    parser.add_argument(
        "--seed", type=number_type(int, ge=0, le=INT32_MAX), default=0,
        help="seed of the search and of simulations (default 0)",
    )  # fmt: skip
    parser.add_argument(
        "--max-request-tokens",
        type=number_type(int, ge=2, le=INT32_MAX),
        help="cut longer requests to this many tokens, prompt and output together; without it "
        "requests beyond the model's context are refused",
    )
    parser.add_argument(
        "--simulate",
        action="store_true",
        help="simulate the plan's throughput, and the highest rate at which no queue grows",
    )
    parser.add_argument(
        "--requests",
        type=number_type(int, ge=8, le=10**6),
        help=f"least number of requests of that rate's simulation (default {NUM_REQUESTS}); only "
        "with --simulate",
    )
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


def check_context(problem: ServiceProblem) -> str:
    """Return a sentence about the requests of a workload that are cut; empty if none is.

    Raises:
        ValueError: Requests are longer than the model's context, or the limit is.
    """
    context, most = problem.shape.max_context, problem.max_request_tokens
    if context and most and most > context:
        raise ValueError(
            f"--max-request-tokens {most}: the context of {problem.model} is {context} tokens: "
            "lower it"
        )
    share = share_above(problem.workload, most or context) if most or context else 0.0
    if not share:
        return ""
    text = f"{share:.1%} of the requests of {problem.workload}"
    if most is None:
        raise ValueError(
            f"workload: {text} are longer than the context of {problem.model}, {context} tokens: "
            f"cut them by --max-request-tokens {context}, or choose another workload or model"
        )
    return f"\n\n{text} are cut to {most} tokens."


def format_plan_command(values: argparse.Namespace) -> str:
    """Return the `gllm plan hetero` command line that repeats the search of given flags."""
    words = ["gllm", "plan", "hetero"]
    names = (
        "cluster",
        "model",
        "workload",
        "max_request_tokens",
        "costs",
        "credit",
        "budget",
        "seed",
    )
    for name in names:
        value = getattr(values, name)
        if value is not None:
            words += [f"--{name.replace('_', '-')}", str(value)]
    return shlex.join(words)


def format_hetero_plan(plan: HeteroPlan, bound: float) -> str:
    """Return a plan of prefill and decode engines on mixed GPUs as text, for printing.

    Args:
        plan: The plan.
        bound: Upper bound of its rate in requests per second.
    """
    problem, flow = plan.problem, plan.best.score.flow
    return "\n\n".join(
        [
            f"{problem.model} on {problem.cluster.describe(problem.cluster.all_devices)}, "
            f"{problem.workload}: {flow:.3g} requests/s, "
            f"{plan.tokens_per_second:.0f} output tokens/s",
            replica_table(plan),
            draw_placement(plan),
            draw_routes(plan),
            link_table(plan),
            f"Bound: {bound:.3g} requests/s (relaxation: devices are divisible, stages never wait)"
            f"; this plan has {flow / bound:.0%} of it.",
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
    if values.requests is not None and not values.simulate:
        raise ValueError("--requests: it is the size of a simulation: add --simulate")
    values.requests = values.requests or NUM_REQUESTS
    reserve = SIMULATION_SHARE if values.simulate else 0.0
    budget = PlanBudget(values.budget, None, values.clock, reserve, values.begin)
    problem = ServiceProblem(
        values.model,
        values.workload,
        find_cluster(values.cluster),
        prices=PRICE_TABLES["hexgen-2"],
        max_request_tokens=values.max_request_tokens,
        seed=values.seed,
    )
    note = check_context(problem)
    planner = make_planner(problem, values.costs, PipelineCapacityRule(values.credit))

    def show(better: EvaluatedPlan) -> None:
        print(
            f"{budget.elapsed_seconds:7.1f} s  {better.score.flow:.4g} requests/s with "
            f"{len(better.prefill)} prefill and {len(better.decode)} decode engines",
            flush=True,
        )

    with stop_on_interrupt(budget):
        check_fit(problem)
        bound = bound_rate(planner, COSTS[values.costs])
        best = plan_replicas(problem, planner, budget, on_better=show)
        flow = best.best.score.flow
        print("\n" + format_hetero_plan(best, bound) + note)
        rate = UNMEASURED_SHARE * flow
        expected = ExpectedFigures(format_plan_command(values), rate, capacity=flow)
        if values.simulate:
            expected = measure(best, expected, values, budget)
        else:
            print(
                f"\nNot simulated: the plan promises {rate:.3g} requests/s, "
                f"{UNMEASURED_SHARE:.0%} of the estimate; --simulate measures the rate."
            )

    def lay_out() -> ServingPlan:
        print()
        return make_serving_plan(best, expected)

    return lay_out


def measure(
    plan: HeteroPlan, expected: ExpectedFigures, values: argparse.Namespace, budget: PlanBudget
) -> ExpectedFigures:
    """Simulate a plan, print its throughput and the rate at which it is stable; return that rate.

    Args:
        plan: The plan.
        expected: Estimated figures.
        values: `seed` and `requests`.
        budget: Budget of the command; simulations end with it.
    """
    seed, problem = values.seed, plan.problem
    try:
        peak = simulate_plan(plan, seed, budget.check)
        print(f"\nsimulated: {peak.simulated:.3g} requests/s, {peak.error:+.0%} of the estimate")
        fleet = plan_fleet(problem, plan.planner, plan.best, seed + 1, budget.check)
        limit = min(peak.simulated, peak.estimate)
        stable = measure_rate(fleet, problem, limit, seed + 1, values.requests)
    except SearchEndedError as error:
        print(f"\nThe simulations did not end: {error}. The promised rate is not measured.")
        return expected
    if stable is None:
        raise UnservableError(
            f"stability: the queues of the plan grow even at {RATE_SHARES[-1] * limit:.3g} "
            "requests/s, simulated: add devices, or choose other --costs"
        )
    print(
        f"stable at {stable.rate:.3g} requests/s, which the plan promises: {stable.num_requests} "
        f"requests of another seed, median TTFT {stable.ttft_seconds:.3g} s, median TPOT "
        f"{1e3 * stable.tpot_seconds:.3g} ms"
    )
    return msgspec.structs.replace(
        expected,
        rate=stable.rate,
        capacity=limit,
        ttft_seconds=stable.ttft_seconds,
        tpot_seconds=stable.tpot_seconds,
    )


@contextmanager
def stop_on_interrupt(budget: PlanBudget) -> Iterator[None]:
    """End a search at Ctrl-C, which then returns its best plan; a second Ctrl-C ends the command.

    Args:
        budget: Budget of the search.
    """
    before = signal.getsignal(signal.SIGINT)

    def stop(number: int, frame: object) -> None:
        budget.stop("interrupted")
        signal.signal(signal.SIGINT, before)

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


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


def link_table(plan: HeteroPlan) -> str:
    """Return a table of the use of each machine's links: activations and KV transfers."""
    cluster, rows = plan.problem.cluster, []
    for index, node in enumerate(cluster.nodes):
        inner = 0.0
        used: dict[float, dict[bool, float]] = {}
        for link, share in plan.best.flow.links.items():
            if link.node != index:
                continue
            if link.is_of_machine:
                used.setdefault(link.bandwidth, {})[link.is_up] = share
            else:
                inner = max(inner, share)
        for bandwidth, shares in sorted(used.items()) or [(0.0, {})]:
            gbit = bandwidth / GBIT_BYTES
            cells = [
                f"{shares.get(is_up, 0.0) * gbit:.3g} ({shares.get(is_up, 0.0):.0%})"
                for is_up in (True, False)
            ]
            network = [f"{gbit:.3g}", *cells] if shares else ["-", "0", "0"]
            rows.append([node.name, *network, f"{inner:.0%}"])
    header = ["machine", "link Gbit/s", "sends Gbit/s", "receives Gbit/s", "busiest device link"]
    return format_table(header, rows)


def describe_hetero_search(plan: HeteroPlan) -> str:
    """Return the number of evaluated partitions and how the search ended, as text."""
    search = plan.search
    text = (
        f"first partition {search.first.score.flow:.3g}/s, best {search.best.score.flow:.3g}/s "
        f"after {search.num_evaluations} partitions ({search.num_flows} maximum flows, "
        f"{search.num_restarts} restarts)"
    )
    if plan.num_parts:
        text += f"; began with plans of {plan.num_parts} parts of the cluster"
    if search.is_complete:
        text += "; no single change improves the first local optimum. "
    else:
        text += "; the search ended before every change of the first local optimum was tried. "
    text += (
        "Not tried: groups whose ranks span machines, shares of layers other than by memory, and "
        "partitions beyond the restarts"
    )
    return text + (f"; the search ended early: {search.ending}." if search.ending else ".")
