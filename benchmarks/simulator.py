"""Measure what a simulation costs: CPU seconds, memory, and time per decode row by engines.

A cluster is compared with its own engines alone, one after another, each with the requests that the
router gave it: the same rows in the same micro-batches. Each figure comes from a process of its
own; cluster and lone engines take turns. Requests are those of azure-conv at 2.2 per second and
engine, 0.86 of the capacity of qwen2.5-32b on four L20.
Run: python -m benchmarks.simulator
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from benchmarks.confidence import format_range
from gllm.sim.cluster.cluster import ClusterRun, simulate_cluster
from gllm.sim.cluster.router import make_router
from gllm.sim.deployment import roofline_deployment
from gllm.sim.metrics.report import format_table
from gllm.sim.workloads.requests import make_workload

MODEL, DEVICE, STAGES, RATE, WORKLOAD = "qwen2.5-32b", "L20", 4, 2.2, "azure-conv"
CONTEXT = 16384
"""Tokens of a request at most."""
KILOBYTES_PER_MEGABYTE = 1024


class Usage(NamedTuple):
    """Resources of a process."""

    cpu_seconds: float
    peak_megabytes: float


class ClusterCost(NamedTuple):
    """Cost of simulated engines."""

    cpu_seconds: float
    """CPU time of the simulation alone."""
    num_rows: int
    """Rows of one token: each decode, and the last chunk of each prompt."""
    peak_megabytes: float
    """Peak memory of the process."""
    engines: list[int]
    """Number of the engine that served each request."""

    @property
    def microseconds_per_row(self) -> float:
        """CPU time per row."""
        return self.cpu_seconds / self.num_rows * 1e6


class Pair(NamedTuple):
    """Costs of a cluster and of its engines alone, measured one after the other."""

    together: ClusterCost
    alone: ClusterCost

    @property
    def ratio(self) -> float:
        """Time of the cluster in times of its engines alone."""
        return self.together.cpu_seconds / self.alone.cpu_seconds


def measure_command(num_requests: int) -> Usage:
    """Return the resources of `gllm simulate`, from its start to its table."""
    command = [sys.executable, "-m", "gllm", "simulate", "--device", DEVICE, "--model", MODEL]
    command += ["--pp", str(STAGES), "--workload", WORKLOAD, "--rate", str(RATE)]
    code = (
        "import resource, subprocess, sys;"
        "subprocess.run(sys.argv[1:], check=True, stdout=subprocess.DEVNULL);"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN);"
        "print(used.ru_utime + used.ru_stime, used.ru_maxrss)"
    )
    outer = [sys.executable, "-c", code, *command, "--requests", str(num_requests)]
    seconds, kilobytes = subprocess.check_output(outer, text=True).split()
    return Usage(float(seconds), float(kilobytes) / KILOBYTES_PER_MEGABYTE)


def simulate_engines(
    num_engines: int, num_requests: int, router: str, assigned: Sequence[int]
) -> ClusterCost:
    """Simulate a cluster in this process, or its engines alone.

    Args:
        num_engines: Number of engines.
        num_requests: Number of requests per engine.
        router: Name of the router.
        assigned: Number of the engine that serves each request alone; empty for a cluster.
    """
    jobs = make_workload(WORKLOAD, num_engines * num_requests, num_engines * RATE)
    deployments = {
        str(index): roofline_deployment(MODEL, DEVICE, STAGES, CONTEXT)
        for index in range(num_engines)
    }
    shares = [
        [job for job, engine in zip(jobs, assigned, strict=True) if engine == index]
        for index in range(num_engines if assigned else 0)
    ]
    begin = time.process_time()
    if assigned:
        runs = [
            simulate_cluster({name: deployment}, share, make_router(router, 0))
            for (name, deployment), share in zip(deployments.items(), shares, strict=True)
        ]
    else:
        runs = [simulate_cluster(deployments, jobs, make_router(router, 0))]
    seconds = time.process_time() - begin
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    num_rows = sum(each.line.num_tokens for run in runs for each in run.requests.values())
    engines = list(assigned) or find_engines(runs[0])
    return ClusterCost(seconds, num_rows, kilobytes / KILOBYTES_PER_MEGABYTE, engines)


def find_engines(run: ClusterRun) -> list[int]:
    """Return the number of the engine that served each request of a run."""
    served_by = {
        id(served): int(name)
        for name, engine in run.engines.items()
        for served in engine.record.requests.values()
    }
    return [served_by[id(served)] for _, served in sorted(run.requests.items())]


def measure_engines(
    num_engines: int, num_requests: int, router: str, assigned: Sequence[int] = ()
) -> ClusterCost:
    """Return the cost of `simulate_engines` in a process of its own."""
    values = [str(num_engines), str(num_requests), "--router", router]
    command = [sys.executable, "-m", "benchmarks.simulator", "--one-cluster", *values]
    printed = subprocess.check_output(command, input=json.dumps(list(assigned)), text=True)
    return ClusterCost(*json.loads(printed))


def measure_pairs(num_engines: int, num_requests: int, router: str, num_rounds: int) -> list[Pair]:
    """Measure a cluster and its engines alone in turns; the first of each round changes."""
    # This run shows who serves what; it is not counted.
    engines = measure_engines(num_engines, num_requests, router).engines
    pairs = []
    for index in range(num_rounds):
        costs: dict[bool, ClusterCost] = {}
        for is_alone in (True, False) if index % 2 else (False, True):
            assigned = engines if is_alone else []
            costs[is_alone] = measure_engines(num_engines, num_requests, router, assigned)
        pairs.append(Pair(costs[False], costs[True]))
        figures = [f"{each.microseconds_per_row:.1f}" for each in pairs[-1]]
        print("measured", num_engines, "engines: together, alone", *figures, file=sys.stderr)
    return pairs


def format_page(options: argparse.Namespace) -> str:
    """Measure everything and return the tables."""
    tables = []
    if options.requests:
        tables.append(format_commands(options.requests))
    if options.engines:
        tables.append(format_clusters(options))
    return "\n\n".join(tables) + "\n"


def format_commands(counts: Iterable[int]) -> str:
    """Measure `gllm simulate` with these numbers of requests; return the table."""
    rows = []
    for num_requests in counts:
        usage = measure_command(num_requests)
        rows.append([str(num_requests), f"{usage.cpu_seconds:.1f}", f"{usage.peak_megabytes:.0f}"])
        print("measured", *rows[-1], file=sys.stderr)
    return format_table(["requests", "CPU seconds, start to table", "peak memory, MB"], rows)


def format_clusters(options: argparse.Namespace) -> str:
    """Measure each cluster and its engines alone; return the table of medians."""
    rows = []
    for num_engines in options.engines:
        pairs = measure_pairs(
            num_engines, options.requests_per_engine, options.router, options.rounds
        )
        rows.append(
            [
                str(num_engines),
                str(num_engines * options.requests_per_engine),
                format_range([each.together.microseconds_per_row for each in pairs], 1),
                format_range([each.alone.microseconds_per_row for each in pairs], 1),
                format_range([each.ratio for each in pairs], 2),
                f"{max(each.together.peak_megabytes for each in pairs):.0f}",
            ]
        )
    header = ["engines", "requests", "us per row, together", "alone", "ratio", "peak memory, MB"]
    return format_table(header, rows)


def main() -> None:
    """Print the tables, or measure one cluster."""
    parser = argparse.ArgumentParser(description=__doc__)
    for flag, counts in (("--requests", [2000, 10_000]), ("--engines", [1, 2, 4, 8])):
        parser.add_argument(flag, type=int, nargs="*", default=counts, metavar="N")
    parser.add_argument("--requests-per-engine", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5, help="pairs of runs of each cluster")
    parser.add_argument("--router", default="round-robin")
    parser.add_argument("--output", type=Path, help="also write the tables to a file")
    parser.add_argument("--one-cluster", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_cluster:
        num_engines, num_requests = options.one_cluster
        assigned = json.load(sys.stdin)
        print(json.dumps(simulate_engines(num_engines, num_requests, options.router, assigned)))
        return
    page = format_page(options)
    print(page, end="")
    if options.output:
        options.output.write_text(page)


if __name__ == "__main__":
    main()
