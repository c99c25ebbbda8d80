"""All outputs of simulations, planners and benchmarks take time in proportion to the requests."""

import ast
from collections.abc import Callable
from functools import cache, partial
from math import inf
from pathlib import Path

import pytest

from gllm.commands.bench.client import RequestResult
from gllm.commands.bench.report import (
    failure_lines,
    report_lines,
    request_details,
    summarize,
    tokens_by_second,
)
from gllm.commands.simulate import write_outputs
from gllm.observability.latency import RequestTimeline
from gllm.observability.step_log import StepLogEvent
from gllm.options.slo import Slo
from gllm.plan.plan_diff import (
    LoggedRun,
    compare_with_plan,
    format_figures,
    format_runs,
    read_engine_run,
)
from gllm.sim.configured import SimulationResult, build_simulation, run_simulation
from gllm.sim.deployment import simulate
from gllm.sim.description import describe_load
from gllm.sim.metrics.intervals import (
    bin_token_intervals,
    bubble_intervals,
    fill_gaps,
    micro_batch_intervals,
    select_window,
    stage_usages_in,
    token_intervals,
)
from gllm.sim.metrics.report import format_engine_table, format_metrics_table, summarize_run
from gllm.sim.metrics.run_record import build_run_record
from gllm.sim.options import SimulationConfig
from gllm.sim.workloads.requests import WorkloadRequest
from tests.plan.test_plan_diff import make_plan
from tests.support.sim.cluster_parts import make_deployment
from tests.support.sources import ROOT, name_of, sources, text_of, tree_of
from tests.support.work import count_lines

SMALL, FACTOR = 60, 4
"""Number of requests, and how many times as many there are in the second run."""
SLO = Slo(60.0)


@cache
def simulated(num_requests: int, engines: int = 1) -> SimulationResult:
    config = SimulationConfig(
        requests=num_requests,
        pipeline_parallel_size=2,
        max_request_tokens=16,
        engines=engines,
        rate=20.0,
    )
    return run_simulation(config, *build_simulation(config))


@cache
def logged(num_requests: int) -> list[StepLogEvent]:
    jobs = [WorkloadRequest(0.1 * index, 4, 4) for index in range(num_requests)]
    events: list[StepLogEvent] = []
    simulate(make_deployment(), jobs, events.append)
    return events


@cache
def outcomes(num_requests: int) -> list[RequestResult]:
    found = []
    for index in range(num_requests):
        times = [index + 0.1, index + 0.2]
        line = RequestTimeline(float(index), times, 2)
        failure = "HTTP 503" if index % 5 == 0 else ""
        found.append(RequestResult(line, 10, times[-1], ["text"], failure=failure))
    return found


def write_simulation(num_requests: int, folder: Path) -> None:
    write_outputs(simulated(num_requests), folder, {})


def tabulate_simulation(num_requests: int, folder: Path) -> None:
    for engines in (1, 2):
        result = simulated(num_requests, engines)
        format_metrics_table({"policy": result.summary})
        format_engine_table(result.engines)
        if result.load:
            describe_load(result.load)


def summarize_simulation(num_requests: int, folder: Path) -> None:
    run = simulated(num_requests).record
    summarize_run(run, SLO)
    bars, bubbles = micro_batch_intervals(run), bubble_intervals(run)
    stage_usages_in(run, bars, bubbles, *select_window(run))
    stretches = token_intervals(run)
    fill_gaps(stretches)
    bin_token_intervals(stretches, 100)


def read_log(num_requests: int, folder: Path) -> None:
    summarize_run(build_run_record(logged(num_requests)), SLO)


def compare_plan(num_requests: int, folder: Path) -> None:
    plan = make_plan("both", rate=10.0)
    runs: list[LoggedRun] = [read_engine_run(plan, "e0", logged(num_requests))]
    format_figures(compare_with_plan(plan, runs))
    format_runs(runs)


def report_benchmark(num_requests: int, folder: Path) -> None:
    results = outcomes(num_requests)
    report_lines(summarize(results, 100.0, (50, 99), SLO), inf, None)
    failure_lines(results)
    request_details(results)
    tokens_by_second([each.timeline for each in results])


OUTPUTS = [
    # Pictures take seconds; what is drawn in them is in the summary.
    pytest.param(write_simulation, marks=pytest.mark.full),
    tabulate_simulation,
    summarize_simulation,
    read_log,
    compare_plan,
    report_benchmark,
]


@pytest.mark.parametrize("write", OUTPUTS)
def test_outputs_are_linear_in_the_requests(
    write: Callable[[int, Path], None], tmp_path: Path
) -> None:
    counts = []
    write(2, tmp_path)  # Imports are not counted.
    for num_requests in (SMALL, FACTOR * SMALL):
        simulated(num_requests)
        simulated(num_requests, 2)
        logged(num_requests)
        call = partial(write, num_requests, tmp_path)
        counts.append(count_lines(call, str(ROOT / "gllm")))
    assert 0 < counts[1] <= 1.2 * FACTOR * counts[0]


BOUNDED = {
    "all_devices": "machines of a plan",
    "all_work": "needs of a router",
    "bubble_seconds": "stages",
    "busy_seconds": "stages",
    "certificate": "flags of a process",
    "decodes": "sizes of a profile, read once",
    "degrees": "stages",
    "devices_per_node": "machines of a plan",
    "is_served": "limits",
    "itl": "tokens of one request",
    "layer_counts": "stages",
    "nodes": "stages of an engine",
    "num_devices": "machines of a plan",
    "num_waiting": "links of a transfer",
    "peak_flops": "stages",
    "placement": "two phases",
    "power": "stages",
    "prefills": "sizes of a profile, read once",
    "price": "stages",
    "ranges": "columns of a table",
    "records": "lives of an engine",
    "uses_slack": "links of a transfer",
}
"""Properties with a loop over few values, and what these are. Others are methods or cached: a
property in a loop hides a loop inside a loop."""


def test_properties_do_not_loop_over_requests() -> None:
    loops = {}
    for path in sources("gllm/sim", "gllm/plan", "gllm/commands", "gllm/observability"):
        if "@property" not in text_of(path):
            continue
        classes = [each for each in tree_of(path).body if isinstance(each, ast.ClassDef)]
        for node in (member for each in classes for member in each.body):
            if isinstance(node, ast.FunctionDef) and is_property(node) and has_loop(node):
                loops[node.name] = name_of(path)
    assert {name: file for name, file in loops.items() if name not in BOUNDED} == {}
    assert set(BOUNDED) <= set(loops)


def is_property(node: ast.FunctionDef) -> bool:
    return any(isinstance(each, ast.Name) and each.id == "property" for each in node.decorator_list)


def has_loop(node: ast.AST) -> bool:
    loops = (ast.For, ast.While, ast.comprehension)
    calls = {"sum", "sorted", "any", "all", "map", "pairwise"}
    return any(
        isinstance(each, loops)
        or (
            isinstance(each, ast.Call) and isinstance(each.func, ast.Name) and each.func.id in calls
        )
        or (
            isinstance(each, ast.Call)
            and isinstance(each.func, ast.Name)
            and each.func.id in ("min", "max")
            and len(each.args) == 1
        )
        for each in ast.walk(node)
    )
