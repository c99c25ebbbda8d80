"""Measure what a simulation costs: CPU seconds, memory, and time per decode row by engines.

Each figure comes from a process of its own; clusters are measured in turns. Requests are those of
azure-conv at 2.2 per second and engine, 0.86 of the capacity of qwen2.5-32b on four L20.
Run: python -m benchmarks.simulator
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

from gllm.sim.cluster.cluster import simulate_cluster
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
    """Cost of a simulated cluster."""

    cpu_seconds: float
    """CPU time of the simulation alone."""
    num_rows: int
    """Rows of one token: each decode, and the last chunk of each prompt."""
    peak_megabytes: float
    """Peak memory of the process."""

    @property
    def microseconds_per_row(self) -> float:
        """CPU time per row."""
        return self.cpu_seconds / self.num_rows * 1e6


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


def simulate_engines(num_engines: int, num_requests: int, router: str) -> ClusterCost:
    """Simulate a cluster in this process."""
    jobs = make_workload(WORKLOAD, num_engines * num_requests, num_engines * RATE)
    engines = {
        f"engine-{index}": roofline_deployment(MODEL, DEVICE, STAGES, CONTEXT)
        for index in range(num_engines)
    }
    begin = time.process_time()
    simulate_cluster(engines, jobs, make_router(router, 0))
    seconds = time.process_time() - begin
    num_rows = sum(job.num_output_tokens for job in jobs)
    kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return ClusterCost(seconds, num_rows, kilobytes / KILOBYTES_PER_MEGABYTE)


def measure_cluster(num_engines: int, num_requests: int, router: str) -> ClusterCost:
    """Return the cost of `simulate_engines` in a process of its own."""
    values = [str(num_engines), str(num_requests), "--router", router]
    command = [sys.executable, "-m", "benchmarks.simulator", "--one-cluster", *values]
    return ClusterCost(*json.loads(subprocess.check_output(command, text=True)))


def format_page(options: argparse.Namespace) -> str:
    """Measure everything and return the tables."""
    rows = []
    for num_requests in options.requests:
        usage = measure_command(num_requests)
        rows.append([str(num_requests), f"{usage.cpu_seconds:.1f}", f"{usage.peak_megabytes:.0f}"])
        print("measured", *rows[-1], file=sys.stderr)
    single = format_table(["requests", "CPU seconds, start to table", "peak memory, MB"], rows)
    return f"{single}\n\n{format_clusters(options)}\n"


def format_clusters(options: argparse.Namespace) -> str:
    """Measure each cluster as often as `options` says, in turns; return the table of medians."""
    costs: dict[int, list[ClusterCost]] = {count: [] for count in options.engines}
    for _ in range(options.rounds):
        for num_engines, measured in costs.items():
            measured.append(
                measure_cluster(num_engines, options.requests_per_engine, options.router)
            )
            figure = f"{measured[-1].microseconds_per_row:.1f}"
            print("measured", num_engines, "engines:", figure, "us per row", file=sys.stderr)
    rows = []
    for num_engines, measured in costs.items():
        per_row = sorted(each.microseconds_per_row for each in measured)
        rows.append(
            [
                str(num_engines),
                str(num_engines * options.requests_per_engine),
                f"{median(each.cpu_seconds for each in measured):.1f}",
                f"{median(per_row):.1f} ({per_row[0]:.1f} to {per_row[-1]:.1f})",
                f"{max(each.peak_megabytes for each in measured):.0f}",
            ]
        )
    header = ["engines", "requests", "CPU seconds", "microseconds per row", "peak memory, MB"]
    return format_table(header, rows)


def main() -> None:
    """Print the tables, or measure one cluster."""
    parser = argparse.ArgumentParser(description=__doc__)
    for flag, counts in (("--requests", [2000, 10_000]), ("--engines", [1, 2, 4, 8])):
        parser.add_argument(flag, type=int, nargs="*", default=counts, metavar="N")
    parser.add_argument("--requests-per-engine", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each cluster")
    parser.add_argument("--router", default="round-robin")
    parser.add_argument("--output", type=Path, help="also write the tables to a file")
    parser.add_argument("--one-cluster", type=int, nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_cluster:
        num_engines, num_requests = options.one_cluster
        print(json.dumps(simulate_engines(num_engines, num_requests, options.router)))
        return
    page = format_page(options)
    print(page, end="")
    if options.output:
        options.output.write_text(page)


if __name__ == "__main__":
    main()
